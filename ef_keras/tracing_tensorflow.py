"""Traces a model's own step in TensorFlow: to create its variables as Keras does there, and anew for each `fit`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from ef_common.errors import UnsupportedError
from ef_keras import hooks


def build(model: Any, batch: Any) -> None:
    """Create all variables of model, metrics and optimizers.

    Keras creates none before the first step under TensorFlow. So a model needs no `call` there, and its `train_step`
    may take a batch apart in a way of its own, as those of a VAE and a GAN do.

    Raises:
        UnsupportedError: The model runs eagerly, and has layers that only its first step would create variables of.
    """
    why = _failure_of(hooks.build, model, batch)
    if why is None:
        return
    if not model.run_eagerly:
        _build_by_trace(model, batch)
        return
    why = _failure_of(hooks.build_eagerly, model, batch)
    unbuilt = [layer.name for layer in hooks.unbuilt_layers_within(model)]
    if why is not None and unbuilt:
        raise UnsupportedError(
            "the variables of these layers cannot be created before the first step, as the model runs eagerly and "
            "cannot be called with a batch. Call layer.build(shape), or the layer with an example, when the model is "
            f"made. Received: {', '.join(unbuilt)}"
        ) from why
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _failure_of(create: Callable[[Any, Any], None], model: Any, batch: Any) -> Exception | None:
    """Why the variables of a model could not be created in this way; None if they were."""
    try:
        if not hooks.has_call(model):  # which Keras would warn of
            raise NotImplementedError("the model has no call()")
        create(model, batch)
    except Exception as error:
        return error
    return None


def _build_by_trace(model: Any, batch: Any) -> None:
    """Trace a step, which runs none of it. Optimizers are built outside of the graph, where their values are known."""
    updated: dict[int, Sequence[Any]] = {}
    optimizers = hooks.all_optimizers(model)
    with ExitStack() as stack:
        stack.enter_context(untraced(model))
        for optimizer in optimizers:
            stack.enter_context(_noted(optimizer, updated))
        step = tf.function(lambda data: model.train_step(data), autograph=False)
        step.get_concrete_function(hooks.without_missing(batch))
    for optimizer in optimizers:
        if id(optimizer) in updated and not optimizer.built:
            optimizer.build(updated[id(optimizer)])


@contextmanager
def _noted(optimizer: Any, updated: dict[int, Sequence[Any]]) -> Iterator[None]:
    """Note which variables an optimizer would update, and let it update none."""

    def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if trainable_variables is not None:
            updated[id(optimizer)] = list(trainable_variables)

    vars(optimizer)["apply"] = apply  # past what Keras tracks
    try:
        yield
    finally:
        del vars(optimizer)["apply"]


@contextmanager
def untraced(model: Any) -> Iterator[None]:
    """Within this context, methods of the model's class that are `tf.function`s have not been traced yet.

    The graph of one that makes updates contains what stood between the model and its optimizers when it was traced.
    """
    own = vars(model)
    methods = {name: method for cls in reversed(type(model).__mro__) for name, method in vars(cls).items()}
    fresh = {
        name: copy.copy(method).__get__(model, type(model))
        for name, method in methods.items()
        if isinstance(method, tf.types.experimental.PolymorphicFunction) and name not in own
    }
    own.update(fresh)  # past what Keras tracks
    try:
        yield
    finally:
        for name in fresh:
            own.pop(name, None)
