"""The modules that the workers' forkservers import: one set for each framework, so that all tests share three servers.

Keras on torch runs on the CPU in all of them. The tests that need a GPU have hosts of their own (`tests.faults.hosts`).
"""

from __future__ import annotations

_COMMON = (
    "ef_common.launch.process",
    "ef_common.control.client",
    "ef_common.horovod.group",
    "tests.collectives.seats",
    "tests.faults.hosts",
)
TORCH = ("tests.faults.training", "ef_common.collectives.torch_group", *_COMMON)
"""Lightning's, under the first of its names: a worker of the other one forgets it first (see `training.use`)."""
KERAS = {
    "tensorflow": ("tests.faults.keras_tensorflow", "tests.keras.on_tensorflow", *_COMMON),
    # Keras imports TensorFlow on any backend, if it is installed, to seed it.
    "jax": ("tests.faults.keras_jax", "tests.keras.on_jax", "ef_common.collectives.torch_group", *_COMMON),
    "torch": ("tests.faults.keras_torch", "tests.keras.on_torch", "tensorflow", *_COMMON),
}
