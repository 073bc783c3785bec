"""Lightning's own tests, with `ElasticFlowStrategy()` where a test names no strategy (`make test-peers`).

They are in its repository, not in its wheel: the environment variable ``LIGHTNING_SRC`` names a checkout, best of the
release that is installed. Each test runs in three ways: *plain*, *alone* (no coordinator), and *in_a_job* (as the only
worker of a job). One that passes plain and fails otherwise is a difference that a user may meet; those that are known
are in `known_failures.txt`, with reasons.
"""
