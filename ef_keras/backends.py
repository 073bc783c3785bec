"""Which backend Keras uses, and the modules that serve it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from ef_common.core.compensation import Rule
from ef_common.core.view import View
from ef_common.errors import UnsupportedError, UsageError
from ef_common.horovod.library import built_for
from ef_common.session import Session
from ef_keras import hooks
from ef_keras.reducer import Reducer
from ef_keras.scaled_optimizer import ScaledNumbers, ScaledOptimizer

if TYPE_CHECKING:
    from ef_keras.global_batch import Passes

logger = logging.getLogger(__name__)

BACKENDS = ("gloo", "nccl", "horovod")
_DEFAULTS = {"tensorflow": "horovod", "torch": "nccl", "jax": "gloo"}


def check_backend() -> str:
    """Return the name of Keras's backend; refuse one that ElasticFlow does not support.

    Raises:
        UnsupportedError: The backend cannot be elastic.
    """
    name = str(keras.config.backend())
    if name not in ("tensorflow", "torch", "jax"):
        raise UnsupportedError(
            "elastic training works with Keras's tensorflow, torch and jax backends. Set KERAS_BACKEND to one of them. "
            f"Received: {name}"
        )
    return name


def engine(backend: str | None) -> str:
    """The engine of the data plane.

    Args:
        backend: "gloo", "nccl" (under torch: NCCL for what is on GPUs, if each worker has one of its own, and Gloo for
            all else), "horovod", or None for what fits: "nccl" under torch; Horovod under TensorFlow, or Gloo where
            Horovod has not been built for it but torch is there.

    Raises:
        UsageError: The name is unknown.
    """
    framework = check_backend()
    if backend not in (None, *BACKENDS):
        raise UsageError(f"unknown backend. Expected one of {BACKENDS}. Received: backend={backend!r}")
    if backend is None:
        # The Python code for TensorFlow is in every Horovod, also where only torch was there when it was built.
        backend = "gloo" if framework == "tensorflow" and built_for(framework) is None else _DEFAULTS[framework]
    if backend == "nccl":
        if framework != "torch":
            raise UsageError(
                f"backend='nccl' sums tensors of torch. Expected: KERAS_BACKEND=torch. Received: {framework}"
            )
        return "nccl"
    if backend == "gloo":
        if find_spec("torch") is None:
            raise UsageError(
                "no way to move data between the workers: build Horovod (elasticflow horovod build), or install torch"
            )
        return "gloo"
    return "horovod" if framework == "torch" else "horovod-tensorflow"


def build(model: Any, batch: Any) -> None:
    """Create all variables of model, metrics and optimizers that can be known before the first step.

    Args:
        model: The model, compiled.
        batch: One that its step would be given.

    Raises:
        UnsupportedError: There are layers whose variables cannot.
    """
    if check_backend() == "tensorflow":
        from ef_keras import tracing_tensorflow

        tracing_tensorflow.build(model, batch)
    else:
        hooks.build(model, batch)


def untraced(model: Any) -> AbstractContextManager[None]:
    """Within this context, nothing has been traced of what the user lets TensorFlow compile of a model's methods."""
    if check_backend() != "tensorflow":
        return nullcontext()
    from ef_keras import tracing_tensorflow

    return tracing_tensorflow.untraced(model)


def reducer_for(session: Session, model: Any, weights: Callable[[View], Sequence[float]]) -> Reducer:
    """The reducer of the current backend."""
    if check_backend() == "torch":
        from ef_keras.gradients_torch import TorchReducer

        return TorchReducer(session, model, weights)
    if check_backend() == "jax":
        from ef_keras.gradients_jax import JaxReducer

        return JaxReducer(session, model, weights)
    from ef_keras.gradients_tensorflow import TensorFlowReducer

    return TensorFlowReducer(session, model, weights)


def scaled_for(optimizer: Any, rule: Rule) -> ScaledOptimizer:
    """The object that compensates an optimizer under the current backend."""
    if check_backend() == "torch":
        return ScaledNumbers(optimizer, rule)
    if check_backend() == "jax":
        from ef_keras.scaled_jax import ScaledInStages

        return ScaledInStages(optimizer, rule)
    from ef_keras.scaled_tensorflow import ScaledTensors

    return ScaledTensors(optimizer, rule)


def passes_for(model: Any) -> Passes:
    """What the current backend does for the passes of a global batch."""
    if check_backend() == "torch":
        from ef_keras.gradients_torch import TorchPasses

        return TorchPasses()
    if check_backend() == "jax":
        from ef_keras.gradients_jax import JaxPasses

        return JaxPasses(model)
    from ef_keras.gradients_tensorflow import TensorFlowPasses

    return TensorFlowPasses(model)


