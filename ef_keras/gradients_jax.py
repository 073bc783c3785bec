"""Gradients of the JAX backend leave the step (Keras's or the user's), are reduced, and return to it.

To JAX, a step is a pure function of a state, which Keras holds outside of its variables from one step to the next.
Here the step is cut in two where its gradients go to the optimizer (see `stages_jax`), and before and after each step
the variables hold the state, as with other backends. Keras allows for that: it takes the state of its variables if a
callback has synchronized them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from ef_common.collectives.gradients.arrays import ArrayBuckets, Shape
from ef_common.core.view import View
from ef_common.data.seeds import seed_python
from ef_common.session import Session
from ef_keras import hooks
from ef_keras.reducer import Reducer
from ef_keras.stages_jax import StagedStep, call, hold


class JaxReducer(Reducer):
    """See `Reducer`."""

    def __init__(self, session: Session, model: Any, weights: Callable[[View], Sequence[float]]) -> None:
        super().__init__(session, model, weights)
        self._buckets: dict[Any, ArrayBuckets] = {}
        groups = hooks.variables_of_steps(model)
        places = {id(variable): place for place, variable in enumerate(chain(*groups))}
        self._rates = [variable for variable in hooks.rates(model) if id(variable) in places]
        statistics = hooks.statistics(model)
        self._carried = [*statistics, *self._rates]
        num_averaged = len(statistics) - sum(map(hooks.is_taken, statistics))
        self._taken = range(num_averaged, len(self._carried))
        self._places = [places[id(variable)] for variable in self._carried]
        self._known: Sequence[Any] = ()
        self._averaged: list[np.ndarray] = []
        self._made_late: list[bool] = []

    def reduce(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Within the trace of a step: the members' mean gradients, None where there is none."""
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        dense = [jnp.asarray(gradients[index]) for index in present]
        is_double = any(one.dtype == np.float64 for one in (*dense, *(v.value for v in self._carried)))
        dtype = "float64" if is_double else "float32"
        shapes = [tuple(one.shape) for one in dense]
        values = [tuple(variable.shape) for variable in self._carried]
        buckets = self._buckets.setdefault(
            (dtype, *shapes), ArrayBuckets(shapes, values, taken=self._taken, dtype=dtype)
        )
        flat = jnp.concatenate([one.astype(dtype).ravel() for one in dense])  # each array that leaves has its cost
        (means,) = call(lambda found: self.guard(partial(self._reduce, buckets, shapes, found[0])), [flat], like=[flat])
        reduced: list[Any] = [None] * len(gradients)
        for index, one, mean in zip(present, dense, _split(means, shapes), strict=True):
            reduced[index] = mean.astype(one.dtype)
        return reduced

    def know(self, state: Sequence[Any]) -> None:
        """Before a call out of a step: the state that it makes, as far as it is known. See `StagedStep`."""
        self._known = state

    def _local(self) -> list[np.ndarray]:
        """This worker's variables as its step makes them, or as they were if it only makes them after the update."""
        found = [self._known[place] for place in self._places]
        self._made_late = [value is None for value in found]
        return [
            np.asarray(variable.value if value is None else value)
            for variable, value in zip(self._carried, found, strict=True)
        ]

    def _reduce(self, buckets: ArrayBuckets, shapes: Sequence[Shape], flat: np.ndarray) -> list[np.ndarray]:
        local = self._local()
        arrays = [*_split(flat, shapes), *local]
        reduction = self.begin(buckets)
        for bucket in buckets.buckets:
            reduction.take([arrays[index] for index in bucket])
        self.complete(reduction, self.take_loss())
        means, values = reduction.reduced()
        self._averaged = [
            _difference(value, mine) if late else np.array(value)  # whose memory is that of the next reduction but one
            for value, mine, late in zip(values, local, self._made_late, strict=True)
        ]
        if self._rates:  # the update reads them in the next stage
            newest = zip(self._rates, values[-len(self._rates) :], strict=True)
            hold(self._rates, jax.device_put([np.array(value, variable.dtype) for variable, value in newest]))
        return [np.concatenate([mean.ravel() for mean in means])]  # a copy, too: their memory is that of a later one's

    def settle(self) -> None:
        """A step is over: the statistics are those of all members, and the learning rates those of the first one.

        One that it has made after the update is this worker's. It moves by what the members' mean before the step
        differs from this worker's value, so workers never differ by more than a step has added.
        """
        averaged, self._averaged = self._averaged, []
        changed: list[tuple[Any, Any]] = []
        for variable, value, late in zip(self._carried, averaged, self._made_late, strict=False):
            if not late:
                changed.append((variable, value.astype(variable.dtype)))
            elif value.any() and not hooks.is_taken(variable):  # the rows of a queue have moved on
                changed.append((variable, variable.value + value.astype(variable.dtype)))
        variables, values = [one for one, _ in changed], [value for _, value in changed]
        hold(variables, jax.device_put(values))


