"""The tests of Lightning and of Keras themselves, with ElasticFlow put in (`make test-peers`).

Each test runs in three ways: *plain*, *alone* (no coordinator), and *in_a_job* (as the only worker of a job); Keras's
also as *two*: in both workers of one job at the same time. One that passes plain and fails otherwise is a difference
that a user may meet; those that are known are in `known_lightning.txt` and `known_keras.txt`, with reasons.

* Lightning's are in its repository, not in its wheel: the environment variable ``LIGHTNING_SRC`` names a checkout, best
  of the release that is installed. A test that names no strategy gets `ElasticFlowStrategy()`.
* Keras's are in its wheel. Each `fit`, `evaluate` and `predict` gets `ef_keras.callbacks()`, on TensorFlow and on
  torch. Those of trainers, callbacks, models and distillation are run: what a callback takes part in.

Two workers share each batch of a `fit` (`global_batch_size`), so that steps and losses are those of one process; what
cannot be shared (generators, `steps_per_execution`, accumulated gradients) gives each worker batches of its own. A test
passes if it passes in both; one with files counts in the worker that writes them. What they fail by is mostly their own
numbers: of batches, samples, or a single process.
"""
