"""One elastic `fit`: what is installed when it begins, and removed when it ends."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from ef_common.collectives import operations
from ef_common.core.sharding import GlobalBatch
from ef_common.core.view import View
from ef_common.data.checkpointer import agree_on_place
from ef_common.data.meter import Meter
from ef_common.data.settings import ElasticSettings
from ef_common.data.workers import WorkersWatch, hook_of
from ef_common.errors import TrainingOver, UsageError
from ef_common.launch.leaving import leaving_cleanly
from ef_common.launch.process import Worker
from ef_keras import hooks, metrics
from ef_keras.backends import build, entry_of, passes_for, prepare_determinism, reducer_for, step_of, untraced
from ef_keras.checkpoints import FitCheckpoints
from ef_keras.checks import (
    check_class_weight,
    check_replicas,
    check_stateful,
    check_synchronized,
    global_batch_for,
)
from ef_keras.compensation import FitCompensation
from ef_keras.global_batch import GlobalReducer
from ef_keras.indexed import IndexedSource
from ef_keras.numbered_source import NumberedSource
from ef_keras.own_numbers import OwnNumbers
from ef_keras.program import Program
from ef_keras.rank_zero import OnRankZero, unwrapped
from ef_keras.reducer import Reducer
from ef_keras.rows import num_samples
from ef_keras.schedules import FitSchedules
from ef_keras.sources import SampleSource, source_of
from ef_keras.state import FitState
from ef_keras.training_data import TrainingData

logger = logging.getLogger(__name__)


class Fit:
    """The elastic parts of one `fit`.

    Args:
        worker: This worker.
        model: The model.
        callbacks: Keras's list of callbacks.
        iterator: Keras's iterator over epochs.
        settings: The user's, with the size of the global batch that the data may have brought.

    Attributes:
        columns: Our columns in the logs of the newest epoch.

    Raises:
        JobFinished: The job is over.
        UsageError: Settings that contradict each other.
    """

    def __init__(
        self,
        worker: Worker,
        model: Any,
        callbacks: Any,
        iterator: Any,
        *,
        settings: ElasticSettings,
    ) -> None:
        check_replicas(model)
        self._settings, deterministic = settings, settings.deterministic
        global_batch_size = settings.global_batch_size
        reference = settings.compensation.reference_batch_size
        if None not in (global_batch_size, reference):
            raise UsageError(
                "an update of global_batch_size samples has nothing to be compensated: leave out one of the two. "
                f"Received: global_batch_size={global_batch_size}, reference_batch_size={reference}"
            )
        self._worker = worker
        self._undo = ExitStack()
        self._skips = worker.begin_training()
        self._claiming, self._job = worker.places(settings)
        self._autoscaler = worker.autoscaler(settings)
        self._checkpoints: FitCheckpoints | None = None
        self._held: list[tuple[Any, np.ndarray]] = []  # the weights of a training that had ended before
        self._session = worker.session
        self._model = model
        self._callbacks = callbacks
        self._iterator = iterator
        self._deterministic = deterministic
        self._xla = not (deterministic and keras.config.backend() == "tensorflow")  # whose XLA lacks operations then
        if deterministic:
            prepare_determinism()  # what the data are made with may have been imported only now
        first_epoch, self._epochs = hooks.initial_epoch(model), hooks.num_epochs(model)
        source = source_of(iterator, step_size=global_batch_size, first_epoch=first_epoch, deterministic=deterministic)
        check_class_weight(model, source)
        self._first_batch = source.first()
        full_batch = num_samples(self._first_batch)
        self._global_batch: GlobalBatch | None = None
        if global_batch_size is not None:
            # A newcomer is admitted however many there are.
            world_size = 1 if self._session.newcomer else self._session.world_size
            self._global_batch = global_batch_for(
                model,
                source,
                global_batch_size,
                full_batch=full_batch,
                world_size=world_size,
                deterministic=deterministic,
            )
            if source.whole_batches and source.epochs.limit is not None:  # it counts updates
                limit = source.epochs.limit * (global_batch_size // full_batch)
                source.epochs = replace(source.epochs, limit=limit)
        self.data = TrainingData(
            source,
            self._session,
            log=worker.log,
            steps_per_execution=hooks.steps_per_execution(iterator),
            full_batch=full_batch,
            global_batch=self._global_batch,
            deterministic=deterministic,
        )
        self.data.dealer.num_epochs = lambda: self._epochs
        if self._autoscaler is not None:
            self._autoscaler.follow(self.data.dealer)
            self._undo.callback(self._autoscaler.close)
        self._undo.callback(self.data.close)
        self.data.on_length = self._set_length
        self.data.on_epoch_end = self._merge_metrics
        self.data.on_padding = self._pad
        self.data.on_boundary = self._between_steps
        self.data.on_dealt = self._begin_step
        self._before_padding: list[np.ndarray] = []
        self._remembers = False
        self._has_warned_of_rates = False
        self._taken_over: list[tuple[Any, np.ndarray]] = []
        self.compensation: FitCompensation | None = None
        self.columns: frozenset[str] = frozenset()
        self._meter = Meter(worker.session, self._autoscaler) if worker.elastic and settings.log_workers else None
        self.schedules: FitSchedules | None = None
        self._workers = WorkersWatch(worker.session)
        self._global: GlobalReducer | None = None
        self._numbers: OwnNumbers | None = None

    # ------------------------------------------------------------ begin and end

    def begin(self) -> None:
        """Replace batches and gradients, and become equal to the others."""
        model, session = self._model, self._session
        if model.jit_compile and not self._xla:
            logger.warning(
                "the training steps of this fit are not compiled by XLA, because deterministic training does without "
                "it; evaluate, validation and predict still are"
            )
        if keras.config.backend() == "jax" and (model.run_eagerly or not model.jit_compile):
            logger.warning(
                "the training steps of this fit are traced and compiled, because steps of JAX's can wait for other "
                "workers only where they are cut; evaluate, validation and predict still run as the model was compiled"
            )
        batch, self._first_batch = self._first_batch, None
        build(model, batch)
        if self._worker.elastic or self._global_batch is not None:
            check_stateful(model)
        if self._worker.elastic:
            check_synchronized(model)
        self._undo.callback(hooks.renew_train_function, model)
        self._undo.enter_context(untraced(model))
        self._set_up_rates()
        self._reducer = self._make_reducer()
        self._reducer.fraction = lambda: self.data.fraction
        self._reducer.on_update = self._commit
        if self.compensation is not None:
            self._reducer.applied = self.compensation.applied
        self._reducer.on_wait = self.data.prefetch
        self._reducer.finds, self._reducer.heard = self.data.finds, self.data.heard
        if self._autoscaler is not None and self._global is None:
            autoscaler, dealer = self._autoscaler, self.data.dealer
            self._reducer.measures = lambda: autoscaler.measures_noise(dealer.num_updates)
            self._reducer.asks, self._reducer.on_measured = autoscaler.asks, autoscaler.note_squares
        if not model.trainable_variables:
            self.data.on_no_update = self._reducer.reduce_nothing
        self._undo.callback(self._reducer.detach)
        self._reducer.attach()
        if self._global is None:
            self._numbers = OwnNumbers(session, model)
            self._undo.callback(self._numbers.end)
        self._step = step_of(model, self._reducer, xla=self._xla)
        model.train_function = entry_of(model, self._run_step)
        self._state = FitState(
            model,
            lambda: self._callbacks.callbacks,
            progress=self._progress,
            load_progress=self._load_progress,
            claiming=self._claiming,
        )
        self._undo.callback(self._let_go)
        self._set_up_checkpoints()
        hooks.replace_batches(self._iterator, self.data.batches)
        if session.newcomer:
            self._go_on()
            self._join(batch)
        else:
            agree_on_place(session, has_place=self._checkpoints is not None)
            self._claiming.begin()
            restored = self._restore()
            if restored:
                self._go_on()
            self._agree_on_start(self.data.seed if restored else None)
            session.state = self._state
            again_from = self.data.epoch if restored and not self.data.is_over else None
            for callback in self._callbacks.callbacks:
                if isinstance(callback, OnRankZero):
                    callback.open_file(append=restored, again_from=again_from)

    def _go_on(self) -> None:
        if isinstance(self._model, Program):
            self._model.go_on()

    def _set_up_rates(self) -> None:
        """Set up learning rates; the optimizers are built, so all of their parts are known."""
        compensation, model, worker = self._settings.compensation, self._model, self._worker
        compensates = worker.elastic or compensation.reference_batch_size is not None
        if self._global_batch is None and compensation.rule != "none" and compensates:
            self.compensation = FitCompensation(
                compensation, model, self._session, log=worker.log, batch_size=self.data.local_samples
            )
        if self._settings.schedules_follow_samples:
            self.schedules = FitSchedules(model, self.data.dealer)
            self._undo.callback(self.schedules.detach)

    def _join(self, batch: Any) -> None:
        try:
            if not self._skips:
                self._warm_up(batch)
                self.data.catch_up()
                self._session.state = self._state
                self._session.join()
        except TrainingOver:
            self._skips = True
        if self._skips:
            self._skip()
        else:
            logger.info("joined at step %d of epoch %d", self.data.dealer.progress.steps, self.data.epoch)
            hooks.start_at(self._model, self.data.epoch)

    def _skip(self) -> None:
        """The others have ended this training: end `fit` at once, with the saved result if there is one."""
        has_result = self._checkpoints is not None and self._checkpoints.load_result()
        if self.schedules is not None and self._checkpoints is not None and self._checkpoints.schedules is not None:
            self.schedules.load_state(self._checkpoints.schedules)
        self._session.trainings.skip(has_result=has_result)
        self._claiming.skip()
        self._hold_weights()
        hooks.start_at(self._model, self._epochs)

    def _set_up_checkpoints(self) -> None:
        if self._job is not None:
            checkpoints = FitCheckpoints(self._job, self._session, self._model, collect=self._state.collect)
            self._checkpoints = self._state.checkpoints = checkpoints
            save, dealer = checkpoints.job.save, self.data.dealer
            self._worker.notices.save_on_last_leave(lambda: save(dealer.num_updates))
            self.data.on_begin = checkpoints.resume

    def _restore(self) -> bool:
        """Continue from a checkpoint, if there is one."""
        checkpoints, epochs = self._checkpoints, self._epochs
        found = None if checkpoints is None else checkpoints.find()
        if checkpoints is None or found is None:
            return False
        self.data.is_over = complete = checkpoints.job.is_complete(self._limits)
        self._state.go_back(found)
        if complete:
            self._hold_weights()
            logger.info("the training is complete. To train on, change its number of epochs. Received: %d", epochs)
        hooks.start_at(self._model, epochs if complete else self.data.epoch)
        return True

    def _hold_weights(self) -> None:
        """Keep the weights for the end of a `fit` without steps, in which Keras replaces them by their averages."""
        if hooks.averaged(self._model):
            self._held = [(variable, hooks.copied(variable)) for variable in hooks.state_variables(self._model)]

    @property
    def _limits(self) -> dict[str, Any]:
        return {"epochs": self._epochs}

    def _make_reducer(self) -> Reducer:
        model, session, data = self._model, self._session, self.data
        if data.dealer.global_batch is None:
            return reducer_for(session, model, data.dealer.weights)
        self._global = reducer = GlobalReducer(
            session, model, data, passes_for(model), make_step=self._new_step, deterministic=self._deterministic
        )
        if self._deterministic and isinstance(data.source, SampleSource | IndexedSource | NumberedSource):
            data.source.seed = reducer.seed_sample
        return reducer

    def _new_step(self) -> Callable[[Any], Any]:
        step = step_of(self._model, self._reducer, xla=self._xla)
        return lambda batch: step(self._batches_for_step(batch))

    def end(self) -> None:
        """All members have reached the end of this training."""
        for variable, value in self._held:
            variable.assign(value)
        if self._skips:
            if self._checkpoints is not None:
                self._state.remember(self._checkpoints.memories)
            self._session.trainings.end()
            return
        self._remember()  # of a training that had ended before
        self.data.dealer.end()
        self._gather_after_hooks(lambda: None, what="hooks at the end of the training")
        if self._checkpoints is not None:
            self._checkpoints.job.finish(self.data.dealer.num_updates, complete=self._limits)
        self._session.trainings.end()

    def release(self) -> None:
        """Remove what was installed, however far `fit` has come. May be repeated."""
        self._undo.close()

    def _let_go(self) -> None:
        self._session.state = self._session.on_last_leave = None
        hooks.own_batches_again(self._iterator)
        hooks.start_at(self._model, None)
        if self._checkpoints is not None:
            self._checkpoints.job.stop()

    def _agree_on_start(self, seed: int | None) -> None:
        """Take over rank 0's variables, seed, size of the first batch, and starting point."""
        start = hooks.start_of(self._model)
        if seed is None:
            seed = (hooks.random_seed() or 0) if self._deterministic else random.getrandbits(31)
        mine = [0, 0, 0]
        if self._global_batch is not None:
            mine = [*self._global_batch, self.data.pass_size]
        shifts = [] if self.schedules is None else self.schedules.shifts
        decided = [seed, self.data.full_batch, start, shifts, mine]
        ((seed, full_batch, start, shifts, theirs), *_), _ = operations.gather(
            self._session, decided, what="what the training starts from"
        )
        if mine != theirs:
            raise UsageError(
                "the workers disagree on the global batch, or on deterministic. Set the same in all of them. "
                f"Expected: {theirs} (samples of it, of a piece, and of a pass), as the first worker. Received: {mine}"
            )
        self.data.seed, self.data.full_batch = seed, full_batch
        hooks.start_at(self._model, start)
        variables = hooks.shared_variables(self._model)
        values = [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in variables]
        first = operations.FirstRankArrays(values, self._session)
        self._session.run(first)
        for variable, value in () if first.equal else zip(variables, first.apply(), strict=True):
            variable.assign(value)
        if self.schedules is not None:
            self.schedules.begin(shifts)

    def _warm_up(self, batch: Any) -> None:
        """Make a step that leaves nothing behind: it traces graphs and touches memory while the others train."""
        variables = [*hooks.shared_variables(self._model), *hooks.metric_variables(self._model)]
        values = list(map(hooks.copied, variables))
        on_update, self._reducer.on_update = self._reducer.on_update, lambda contributors, loss: None
        self._reducer.in_step = True
        try:
            if self._global is not None:
                self._global.warm_up(batch)
            else:
                self._step(self._batches_for_step(batch))
        finally:
            self._reducer.in_step = False
            self._reducer.on_update = on_update
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def _progress(self) -> dict[str, Any]:
        """What a newcomer needs besides variables and memories."""
        compensation = None if self.compensation is None else self.compensation.state()
        schedules = None if self.schedules is None else self.schedules.state()
        return {
            **self.data.state(),
            "compensation": compensation,
            "schedules": schedules,
            "autoscale": None if self._autoscaler is None else self._autoscaler.state(),
            "workers": self._workers.state(),
        }

    def _load_progress(self, state: dict[str, Any], saved: bool) -> None:
        """Continue where the others are, or where a checkpoint was saved."""
        self.data.load_state(state, saved=saved)
        self._workers.load_state(None if saved else state.get("workers"))
        if self.compensation is not None and state["compensation"] is not None:
            self.compensation.load_state(state["compensation"], saved=saved)
        if self.schedules is not None and state.get("schedules") is not None:
            self.schedules.load_state(state["schedules"])
        if self._autoscaler is not None:
            self._autoscaler.load_state(state.get("autoscale"))

    def _set_length(self, num_steps: int | None) -> None:
        everybody = [unwrapped(callback) for callback in self._callbacks.callbacks]
        hooks.set_num_steps(self._callbacks.params, everybody, num_steps)

    def _batches_for_step(self, batch: Any) -> Any:
        return [batch] if keras.config.backend() == "torch" else iter([batch])

    # ------------------------------------------------------------ steps

    def _run_step(self, batches: Iterator[Any]) -> Any:
        """Run Keras's `train_function`; turn our own errors back that the framework has converted into its own."""
        self._reducer.in_step = True
        self._begin_numbers()
        try:
            logs = self._step(batches) if self._global is None else self._global.run(next(iter(batches)))
        except Exception:
            error, self._reducer.error = self._reducer.error, None
            if error is not None:
                raise error from None
            raise
        finally:
            self._reducer.in_step = False
        self._end_numbers()
        if self.data.dealer.progress.uncommitted:
            self.data.on_no_update()
        self._settle_schedules()
        return logs

    def _begin_numbers(self) -> None:
        if self._numbers is not None:
            self._numbers.begin()

    def _end_numbers(self) -> None:
        if self._numbers is not None:
            self._numbers.end()

    def _settle_schedules(self) -> None:
        if self.schedules is not None:
            self.schedules.settle()

    def _commit(self, contributors: View, loss: float | None) -> None:
        """An update will be made with the gradients of these contributors."""
        dealer = self.data.dealer
        if self.compensation is not None and dealer.progress.uncommitted:
            self.compensation.commit(contributors, step=dealer.num_updates + 1)
        dealer.commit(contributors, loss)

    def _between_steps(self) -> None:
        """No step is running."""
        self._end_numbers()
        self._settle_schedules()
        if self.compensation is not None:
            self.compensation.before_step()
            if not self.data.dealer.progress.remaining:
                self.compensation.settle()
        self.log_weights()
        dealer = self.data.dealer
        if self._checkpoints is not None and dealer.progress.remaining and not dealer.progress.uncommitted:
            with leaving_cleanly():
                self._checkpoints.job.boundary(dealer.num_updates)

    def _begin_step(self) -> None:
        """The samples of a step have been dealt: tell callbacks of workers that joined or left."""
        if self.schedules is not None:
            self.schedules.aim()
        change = self._workers.look()
        if change is not None:
            for callback in self._callbacks.callbacks:
                hook_of(callback)(change)
        if self._reducer.in_step:  # one of several steps that Keras makes at a time
            self._begin_numbers()

    def _pad(self, begins: bool) -> None:
        """Exclude what a padding batch does to the metrics."""
        if begins:
            self._before_padding = metrics.values_of(self._model)
        else:
            metrics.set_values(self._model, self._before_padding)

    def end_batch(self) -> None:
        """All callbacks have seen a step: if one wants to stop in the middle of an epoch, all workers stop."""
        if self._model.stop_training and self._session.completed_in.world_size > 1:
            self._model.stop_training = False
            self._reducer.wants_stop = True
        if self._reducer.stop_agreed:
            self._model.stop_training = True
            self._merge_metrics()

    # ------------------------------------------------------------ epochs

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins; by now `fit` knows which one is the first."""
        hooks.start_at(self._model, None)
        self.data.epoch = epoch
        if self.data.resumes:
            self._taken_over = [(variable, hooks.copied(variable)) for variable in hooks.shared_variables(self._model)]
        self._remember()

    def epoch_has_begun(self) -> None:
        """All callbacks have begun the epoch.

        If the state that was taken over is one of the middle of this epoch, what they change there is already in it: a
        `LearningRateScheduler` that multiplies the rate, for example, must not do so twice.
        """
        taken_over, self._taken_over = self._taken_over, []
        for variable, value in taken_over:
            if not np.array_equal(hooks.copied(variable), value, equal_nan=True):
                variable.assign(value)
        self._state.recall()

    def _remember(self) -> None:
        """Restore the callbacks' memories, because all callbacks have begun and forgotten them."""
        if not self._remembers:
            self._remembers = True
            self._state.recall(forget=not self.data.resumes)

    def _merge_metrics(self) -> None:
        """At the end of an epoch, make metrics cover everything that the workers have seen."""
        parts = self._gather_after_hooks(lambda: metrics.values_of(self._model), what="state of a metric")
        metrics.merge(self._model, parts)

    def _gather_after_hooks(self, value: Callable[[], Any], *, what: str) -> list[Any]:
        """Everybody's value, after hooks that may write. If rank 0 was lost in them, the next one calls them first.

        Whoever answers has completed its hooks, and no update is made in between, so what is written is the same.
        """
        while True:
            mine = {"value": value(), "writers": self._state.writers()}
            everybody, _ = operations.gather(self._session, mine, what=what)
            if not self._state.write_again([theirs["writers"] for theirs in everybody]):
                return [theirs["value"] for theirs in everybody]

    def agree_on(self, logs: dict[str, Any]) -> None:
        """Average results that differ (from a `train_step` of the user's), because callbacks decide by them."""
        mine = {name: float(value) for name, value in logs.items() if metrics.is_number(value)}
        row = {} if self._meter is None else self._meter.row()
        everybody, _ = operations.gather(self._session, {"logs": mine, "row": row}, what="logs")
        for name in mine:
            values = [theirs["logs"][name] for theirs in everybody if name in theirs["logs"]]
            if len(set(values)) > 1 and not np.isnan(values).all():
                logs[name] = float(np.mean(values))
        if self.compensation is not None:
            self.compensation.settle()  # an epoch that was stopped
        if self._settings.log_workers:
            ours = dict(everybody[0]["row"])  # one worker's clock, for all
            self._show_batch(ours)
            added = {name: value for name, value in ours.items() if name not in logs}  # in this order in all workers
            self.columns = frozenset(added)
            logs.update(added)

    def _show_batch(self, logs: dict[str, Any]) -> None:
        if self.compensation is not None:
            self.compensation.show(logs)
        elif self._worker.elastic:
            accumulation = max(map(hooks.accumulation, hooks.updating_optimizers(self._model)), default=1)
            num_workers = self._session.completed_in.world_size
            of_all = num_workers * self.data.local_samples(num_workers) * accumulation
            size = self._settings.global_batch_size or of_all
            logs.update({"lr_scale": 1.0, "global_batch_size": float(size)})

    def agree_on_end(self) -> None:
        """If one worker's callbacks have stopped the training, stop all; take over what rank 0's remember."""
        everybody = self._gather_after_hooks(self._what_callbacks_hold, what="memory of a callback")
        self._model.stop_training = any(theirs["stop"] for theirs in everybody)
        for theirs in everybody:
            self._state.remember(theirs["memories"] or [])
        self._take_rates([theirs["rates"] for theirs in everybody])

    def _take_rates(self, everybody: Sequence[list[float]]) -> None:
        """Go on with the learning rates of rank 0, which the next step would take anyway."""
        first = everybody[0]
        if everybody.count(first) == len(everybody):
            return
        if self._session.rank == 0 and not self._has_warned_of_rates:
            self._has_warned_of_rates = True
            logger.warning(
                "a callback has set learning rates that differ between the workers, because it decides by what one "
                "worker sees: the logs of a batch, or a value that it has computed itself. All workers go on with "
                "those of the first one. To decide by what all of them see, use a metric of the model or of its "
                "validation at the end of an epoch. Received: %s",
                [[f"{rate:g}" for rate in rates] for rates in everybody],
            )
        hooks.set_numbers(hooks.rates(self._model), first)

    def _what_callbacks_hold(self) -> dict[str, Any]:
        return {
            "stop": bool(self._model.stop_training or self._reducer.wants_stop),
            "memories": self._state.memories(of_rank_zero=True) if self._session.rank == 0 else None,
            "rates": hooks.numbers_of(hooks.rates(self._model)),
        }

    # ------------------------------------------------------------ audit

    def log_weights(self) -> None:
        """In audit mode, note a hash of the weights after an update.

        Not of the learning rates: until the next update, they are what the callbacks of this worker have made of them.
        """
        if self._worker.audit:
            rates = set(map(id, hooks.rates(self._model)))
            variables = [one for one in hooks.shared_variables(self._model) if id(one) not in rates]
            arrays = (np.ascontiguousarray(keras.ops.convert_to_numpy(variable)) for variable in variables)
            self.data.dealer.log_weights(array.tobytes() for array in arrays)
