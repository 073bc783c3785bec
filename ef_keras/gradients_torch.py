"""Gradients of the torch backend, reduced during the backward pass as under Lightning.

Where `torch.compile` compiles the steps (`jit_compile=True`), its graphs end where the workers meet, which it must not
trace. The gradients of a compiled backward pass are complete only at its end, so they are reduced after it.

A `train_step` of the user's may change gradients behind the backward pass (to clip them, say), or compute them by
`torch.autograd.grad`. What it hands to the optimizer is reduced then, and nothing before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import torch
from numpy.typing import DTypeLike
from torch.nn import Parameter

from ef_common.collectives.gradients.reducer import GradientReducer
from ef_common.core.view import View
from ef_common.data.seeds import numbers_of
from ef_common.data.torch_determinism import Determinism, seed_everything, seed_torch, set_torch_states, torch_states
from ef_common.launch.leaving import leaving_cleanly
from ef_common.session import Session
from ef_keras import hooks
from ef_keras.reducer import Reducer


class TorchReducer(Reducer):
    """See `Reducer`."""

    def __init__(self, session: Session, model: Any, weights: Callable[[View], Sequence[float]]) -> None:
        super().__init__(session, model, weights)
        statistics = [variable.value for variable in hooks.statistics(model)]
        self._gradients = GradientReducer(
            session, model, weights=weights, buffers=statistics, parameters=partial(_parameters, model)
        )
        self._rates = hooks.rates(model)
        self._gradients.decides = self._own_rates
        self._told_rates: list[float] = []
        self._has_own_step = hooks.has_own_train_step(model)
        self._overlaps = not (model.jit_compile or self._has_own_step)
        untraced = torch.compiler.disable if model.jit_compile else _as_it_is
        self._begin: Callable[[], None] = untraced(self._before_backward)
        self._complete: Callable[..., None] = untraced(self._after_backward)

    def attach(self) -> None:
        """Stand between the model and its optimizers, and hook into its parameters."""
        super().attach()
        self._gradients.attach()

    def detach(self) -> None:
        """Step aside."""
        super().detach()
        self._gradients.detach()

    def see_loss(self, loss: Any) -> None:
        """The backward pass is about to begin."""
        super().see_loss(loss)
        self._begin()

    def _before_backward(self) -> None:
        self._gradients.fraction = self.fraction()
        self._gradients.before_backward(overlap=self._overlaps)

    def _own_rates(self) -> list[float]:
        self._told_rates = hooks.numbers_of(self._rates)
        return self._told_rates

    def _after_backward(self, loss: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        if self._has_own_step:
            for gradient, variable in zip(gradients, variables, strict=True):
                _hand_over(gradient, variable.value)
        self._gradients.wants_stop, self._gradients.finds = self.wants_stop, self.finds()
        self._gradients.measures, self._gradients.asks = self.measures, self.asks
        self._gradients.on_measured = self.on_measured
        with leaving_cleanly():
            contributors = self._gradients.after_backward()
        if contributors is not None:
            self.heard(self._gradients.num_finds)
            if self._gradients.decided != self._told_rates:  # reading them once more would wait for the device
                hooks.set_numbers(self._rates, self._gradients.decided)
        self.stop_agreed = self._gradients.num_stops > 0
        self.on_update(contributors or self.session.completed_in, None if loss is None else float(loss.detach()))

    def reduce(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The mean of what the members hand over, which then is the gradient of the parameters, too."""
        loss = self.take_loss()
        if loss is None:  # a `train_step` of the user's that does not scale its loss, or a second optimizer
            self._begin()
        self._complete(loss, gradients, variables)
        return [variable.value.grad for variable in variables]


def _parameters(model: Any) -> Iterator[Parameter]:
    """Parameters in the order of the model's variables, which is that of its layers.

    Keras gives them to torch sorted by their paths. As `dense_10` comes before `dense_9`, that order depends on how
    many layers a worker has made before; and of parameters of the same path, torch has one only.
    """
    known = set()
    for parameter in (*(variable.value for variable in model.weights), *model.parameters()):
        if id(parameter) not in known:
            known.add(id(parameter))
            yield parameter


def _hand_over(gradient: Any, parameter: torch.Tensor) -> None:
    """Let this be the gradient of a parameter. The reduction writes to it, so it is a copy of what the user has."""
    if gradient is None:
        parameter.grad = None
    elif gradient is not parameter.grad:
        parameter.grad = torch.as_tensor(gradient).detach().to(parameter, copy=True)


def _as_it_is(act: Callable[..., None]) -> Callable[..., None]:
    return act


class TorchPasses:
    """See :class:`~ef_keras.global_batch.Passes`."""

    def __init__(self) -> None:
        self._determinism: Determinism | None = None

    def hand_out(
        self,
        gradients: Sequence[Any],
        loss: Any,
        *,
        dtype: DTypeLike,
        receive: Callable[[Sequence[np.ndarray], float | None], None],
    ) -> None:
        """See the protocol."""
        arrays = [torch.as_tensor(gradient).detach().cpu() for gradient in gradients]
        wanted = torch.float64 if np.dtype(dtype) == np.float64 else torch.float32
        receive([array.to(wanted).numpy() for array in arrays], None if loss is None else float(loss.detach()))

    def apply(self, update: Callable[..., Any], gradients: Sequence[np.ndarray], variables: Sequence[Any]) -> None:
        """See the protocol."""
        tensors = [
            torch.from_numpy(gradient.copy()).to(variable.value.device, variable.value.dtype)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        with torch.no_grad():
            update(tensors, variables)

    def seed(self, key: Sequence[int]) -> None:
        """See the protocol."""
        seed_everything(key)

    def begin_determinism(self) -> None:
        """See the protocol."""
        self._determinism = Determinism()

    def end_determinism(self) -> None:
        """See the protocol."""
        if self._determinism is not None:
            self._determinism.undo()
            self._determinism = None


def memory_of(value: Any) -> np.ndarray:
    """The memory of a tensor, without a copy where it is the host's and NumPy knows its type."""
    if isinstance(value, torch.Tensor) and value.dtype != torch.bfloat16:
        found: np.ndarray = value.detach().cpu().numpy()
        return found
    return np.asarray(keras.ops.convert_to_numpy(value))


def random_state() -> list[np.ndarray]:
    """States of torch's generators: the one of the CPU, then those of the GPUs that have been used."""
    return [state.numpy().copy() for state in torch_states()]


def set_random_state(states: Sequence[np.ndarray]) -> None:
    """Restore these states."""
    set_torch_states([torch.from_numpy(np.array(state)) for state in states])


def adder_of(states: Sequence[Any]) -> Callable[[int], None]:
    """See `ef_keras.backends`. These variables have 32 bits."""

    def add(number: int) -> None:
        wrapped = int(np.array(number).astype(np.int32))
        with torch.no_grad():
            for state in states:
                state.value[0].add_(wrapped)

    return add


def own_numbers(rank: int) -> Callable[[], None]:
    """See `ef_keras.backends`."""
    number = int(torch.randint(1 << 31, ()))
    before = torch_states()
    seed_torch(numbers_of([number, rank], 1)[0])
    return lambda: set_torch_states(before)


@contextmanager
def drawn_from_key(key: Sequence[int]) -> Iterator[None]:
    """See `ef_keras.backends`."""
    before = random_state()
    seed_everything(key)
    try:
        yield
    finally:
        set_random_state(before)
