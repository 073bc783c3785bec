"""Which tests run when: `make test` in minutes, `make test-all` before an issue is closed.

Every test belongs to both tiers, with two exceptions. A test marked `thorough` runs in `make test-all` alone. Of a
parametrized test with real processes `make test` runs one case; the cases of a file take turns (see `choice`).
"""
