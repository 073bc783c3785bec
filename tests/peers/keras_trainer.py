"""`ef_keras.callbacks()` in Keras's own tests.

Each `fit`, `evaluate` and `predict` gets them behind the callbacks of its caller. A `CallbackList` of the caller's gets
them too, and its model once more, as `callbacks.set_model` is where they begin.

Several workers share each batch, so that their updates are those of one process. Where that is refused or cannot be
known, each has a batch of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras

import ef_keras
from ef_common.data.settings import ElasticSettings
from ef_keras import hooks
from ef_keras.backends import engine
from ef_keras.callbacks import Elastic
from ef_keras.rows import num_samples
from ef_keras.sources import source_of


def put_in(note_use: Callable[[], None]) -> None:
    """Give them to each call from now on."""
    _put_in(note_use, lambda: ef_keras.callbacks(log_workers=False))  # they compare the logs exactly


def put_in_sharing(note_use: Callable[[], None]) -> None:
    """Likewise, where several workers run the tests together."""
    settings = ElasticSettings.of(log_workers=False)
    _put_in(note_use, lambda: [Sharing(engine(None), settings)])


class Sharing(Elastic):
    """Lets the workers share each batch of a `fit`."""

    def begin(self, others: Any) -> None:
        self._settings = replace(self._settings, global_batch_size=_size_to_share(self.model))
        super().begin(others)


def _size_to_share(model: Any) -> int | None:
    """Samples of a batch of the `fit` that is running; None if each worker is to have a batch of its own."""
    iterator = hooks.epoch_iterator(model)
    accumulates = any(hooks.accumulation(one) > 1 for one in hooks.optimizers(model))
    if accumulates or model.steps_per_execution > 1 or hooks.is_generator(iterator):
        return None
    source = source_of(iterator)
    size = num_samples(source.first()) if source.whole_batches else source.batch_size
    return size if size > 1 else None


def _put_in(note_use: Callable[[], None], callbacks: Callable[[], list[Any]]) -> None:
    if keras.config.backend() == "torch":
        from keras.src.backend.torch.trainer import TorchTrainer as Trainer
    else:
        from keras.src.backend.tensorflow.trainer import TensorFlowTrainer as Trainer
    for name in ("fit", "evaluate", "predict"):
        setattr(Trainer, name, _with_ours(getattr(Trainer, name), note_use, callbacks))


def _with_ours(
    method: Callable[..., Any], note_use: Callable[[], None], callbacks: Callable[[], list[Any]]
) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # the test is of that
            return method(*args, **kwargs)
        note_use()
        bound.arguments["callbacks"] = _add(bound.arguments["self"], bound.arguments.get("callbacks"), callbacks())
        return method(*bound.args, **bound.kwargs)

    return call


def _add(model: Any, given: Any, callbacks: list[Any]) -> Any:
    if not isinstance(given, keras.callbacks.CallbackList):
        return [*keras.tree.flatten(given or []), *callbacks]
    if not any(isinstance(one, Elastic) for one in given.callbacks):  # else, a validation within `fit`
        for ours in callbacks:
            given.append(ours)
        given.set_model(model)
        given.set_params(given.params)
    return given
