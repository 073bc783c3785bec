"""Functions for programs: the worker's rank and the number of workers, and `fit` with elastic callbacks."""

from __future__ import annotations

import inspect
from typing import Any

import keras

from ef_common.errors import UsageError
from ef_common.launch.leaving import leaving_cleanly
from ef_common.launch.process import this_worker, worker_if_any
from ef_common.session import Session
from ef_keras.backends import engine
from ef_keras.callbacks import Elastic
from ef_keras.callbacks import callbacks as elastic_callbacks


def rank() -> int:
    """Rank of this worker, counted from 0; it may change when workers join or leave.

    The first call, before any `fit`, makes this process a worker of its job, on the default data plane: it waits for
    the others that the job begins with. In a process that is no worker of a job, the rank is 0. A newcomer that has not
    been admitted yet gets the next free rank, which is never 0.
    """
    session = _session()
    found = None if session.newcomer else session.completed_in.rank_of(session.worker.id)
    return session.rank if found is None else found


def world_size() -> int:
    """Number of workers that train; see :func:`rank`. A newcomer that is not admitted yet counts itself."""
    session = _session()
    return session.rank + 1 if session.newcomer else session.completed_in.world_size


def is_rank_zero() -> bool:
    """Whether this worker is the first, which writes files and output for people; see :func:`rank`."""
    return rank() == 0


def _session() -> Session:
    worker = worker_if_any()
    if worker is None:
        with leaving_cleanly():
            worker = this_worker(engine(None))
    return worker.session


def fit(model: Any, *data: Any, callbacks: Any = None, **kwargs: Any) -> Any:
    """Call `model.fit` with the elastic callbacks, for programs that do not pass them themselves.

    Example::

        ef_keras.fit(model, x, y, batch_size=64, epochs=10, checkpoint="/mnt/shared/run")

    Args:
        model: The model.
        *data: What `model.fit` takes before its options: `x` and `y`, or a dataset.
        callbacks: Yours.
        **kwargs: The arguments of :func:`ef_keras.callbacks`, and those of `model.fit`.

    Returns:
        What `model.fit` returns: its `History`.

    Raises:
        UsageError: The callbacks have elastic ones in them already, or are a `CallbackList`, which knows its model.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise UsageError(
            "a CallbackList is complete. Pass your callbacks as a list, or put ef_keras.callbacks() among those that "
            "it is made of, and call model.fit. Received: callbacks=CallbackList"
        )
    given = [] if callbacks is None else keras.tree.flatten(callbacks)
    if any(isinstance(callback, Elastic) for callback in given):
        raise UsageError(
            "ef_keras.fit adds ef_keras.callbacks() by itself. Pass it their settings, or call model.fit with them. "
            "Received: callbacks with elastic ones in them"
        )
    settings = {name: kwargs.pop(name) for name in inspect.signature(elastic_callbacks).parameters if name in kwargs}
    return model.fit(*data, callbacks=[*given, *elastic_callbacks(**settings)], **kwargs)
