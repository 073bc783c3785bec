"""`ef_keras.callbacks()` in Keras's own tests.

Each `fit`, `evaluate` and `predict` gets them behind the callbacks of its caller. A `CallbackList` of the caller's gets
them too, and its model once more, as `callbacks.set_model` is where they begin.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def put_in(note_use: Callable[[], None]) -> None:
    """Give them to each call from now on."""
    import keras

    if keras.config.backend() == "torch":
        from keras.src.backend.torch.trainer import TorchTrainer as Trainer
    else:
        from keras.src.backend.tensorflow.trainer import TensorFlowTrainer as Trainer
    for name in ("fit", "evaluate", "predict"):
        setattr(Trainer, name, _with_ours(getattr(Trainer, name), note_use))


def _with_ours(method: Callable[..., Any], note_use: Callable[[], None]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # the test is of that
            return method(*args, **kwargs)
        note_use()
        bound.arguments["callbacks"] = _add(bound.arguments["self"], bound.arguments.get("callbacks"))
        return method(*bound.args, **bound.kwargs)

    return call


def _add(model: Any, given: Any) -> Any:
    import keras

    import ef_keras
    from ef_keras.callbacks import Elastic

    callbacks = ef_keras.callbacks(log_workers=False)  # they compare the logs exactly
    if not isinstance(given, keras.callbacks.CallbackList):
        return [*keras.tree.flatten(given or []), *callbacks]
    if not any(isinstance(one, Elastic) for one in given.callbacks):  # else, a validation within `fit`
        for ours in callbacks:
            given.append(ours)
        given.set_model(model)
        given.set_params(given.params)
    return given
