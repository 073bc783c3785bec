"""The layer between a model's gradients and its optimizers while a `fit` is elastic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np

from ef_common.collectives.gradients.arrays import ArrayBuckets, ArrayReduction, squared_norm
from ef_common.core.view import View
from ef_common.errors import UnsupportedError
from ef_common.launch.leaving import leaving_cleanly
from ef_common.session import Session
from ef_keras import hooks

Weights = Callable[[View], Sequence[float]]


class Reducer(ABC):
    """Gives a model's optimizers the mean of all members' gradients: Keras's hook is `Optimizer.apply`.

    Args:
        session: The worker's session.
        model: The model.
        weights: Weight of each member's gradient in a view.

    Attributes:
        on_update: Called with (contributors, loss) when a reduction has completed, before the update is made.
        on_wait: Called when there is nothing more to do than to wait for the other members.
        applied: Context in which an optimizer makes its update; called with it and the reduced gradients.
        fraction: Size of this worker's batch, as a part of a full one.
        wants_stop: This worker wants to stop after the next step; all then do.
        stop_agreed: All workers stop after this step.
        measures, asks, on_measured: See :class:`~ef_common.collectives.gradients.reducer.GradientReducer`.
        finds, heard: Asked before a reduction whether this worker has found the end of a shard in its next batch, and
            told how many members had; see :class:`~ef_common.data.stream_turns.StreamTurns`.
        error: The exception that ended a step within the framework's code, which may not pass it on.
        in_step: A step is running.
        in_update: An optimizer makes its update.
    """

    def __init__(self, session: Session, model: Any, weights: Weights) -> None:
        self.session = session
        self.model = model
        self.weights = weights
        self.on_update: Callable[[View, float | None], None] = lambda contributors, loss: None
        self.on_wait: Callable[[], None] = lambda: None
        self.applied: Callable[[Any, Sequence[Any]], AbstractContextManager[None]] = lambda *_: nullcontext()
        self.fraction: Callable[[], float] = lambda: 1.0
        self.wants_stop = False
        self.stop_agreed = False
        self.measures: Callable[[], bool] = lambda: False
        self.asks: Callable[[], float] = lambda: 0.0
        self.on_measured: Callable[[float, float, float], None] = lambda local, reduced, asked: None
        self.finds: Callable[[], bool] = lambda: False
        self.heard: Callable[[float], None] = lambda num_finds: None
        self.error: BaseException | None = None
        self.in_step = False
        self.in_update = False
        self._loss: Any = None
        self._values: ArrayBuckets | None = None
        self._attached: list[Any] = []
        self._strangers: list[Any] = []

    @abstractmethod
    def reduce(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any] | None:
        """Return the mean of the members' gradients and commit their samples; None if no update is due."""

    def attach(self) -> None:
        """Install the reducer between the model and its optimizers."""
        is_stateless = keras.config.backend() == "jax"
        for optimizer in hooks.all_optimizers(self.model):
            if is_stateless:
                optimizer.stateless_apply = _StatelessApply(self, optimizer, optimizer.stateless_apply)
            else:
                optimizer.apply = _Apply(self, optimizer, optimizer.apply)
            optimizer.scale_loss = _ScaleLoss(self, optimizer.scale_loss, is_stateless=is_stateless)
            self._attached.append(optimizer)
        name = "stateless_apply" if is_stateless else "apply"
        for optimizer in hooks.optimizers_within(self.model):
            setattr(optimizer, name, _Stranger(self, optimizer, getattr(optimizer, name)))
            self._strangers.append(optimizer)

    def detach(self) -> None:
        """Remove the reducer."""
        for optimizer in (*self._attached, *self._strangers):
            for name in ("apply", "stateless_apply", "scale_loss"):
                vars(optimizer).pop(name, None)
        self._attached, self._strangers = [], []

    def original_of(self, optimizer: Any) -> Callable[..., Any]:
        """The function that makes an optimizer's update."""
        own = vars(optimizer)
        found: Callable[..., Any] = (own.get("apply") or own["stateless_apply"]).original
        return found

    @contextmanager
    def updating(self) -> Iterator[None]:
        """An optimizer makes its update. The gradients that it passes to others within it are reduced already."""
        self.in_update = True
        try:
            yield
        finally:
            self.in_update = False

    def see_loss(self, loss: Any) -> None:
        """Record the loss of this step, before the backward pass."""
        self._loss = loss

    def take_loss(self) -> Any:
        """The loss of this step, once; None if the model's `train_step` does not report it."""
        loss, self._loss = self._loss, None
        return loss

    def begin(self, buckets: ArrayBuckets) -> ArrayReduction:
        """Begin a new reduction."""
        reduction = ArrayReduction(
            buckets, self.session, self.weights, fraction=self.fraction(), wants_stop=self.wants_stop
        )
        reduction.on_wait = self.on_wait
        reduction.measures = self.measures()
        reduction.asks = self.asks() if reduction.measures else 0.0
        return reduction

    def complete(self, reduction: ArrayReduction, loss: float | None) -> None:
        """Wait for the reduction, and commit."""
        reduction.finds = self.finds()
        with leaving_cleanly():
            contributors = self.session.run(reduction)
        reduction.read_flags()
        self.heard(reduction.num_finds)
        self.session.agree(reduction.num_changes, reduction.num_wishes)
        self.stop_agreed = reduction.num_stops > 0
        if reduction.measures and contributors.world_size > 1:
            local = reduction.squared_norms / contributors.world_size
            self.on_measured(local, squared_norm(reduction.reduced()[0]), reduction.asked)
        self.on_update(contributors, loss)

    def reduce_nothing(self) -> None:
        """After a step of a model without trainable weights: average its statistics, and commit its samples."""
        statistics = hooks.statistics(self.model)
        values = [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in statistics]
        if self._values is None:
            dtype = "float64" if any(value.dtype == np.float64 for value in values) else "float32"
            taken = [index for index, variable in enumerate(statistics) if hooks.is_taken(variable)]
            self._values = ArrayBuckets([], [value.shape for value in values], taken=taken, dtype=dtype)
        self.take_loss()  # nobody knows any more what it was in a graph
        reduction = self.begin(self._values)
        reduction.take(values)
        self.complete(reduction, None)
        for variable, value in zip(statistics, reduction.reduced()[1], strict=True):
            variable.assign(np.array(value))  # whose memory is that of the next reduction but one

    def guard(self, act: Callable[[], Any]) -> Any:
        """Run something that a framework calls, and keep its error, which the framework would convert."""
        try:
            return act()
        except BaseException as error:
            self.error = error
            raise