def step_of(model: Any, reducer: Reducer, *, xla: bool) -> Callable[[Any], Any]:
    """An untraced train function of a model, which takes the batches of an execution and returns logs."""
    if check_backend() == "jax":
        from ef_keras.gradients_jax import JaxReducer, JaxStep

        return JaxStep(model, reducer if isinstance(reducer, JaxReducer) else None)
    if xla and check_backend() == "tensorflow" and model.jit_compile:
        if model.steps_per_execution == 1 or not hooks.has_own_train_function(model):
            from ef_keras.gradients_tensorflow import TensorFlowStep

            return TensorFlowStep(model)
        logger.warning(
            "the training steps of this fit are not compiled by XLA: the model has a make_train_function of its own, "
            "which takes several batches"
        )
        xla = False
    return hooks.new_train_function(model, xla=xla)


def entry_of(model: Any, step: Callable[[Any], Any]) -> Callable[..., Any]:
    """Turn a function that takes batches and returns logs into one that Keras can call as a train function."""
    if check_backend() == "jax":
        from ef_keras import gradients_jax

        return gradients_jax.entry(model, step)
    return step


def train_step_of() -> Callable[..., dict[str, Any]]:
    """The function that makes an update of a program: `train` of :mod:`ef_keras.steps_tensorflow` or its like."""
    if check_backend() == "jax":
        raise UnsupportedError(
            "ef_keras.model and elasticflow.train work with Keras's tensorflow and torch backends. Compile a model of "
            "Keras's own, or set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch. Received: jax"
        )
    if check_backend() == "torch":
        from ef_keras import steps_torch

        return steps_torch.train
    from ef_keras import steps_tensorflow

    return steps_tensorflow.train


def memory_of(value: Any) -> np.ndarray:
    """The content of a variable, a tensor or an array, without a copy where it is in host memory."""
    held = value.value if isinstance(value, keras.Variable) else value
    if isinstance(held, np.ndarray):
        return held
    if check_backend() == "torch":
        from ef_keras import gradients_torch

        return gradients_torch.memory_of(held)
    if check_backend() == "jax":
        from ef_keras import gradients_jax

        return gradients_jax.memory_of(held)
    from ef_keras import gradients_tensorflow

    return gradients_tensorflow.memory_of(held)


def random_state() -> list[np.ndarray]:
    """States of the backend's own generators: torch's dropout does not draw from Keras's."""
    if check_backend() == "torch":
        from ef_keras import gradients_torch

        return gradients_torch.random_state()
    return []


def set_random_state(states: Sequence[np.ndarray]) -> None:
    """Restore these states."""
    if states and check_backend() == "torch":
        from ef_keras import gradients_torch

        gradients_torch.set_random_state(states)


def drawn_from_key(key: Sequence[int]) -> AbstractContextManager[None]:
    """Within this context, random numbers of Python, NumPy and the backend are a function of the key.

    After it, the backend's go on as if nothing had been.
    """
    if check_backend() == "torch":
        from ef_keras import gradients_torch

        return gradients_torch.drawn_from_key(key)
    if check_backend() == "jax":
        from ef_keras import gradients_jax

        return gradients_jax.drawn_from_key(key)
    from ef_keras import gradients_tensorflow

    return gradients_tensorflow.drawn_from_key(key)


def adder_of(states: Sequence[Any]) -> Callable[[int], None]:
    """A function that adds a number to the first element of each of these variables of generators, with wraparound."""
    if check_backend() == "torch":
        from ef_keras import gradients_torch

        return gradients_torch.adder_of(states)
    if check_backend() == "jax":
        from ef_keras import gradients_jax

        return gradients_jax.adder_of(states)
    from ef_keras import gradients_tensorflow

    return gradients_tensorflow.adder_of(states)


def own_numbers(rank: int) -> Callable[[], None]:
    """Let the backend's own generators draw other numbers in each rank. Returns a function that ends this.

    All workers call both in the same steps, so that generators that were equal are equal after it.
    """
    if check_backend() == "torch":
        from ef_keras import gradients_torch

        return gradients_torch.own_numbers(rank)
    return lambda: None


def prepare_determinism() -> None:
    """Before any data are read: refuse a process that cannot compute deterministically, and set others up.

    Raises:
        UnsupportedError: The backend in use cannot.
        UsageError: Naming what to set.
    """
    if check_backend() == "jax":
        raise UnsupportedError(
            "deterministic training works with Keras's tensorflow and torch backends: nobody has shown yet that XLA "
            "gives the same bits in every process. Set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch. Received: jax"
        )
    if check_backend() == "tensorflow":
        from ef_keras.gradients_tensorflow import prepare_determinism as prepare

        prepare()
    elif "tensorflow" in sys.modules:  # its data sets may draw random numbers
        sys.modules["tensorflow"].config.experimental.enable_op_determinism()
