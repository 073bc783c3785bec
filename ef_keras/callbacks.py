"""`ef_keras.callbacks()`, the callbacks that a user passes to `fit`.

A callback sees when a `fit` begins and ends, and that is where everything else is put in place (`Fit`) and taken
away again. The model is the user's, and so is `fit`.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import keras

from ef_common.core.autoscale import Autoscale
from ef_common.core.compensation import Compensation, Rule
from ef_common.data.checkpointer import Checkpointing
from ef_common.data.settings import ElasticSettings
from ef_common.data.walked_stream import WalkedStream
from ef_common.errors import UnsupportedError
from ef_common.launch.failing import ends_in_order
from ef_common.launch.leaving import leaving_cleanly
from ef_common.launch.process import Worker, this_worker
from ef_keras import hooks
from ef_keras.backends import engine, prepare_determinism
from ef_keras.checks import check_end, check_replicas, check_stateful, size_of
from ef_keras.evaluation_data import EvaluationData
from ef_keras.fit import Fit
from ef_keras.guard import Guard
from ef_keras.ordered import FitSource
from ef_keras.probe import check_hooks
from ef_keras.rank_zero import only_on_rank_zero
from ef_keras.sources import global_batch_size_of, shard_reading_of, source_of
from ef_keras.stream_evaluation import StreamEvaluationData

logger = logging.getLogger(__name__)


def callbacks(
    *,
    compensation: Compensation | Rule = "auto",
    schedules: str = "samples",
    backend: str | None = None,
    global_batch_size: int | None = None,
    deterministic: bool = False,
    checkpoint: Checkpointing | str | Path | None = None,
    claims: str | Path | None = None,
    evict_stragglers: bool = False,
    autoscale: Autoscale | dict[str, Any] | str | bool | None = None,
    log_workers: bool = True,
) -> list[keras.callbacks.Callback]:
    """Callbacks that make a `fit` (or `evaluate`) elastic.

    Example::

        model.fit(x, y, epochs=10, callbacks=ef_keras.callbacks())
        model.fit(x, y, epochs=10, callbacks=[EarlyStopping(), *ef_keras.callbacks()])

    :class:`~ef_common.data.settings.ElasticSettings` describes the settings that all frameworks share in more detail.

    Args:
        compensation: How the optimizer's settings follow a global batch that grows and shrinks with the number of
            workers.
        schedules: "samples": a `LearningRateSchedule` is called with the number of updates that one worker would have
            made at the same samples, so that a schedule that was made for one worker ends with the training; see
            :mod:`ef_keras.schedules`. "updates": it counts updates.
        backend: Library that moves gradients: "gloo", "nccl" (torch) or "horovod". The default suits Keras's backend.
        global_batch_size: Samples of an update, which the workers share, each in forward passes of at most the batch
            size of `fit`; `steps_per_epoch` counts updates. By default, each worker has a batch of its own. Of data
            that come in batches (streams, `PyDataset`), an update takes whole batches, so their size must divide it.
        deterministic: The weights have the same bits for every number of workers, whatever was lost or joined. The
            global batch is cut into passes of exactly the batch size, which must divide it. The order of samples, the
            random numbers in layers (a `keras.random.SeedGenerator`) and those in `ef_keras.dataset` are a function of
            the seed of `keras.utils.set_random_seed`, which must be called before the model is made. Each operation
            runs in one thread. What cannot be deterministic raises, except what ElasticFlow cannot see: random numbers
            of TensorFlow's own in the `map` of an `ef_keras.dataset` (use NumPy's or `keras.random`), and callbacks
            that decide by metrics, which lack what a lost worker had seen.
        checkpoint: A URL for checkpoints, from which the same command resumes, or a `Checkpointing`.
        claims: A URL, for example of etcd, where workers claim to continue without others. The default is the place of
            the checkpoints.
        evict_stragglers: Replace a worker that is much slower than the others, once a spare is ready.
        autoscale: How the job chooses its number of nodes: an `Autoscale`, or its arguments in a dict or a text. The
            default is that of the environment; False leaves the number as it is.
        log_workers: The logs of each epoch, and with them `History`, `CSVLogger` and `TensorBoard`, have the columns
            `world_size`, `samples_per_s`, `pause_s`, `lr_scale` and `global_batch_size` in a job. False leaves the logs
            as they are in Keras, for code that expects its columns and no others.

    Raises:
        UnsupportedError: Keras runs on a backend that cannot be elastic.
        UsageError: The backend is unknown or none is available, the compensation is invalid, or settings contradict
            each other.
    """
    settings = ElasticSettings.of(
        compensation=compensation,
        schedules=schedules,
        global_batch_size=global_batch_size,
        deterministic=deterministic,
        checkpoint=checkpoint,
        claims=claims,
        evict_stragglers=evict_stragglers,
        autoscale=autoscale,
        log_workers=log_workers,
    )
    if deterministic:
        prepare_determinism()
    return [Elastic(engine(backend), settings)]


class Elastic(keras.callbacks.Callback):
    """Makes its `fit` or `evaluate` elastic, if this process is a worker of a job.

    A `fit` on global batches is taken hold of without a job, too: it is what others can be compared with.

    Args:
        engine: Engine of the data plane; see `ef_common.launch.engines`.
        settings: See :func:`callbacks`.
    """

    def __init__(self, engine: str, settings: ElasticSettings) -> None:
        super().__init__()
        self._engine = engine
        self._settings = settings
        self._worker: Worker | None = None
        self._fit: Fit | None = None
        self._guard: Guard | None = None
        self._evaluation: EvaluationData | StreamEvaluationData | None = None
        self._has_told_cost = False
        self._trained: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Programs that copy their callbacks, as `sklearn.clone` does, get a new one with the same settings."""
        return type(self), (self._engine, self._settings)

    def set_model(self, model: Any) -> None:
        """Become a worker, if this release of Keras is supported; move to both ends of the callbacks."""
        super().set_model(model)
        self._trained = model  # to ask for `self.model` lets Keras on JAX put its state into the variables
        if self._worker is None:
            check_hooks()
            with leaving_cleanly():
                self._worker = this_worker(self._engine)
            if self._settings.evict_stragglers:
                self._worker.session.job.evict_stragglers()
        worker = self._worker
        named = self._settings.compensation.reference_batch_size is not None
        saves = self._settings.checkpointing(worker.checkpoint) is not None
        if not (worker.elastic or worker.log.enabled or named or self._is_global or saves):
            return
        others = hooks.callback_list(self)
        self._guard_fit(others)
        only_on_rank_zero(others, worker.session, hidden=self._columns)
        others.callbacks.append(_Last(self, others))

    def _columns(self) -> frozenset[str]:
        return frozenset() if self._fit is None else self._fit.columns

    def _guard_fit(self, others: Any) -> None:
        """Watch for the end of the current `fit`."""
        frame = hooks.frame_of_fit(self.model)
        if frame is None or (self._guard is not None and self._guard.is_of(frame)):
            return
        if self._guard is not None:
            self._guard.end(None)  # of another model
        self._guard = Guard(frame, self.model, self._leave)
        for name in hooks.entries_of(others):
            self._guard.put_around(others, name, also_if_called_by_others=True)

    def _leave(self, error: BaseException | None) -> None:
        """A `fit` has been left: remove everything, and tell the others. None: nobody has seen the exception."""
        if error is not None and not ends_in_order(error) and self._worker is not None:
            self._worker.log.write("fault", what=type(error).__name__, message=str(error)[:500])
            self._worker.failing.tell_if_heard(error)
        try:
            self._release()
        except Exception:
            logger.exception("cannot undo all that was done to the model. Make it anew before it is trained again")

    def _release(self) -> None:
        guard, fit, evaluation, worker = self._guard, self._fit, self._evaluation, self._worker
        self._guard = self._fit = self._evaluation = None
        with ExitStack() as stack:  # the last one first; each, whatever the others raise
            if worker is not None:
                stack.callback(worker.notices.stop)
            if evaluation is not None:
                stack.callback(evaluation.close)
            if fit is not None:
                stack.callback(fit.release)
            if guard is not None:
                stack.callback(guard.release)

    @property
    def _is_global(self) -> bool:
        if self._settings.global_batch_size is not None or self._settings.deterministic:
            return True
        with suppress(UnsupportedError):  # a list of callbacks that was made by hand
            return global_batch_size_of(hooks.epoch_iterator(self.model)) is not None
        return False

    # ------------------------------------------------------------ fit

    @property
    def running(self) -> Fit | None:
        """The `fit` that is running."""
        return self._fit

    def begin(self, others: Any) -> None:
        """All callbacks have begun: install the elastic `fit`, and join the others."""
        if self._worker is None:
            return
        self._guard_fit(others)  # of a list that was made by hand, before
        self._worker.notices.start()
        check_end(self.model)
        iterator = hooks.epoch_iterator(self.model)
        given = self._settings
        size = size_of(given.global_batch_size, global_batch_size_of(iterator), deterministic=given.deterministic)
        settings = replace(given, global_batch_size=size)
        with leaving_cleanly():
            self._fit = Fit(
                self._worker,
                self.model,
                others,
                iterator,
                settings=settings,
            )
            self._tell_cost(self._fit.data.source)
            self._fit.begin()
        if self._guard is not None:
            self._guard.put_around_batches(iterator, self._fit.data.batches)
            for name in hooks.CALLED_BY_FIT:
                self._guard.put_around(self.model, name)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """An epoch begins."""
        if self._fit is not None:
            self._fit.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Nothing. As one callback has this, Keras calls those of all before the next step, and in the same thread."""

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Likewise."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """An epoch with its validation has ended: let all workers see the same results, and stop together."""
        if self._fit is not None and logs is not None:
            with leaving_cleanly():
                self._fit.agree_on(logs)

    def on_train_end(self, logs: Any = None) -> None:
        """The last update has been made; later callbacks may restore other weights."""
        if self._fit is not None:
            self._fit.log_weights()

    def end(self) -> None:
        """All callbacks have ended."""
        if self._fit is not None:
            with leaving_cleanly():
                self._fit.end()
            self._release()

    # ------------------------------------------------------------ evaluate

    def on_test_begin(self, logs: Any = None) -> None:
        """Make the `evaluate` elastic, which may be one within a `fit`."""
        worker = self._worker
        if worker is None or not worker.elastic or worker.session.newcomer:
            return
        if self._fit is None:
            worker.notices.stop()
        check_end(self.model)
        iterator = hooks.epoch_iterator(self.model)
        check_replicas(self.model)
        if worker.session.completed_in.world_size > 1:
            check_stateful(self.model, evaluates=True)
        data = self._evaluation = self._evaluation_data(iterator, worker)
        hooks.replace_batches(iterator, data.batches)

    def end_test_batch(self) -> None:
        """All callbacks have seen a step of an evaluation.

        Raises:
            UnsupportedError: One of them wants to end it, and the others would wait for this worker's part.
        """
        worker, asked = self._worker, self._evaluation is not None and self._trained.stop_evaluating
        if asked and worker is not None and worker.session.completed_in.world_size > 1:
            raise UnsupportedError(
                "a callback has set model.stop_evaluating in this worker, and an evaluation is made by all workers "
                "together. Limit the data instead: fit(validation_steps=…) or evaluate(steps=…)"
            )

    def _evaluation_data(self, iterator: Any, worker: Worker) -> EvaluationData | StreamEvaluationData:
        session, steps = worker.session, hooks.steps_per_execution(iterator)
        reading = shard_reading_of(iterator, evaluates=True)
        if reading is None:
            make_source = partial(self._source_of, iterator)
            return EvaluationData(make_source, session, self.model, log=worker.log, steps_per_execution=steps)
        epoch = 0 if self._fit is None else self._fit.data.epoch
        return StreamEvaluationData(
            reading, session, self.model, log=worker.log, epoch=epoch, steps_per_execution=steps
        )

    def _source_of(self, iterator: Any) -> FitSource:
        source = source_of(iterator, evaluates=True)
        if shard_reading_of(iterator) is None:  # of a stream of shards, only the first batches are read by all
            self._tell_cost(source)
        return source

    def _tell_cost(self, source: FitSource) -> None:
        """Log once what data of unknown length cost."""
        if isinstance(source, WalkedStream) and source.is_open and not self._has_told_cost:
            self._has_told_cost = True
            logger.warning(
                "the length of these data is unknown, so each worker reads all batches and trains on its share of "
                "them, and a newcomer first reads what the others have already read. With a keras.utils.PyDataset or "
                "ef_keras.dataset, each worker reads only its own batches"
            )


class _Last(keras.callbacks.Callback):
    """The callback that comes after all others."""

    def __init__(self, elastic: Elastic, others: Any) -> None:
        super().__init__()
        self._elastic = elastic
        self._others = others

    def set_model(self, model: Any) -> None:
        """No callback follows, so the first one can be moved now."""
        super().set_model(model)
        everybody = self._others.callbacks
        everybody.sort(key=lambda callback: (callback is self) - (callback is self._elastic))

    def on_train_begin(self, logs: Any = None) -> None:
        self._elastic.begin(self._others)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        fit = self._elastic.running
        if fit is not None:
            fit.epoch_has_begun()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        fit = self._elastic.running
        if fit is not None:
            fit.end_batch()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._elastic.end_test_batch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        fit = self._elastic.running
        if fit is not None:
            with leaving_cleanly():
                fit.agree_on_end()

    def on_train_end(self, logs: Any = None) -> None:
        self._elastic.end()