class _Apply:
    """`optimizer.apply` with the mean gradients."""

    def __init__(self, reducer: Reducer, optimizer: Any, original: Callable[..., Any]) -> None:
        self._reducer = reducer
        self._optimizer = optimizer
        self.original = original

    def __call__(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        grads = list(grads)
        if not self._reducer.in_update and any(gradient is not None for gradient in grads):
            given = trainable_variables
            variables = hooks.trained_variables(self._optimizer) if given is None else list(given)
            reduced = self._reducer.reduce(self._optimizer, grads, variables)
            if reduced is None:
                return None
            with self._reducer.updating(), self._reducer.applied(self._optimizer, reduced):
                return self.original(reduced, trainable_variables)
        return self.original(grads, trainable_variables)


class _StatelessApply:
    """`optimizer.stateless_apply`, which Keras's JAX backend calls in place of `apply`."""

    def __init__(self, reducer: Reducer, optimizer: Any, original: Callable[..., Any]) -> None:
        self._reducer = reducer
        self._optimizer = optimizer
        self.original = original

    def __call__(self, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any) -> Any:
        grads = list(grads)
        if not self._reducer.in_update and any(gradient is not None for gradient in grads):
            variables = hooks.trained_variables(self._optimizer)
            reduced = self._reducer.reduce(self._optimizer, grads, variables)
            if reduced is None:
                return trainable_variables, optimizer_variables
            with self._reducer.updating(), self._reducer.applied(self._optimizer, reduced):
                return self.original(optimizer_variables, reduced, trainable_variables)
        return self.original(optimizer_variables, grads, trainable_variables)


class _Stranger:
    """`apply` of an optimizer that a layer holds, which a step must not call: nobody would reduce its gradients."""

    def __init__(self, reducer: Reducer, optimizer: Any, original: Callable[..., Any]) -> None:
        self._reducer = reducer
        self._optimizer = optimizer
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._reducer.in_step:
            self._reducer.guard(self._refuse)
        return self._original(*args, **kwargs)

    def _refuse(self) -> None:
        raise UnsupportedError(
            "the model's train_step makes an update with an optimizer of a layer or model within it, whose gradients "
            "would not be reduced. Keep that optimizer in an attribute of the model that fit() trains, too: "
            f"self.second_optimizer = self.inner.optimizer. Received: {self._optimizer.name}"
        )


class _ScaleLoss:
    """`optimizer.scale_loss`, which Keras calls with the loss right before the backward pass."""

    def __init__(self, reducer: Reducer, original: Callable[[Any], Any], *, is_stateless: bool) -> None:
        self._reducer = reducer
        self._original = original
        self._is_stateless = is_stateless

    def __call__(self, loss: Any) -> Any:
        if self._is_stateless:
            from ef_keras import gradients_jax

            gradients_jax.see(loss, self._reducer.see_loss)
        else:
            self._reducer.see_loss(loss)
        return self._original(loss)
