"""The product, broken in many ways, one at a time: tests that let one of them pass are too weak (`make mutants`)."""
