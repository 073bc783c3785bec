"""Coverage-guided fuzzing of what reads bytes of others: ``python -m tests.fuzz --help``, or ``make fuzz``."""
