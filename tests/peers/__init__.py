"""The tests of Lightning and of Keras themselves, with ElasticFlow put in (`make test-peers`).

Each test runs in three ways: *plain*, *alone* (no coordinator), and *in_a_job* (as the only worker of a job). One that
passes plain and fails otherwise is a difference that a user may meet; those that are known are in `known_lightning.txt`
and `known_keras.txt`, with reasons.

* Lightning's are in its repository, not in its wheel: the environment variable ``LIGHTNING_SRC`` names a checkout, best
  of the release that is installed. A test that names no strategy gets `ElasticFlowStrategy()`.
* Keras's are in its wheel. Each `fit`, `evaluate` and `predict` gets `ef_keras.callbacks()`, on TensorFlow and on
  torch. Those of trainers, callbacks, models and distillation are run: what a callback takes part in.
"""
