"""A step on a global batch: this worker's passes, replacements for lost ones, one reduction, one update.

To Keras it is one step. Each pass is a run of the model's own train function in which `optimizer.apply` hands out the
gradients instead of applying them. Every pass starts from the statistics that the step began with (those of BatchNorm)
and from random generators that are a function of the seed, the epoch and the place of its samples. Nothing in it
therefore depends on who makes it, or on earlier passes.

The update is of `Σ share·gradient` over all passes, and statistics move by `Σ share·change`, where the share of a pass
is its part of the batch's samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import keras
import numpy as np
from numpy.typing import DTypeLike

from ef_common.collectives.gradients.canonical import CanonicalReduction
from ef_common.collectives.gradients.pieces import Pieces
from ef_common.collectives.gradients.shared import Array, SharedReduction, SumMemory
from ef_common.core.sharding import Window
from ef_common.errors import UnsupportedError
from ef_common.launch.leaving import leaving_cleanly
from ef_common.session import Session
from ef_keras import hooks, metrics
from ef_keras.random_numbers import set_seeds
from ef_keras.reducer import Reducer
from ef_keras.rows import num_samples
from ef_keras.training_data import TrainingData

Receive = Callable[[Sequence[np.ndarray], float | None], None]
Step = Callable[[Any], Any]

_NUM_FIXED_FLAGS = 3  # change pending, wants to stop, wish


class Passes(Protocol):
    """What a backend of Keras does for passes."""

    def hand_out(self, gradients: Sequence[Any], loss: Any, *, dtype: DTypeLike, receive: Receive) -> None:
        """Within a pass (or a graph that is being traced): let `receive` have the gradients and the loss of it."""

    def apply(self, update: Callable[..., Any], gradients: Sequence[np.ndarray], variables: Sequence[Any]) -> None:
        """Let an optimizer make its update. The arrays stay as they are."""

    def seed(self, key: Sequence[int]) -> None:
        """Let all random numbers but those of Keras's own generators be a function of the key from here on."""

    def begin_determinism(self) -> None:
        """From here on, an operation gives the same bits wherever it is run, or raises."""

    def end_determinism(self) -> None:
        """Bring back what was there."""