def _difference(mean: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Zero where they are equal, infinite values included."""
    mine = mine.astype(mean.dtype)
    difference: np.ndarray = np.subtract(mean, mine, out=np.zeros_like(mean), where=mean != mine)
    return difference


def _split(flat: Any, shapes: Sequence[Shape]) -> list[Any]:
    """The parts of a flat array."""
    ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
    return [flat[end - math.prod(shape) : end].reshape(shape) for end, shape in zip(ends, shapes, strict=True)]


class JaxStep:
    """The train function of a model while a `fit` is elastic. The variables hold the state before and after it.

    Args:
        model: The model, built and compiled.
        reducer: The reducer that averages its statistics, if there is one.
    """

    def __init__(self, model: Any, reducer: JaxReducer | None) -> None:
        self._reducer = reducer
        parts = hooks.parts_of(model.optimizer)
        momenta = [momentum for part in parts for momentum in hooks.momenta_with_rate(part)]
        self._step = StagedStep(
            model.train_step,
            hooks.variables_of_steps(model),
            late=[*momenta, *hooks.rates(model)],
            reads=hooks.shifts_of(model),
        )

    def __call__(self, batches: Iterable[Any]) -> Any:
        """Make a step with each of these batches. Returns the logs of the last one."""
        logs: Any = {}
        for batch in batches:
            if self._reducer is None:
                logs = self._step(batch)
            else:
                logs = self._step(batch, before_call=self._reducer.know)
                self._reducer.settle()
        return logs


def entry(model: Any, step: Callable[[Iterator[Any]], Any]) -> Callable[[Any, Iterator[Any]], tuple[Any, Any]]:
    """What Keras calls as its train function: takes the state that it has taken out of the variables."""
    groups = hooks.variables_of_steps(model)

    def train_function(state: Any, batches: Iterator[Any]) -> tuple[Any, Any]:
        for group, values in zip(groups, state, strict=True):
            hold(group, values)
        hooks.are_synced(model)
        logs = step(batches)
        return logs, tuple([variable.value for variable in group] for group in groups)

    return train_function


class JaxPasses:
    """See :class:`~ef_keras.global_batch.Passes`.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._update: StagedStep | None = None

    def hand_out(
        self,
        gradients: Sequence[Any],
        loss: Any,
        *,
        dtype: DTypeLike,
        receive: Callable[[Sequence[np.ndarray], float | None], None],
    ) -> None:
        """See the protocol. The loss was seen in the step."""

        def leave(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
            receive(arrays, None)
            return ()

        call(leave, [jnp.asarray(gradient).astype(np.dtype(dtype)) for gradient in gradients])

    def apply(self, update: Callable[..., Any], gradients: Sequence[np.ndarray], variables: Sequence[Any]) -> None:
        """See the protocol. The update is the stateless one."""
        optimizer = self._model.optimizer
        trained = hooks.trained_variables(optimizer)
        found = {id(v): gradient.astype(v.dtype) for gradient, v in zip(gradients, variables, strict=True)}

        def step(state: Any, gradients: Sequence[Any]) -> tuple[Any, Any]:
            return (), update(state[1], gradients, state[0])

        if self._update is None:
            variables = [trained, list(optimizer.variables)]
            self._update = StagedStep(step, variables, reads=hooks.shifts_of(self._model))
        self._update([found.get(id(variable)) for variable in trained])

    def seed(self, key: Sequence[int]) -> None:
        """See the protocol. JAX has no generators but Keras's."""
        seed_python(key)

    def begin_determinism(self) -> None:
        """See the protocol; it is refused before."""

    def end_determinism(self) -> None:
        """See the protocol."""


def see(loss: Any, tell: Callable[[float], None]) -> None:
    """Within a step: tell the loss, each time that one is made."""

    def leave(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        tell(float(arrays[0]))
        return ()

    call(leave, [loss])


def memory_of(value: Any) -> np.ndarray:
    """The memory of an array, without a copy where it is the host's."""
    return np.asarray(value)


def adder_of(states: Sequence[Any]) -> Callable[[int], None]:
    """See `ef_keras.backends`."""
    added = jax.jit(lambda values, term: [value + term for value in values])

    def add(number: int) -> None:
        hold(states, added([state.value for state in states], np.array([number, 0]).astype(states[0].dtype)))

    return add


@contextmanager
def drawn_from_key(key: Sequence[int]) -> Iterator[None]:
    """See `ef_keras.backends`. JAX has no generators but Keras's."""
    seed_python(key)
    yield
