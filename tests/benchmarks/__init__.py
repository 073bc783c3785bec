"""Benchmarks: scripts whose last line of output is JSON; `python -m tests.benchmarks` runs them all."""