class GlobalReducer(Reducer):
    """Makes the steps of a `fit` on global batches.

    Args:
        session: The worker's session.
        model: The model, built.
        data: The data of the `fit`.
        passes: Passes of Keras's backend.
        make_step: Makes a train function of the model that has not been traced yet.
        deterministic: Sums must not depend on who computed which part.
    """

    def __init__(
        self,
        session: Session,
        model: Any,
        data: TrainingData,
        passes: Passes,
        *,
        make_step: Callable[[], Step],
        deterministic: bool,
    ) -> None:
        super().__init__(session, model, data.dealer.weights)
        self._data = data
        self._passes = passes
        self._make_step = make_step
        self._deterministic = deterministic
        self._steps: dict[Any, Step] = {}
        self._variables = list(model.trainable_variables)
        self._statistics = hooks.statistics(model)
        self._rates = hooks.rates(model)
        self._generators = hooks.seed_states(model)
        reset = {id(variable) for variable in (*self._statistics, *self._generators)}
        if not deterministic:  # else workers with different numbers of passes would round differently
            reset |= set(map(id, hooks.normalized_kernels(model)))
        self._others = [variable for variable in hooks.state_variables(model) if id(variable) not in reset]
        self._num_steps = 0
        self._looks = False
        shapes = [tuple(variable.shape) for variable in (*self._variables, *self._statistics)]
        kinds = {str(variable.dtype) for variable in (*self._variables, *self._statistics)}
        self._room = SumMemory(
            sum(map(_size, shapes)),
            num_flags=_NUM_FIXED_FLAGS + len(self._rates) + len(self._variables),
            dtype=np.float64 if "float64" in kinds else np.float32,
        )
        self._shapes = shapes
        self._places = {id(variable): index for index, variable in enumerate(self._variables)}
        self._starts: list[np.ndarray] = []
        self._seeds: list[np.ndarray] = []
        self._used = np.zeros(len(self._variables))
        self._target: tuple[list[np.ndarray], float] | None = None
        self._pass_loss: float | None = None
        self._batch_loss: float | None = 0.0
        self._results: Any = None
        self._reduction: SharedReduction | CanonicalReduction | None = None

    def attach(self) -> None:
        """Stand between the model and its optimizer."""
        if self._deterministic:
            self._passes.begin_determinism()
        super().attach()

    def detach(self) -> None:
        """Step aside."""
        super().detach()
        if self._deterministic:
            self._passes.end_determinism()

    # ------------------------------------------------------------ a step

    def run(self, batch: Any) -> Any:
        """Make a step; `batch` is that of this worker's first pass. Returns what the train function does."""
        return self._run(self._data.dealer.pieces, batch)

    def warm_up(self, batch: Any) -> None:
        """Make a step of this worker alone."""
        worker, size = self.session.worker.id, self._data.pass_size
        piece = size if self._deterministic else 1
        window = Window(0, num_samples(batch), (worker,), piece=piece)
        self._run(Pieces(window, worker, batch_size=max(size, num_samples(batch))), batch)

    def _run(self, pieces: Pieces, batch: Any) -> Any:
        kind = CanonicalReduction if self._deterministic else SharedReduction
        self._reduction = reduction = kind(self._room, self.session, pieces, self._flags)
        reduction.start()
        self._starts = [hooks.copied(variable).astype(self._room.dtype) for variable in self._statistics]
        self._seeds = [hooks.copied(state) for state in self._generators]
        self._used[:] = 0
        self._batch_loss = 0.0
        self._num_steps += 1
        self._looks = self._num_steps & (self._num_steps - 1) == 0
        pieces.compute = partial(self._make_up, pieces)
        passes = pieces.passes()
        if not passes:
            self._keep_step(pieces, batch)
        for number, some in enumerate(passes):
            self._pass(pieces, some, batch if number == 0 else self._data.fetch(some))
        with leaving_cleanly():
            contributors = self.session.run(reduction)
        changes, num_stops, wishes, *others = reduction.flags.tolist()
        rates, used = others[: len(self._rates)], others[len(self._rates) :]
        self.session.agree(changes, wishes)
        self.stop_agreed = num_stops > 0
        self.on_update(contributors, self._batch_loss)
        hooks.set_numbers(self._rates, rates)
        self._update(self._split(reduction.total), used)
        reduction.finish()
        return self._results

    def _flags(self) -> Sequence[float]:
        is_first = self._reduction is None or self._reduction.rank == 0  # whose learning rates are taken
        return [
            float(self.session.change_pending),
            float(self.wants_stop),
            float(self.session.agreements.wish),
            *(rate if is_first else 0.0 for rate in hooks.numbers_of(self._rates)),
            *self._used,
        ]

    def _update(self, sums: Sequence[np.ndarray], used: Sequence[float]) -> None:
        gradients = [(array, variable) for array, variable, n in zip(sums, self._variables, used, strict=False) if n]
        if gradients:
            optimizer = self._attached[0]
            with self.updating():
                self._passes.apply(self.original_of(optimizer), *map(list, zip(*gradients, strict=True)))
        changes = sums[len(self._variables) :]
        for variable, start, change in zip(self._statistics, self._starts, changes, strict=True):
            variable.assign(start + change)
        for state, value in zip(self._generators, self._seeds, strict=True):
            state.assign(value)

    # ------------------------------------------------------------ passes

    def _make_up(self, pieces: Pieces, some: Sequence[int]) -> None:
        """Somebody is lost, who had these."""
        self._pass(pieces, some, self._data.fetch(some))

    def _keep_step(self, pieces: Pieces, batch: Any) -> None:
        """There is no piece for this worker: its pass leaves no trace."""
        before, used = metrics.values_of(self.model), self._used.copy()
        array = self._room.take()
        self._train(pieces, (), batch, self._split(array))
        self._room.give_back(array)
        metrics.set_values(self.model, before)
        self._used[:] = used

    def _pass(self, pieces: Pieces, some: Sequence[int], batch: Any) -> None:
        """A forward and a backward pass, and what they change."""
        array, share = self._room.take(), pieces.share(some)
        array.fill(0)
        views = self._split(array)
        self._train(pieces, some, batch, views)
        for variable, start, view in zip(self._statistics, self._starts, views[len(self._variables) :], strict=True):
            value = hooks.copied(variable)
            np.subtract(value, start, out=view, where=value != start, casting="same_kind")  # infinite ones included
            view *= float(0 in some) if hooks.is_taken(variable) else share
        if self._pass_loss is None or self._batch_loss is None:
            self._batch_loss = None
        else:
            self._batch_loss += share * self._pass_loss
        if self._reduction is not None:
            self._reduction.insert(some[0], array)

    def _train(self, pieces: Pieces, some: Sequence[int], batch: Any, views: list[np.ndarray]) -> None:
        """Run the train function on a batch; gradients go to `views`, times their share."""
        for variable, start in zip(self._statistics, self._starts, strict=True):
            variable.assign(start)
        self._seed([self._data.seed, self._data.epoch, pieces.window.start, some[0] if some else pieces.window.stop])
        self._target = (views, pieces.share(some))
        # A graph for each shape, as one that serves several may round otherwise.
        shapes = _shapes_of(batch) if self._deterministic else ()
        if shapes not in self._steps:
            self._steps[shapes] = self._make_step()
        with self._no_other_change():
            self._results = self._steps[shapes](batch)
        if not self._variables:  # there is no update to be made
            self._target = None
        if self._target is not None:
            raise UnsupportedError(
                "the model's train_step has made no update. It must end in self.optimizer.apply_gradients(…) or "
                "self.optimizer.apply(…), in every step and in every worker: that is where gradients are reduced"
            )

    @contextmanager
    def _no_other_change(self) -> Iterator[None]:
        """Refuse a pass that changes a variable for which nobody knows what several passes would make of it.

        It looks in the first pass of the steps 1, 2, 4, 8, …, as a mean of the weights is the same before the first
        update and after it.
        """
        looked_at, self._looks = self._others if self._looks else [], False
        before = list(map(hooks.copied, looked_at))
        yield
        changed = [
            variable.path
            for variable, value in zip(looked_at, before, strict=True)
            if not np.array_equal(hooks.copied(variable), value, equal_nan=True)
        ]
        if changed:
            raise UnsupportedError(
                "the model changes variables other than by the update (a mean of the weights, say, or a counter), and "
                "would do so in each of the passes of a batch that workers share. Do that in a callback's "
                f"on_train_batch_end(), or leave out global_batch_size. Received: {changed}"
            )

    def seed_sample(self, key: Sequence[int]) -> None:
        """Let the random numbers with which a sample is read be a function of the key."""
        set_seeds(self._generators[-1:], key)
        self._passes.seed(key)

    def _seed(self, key: Sequence[int]) -> None:
        set_seeds(self._generators, key)
        if self._deterministic:
            self._passes.seed(key)

    # ------------------------------------------------------------ gradients

    def reduce(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Keep these gradients: the update comes later."""
        present = [
            (gradient, variable)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None
        ]
        strangers = [getattr(variable, "name", "?") for _, variable in present if id(variable) not in self._places]
        if strangers:
            raise UnsupportedError(
                "the model's train_step updates variables that were not trainable when fit() began. Leave out "
                f"global_batch_size. Received: {strangers}"
            )
        places = [self._places[id(variable)] for _, variable in present]
        self._passes.hand_out(
            [gradient for gradient, _ in present],
            self.take_loss(),
            dtype=self._room.dtype,
            receive=lambda arrays, loss: self.guard(partial(self._receive, places, arrays, loss)),
        )

    def _receive(self, places: Sequence[int], arrays: Sequence[np.ndarray], loss: float | None) -> None:
        if self._target is None:
            raise UnsupportedError(
                "the model's train_step makes more than one update, and a step on a batch that workers share has one. "
                "Leave out global_batch_size"
            )
        (views, share), self._target = self._target, None
        self._pass_loss = self.take_loss() if loss is None else loss
        for place, array in zip(places, arrays, strict=True):
            np.multiply(array, views[place].dtype.type(share), out=views[place])
            self._used[place] = 1

    def _split(self, flat: Array) -> list[np.ndarray]:
        """The part of each variable, and of each of the statistics, in a flat array."""
        parts, start = [], 0
        for shape in self._shapes:
            parts.append(flat[start : start + _size(shape)].reshape(shape))
            start += _size(shape)
        return parts


def _shapes_of(batch: Any) -> tuple[Any, ...]:
    return tuple(None if leaf is None else tuple(leaf.shape) for leaf in keras.tree.flatten(batch))


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=int))
