"""Features of Keras, each trained twice: by plain Keras, and by the workers of a job, each with half of the batch.

Without shuffling, two workers with batches of 8 take the same samples in each step as plain Keras with batches of 16,
so that weights and metrics must come out the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import layers

import ef_keras
from ef_common.collectives import operations
from ef_common.launch.environment import read_environment
from ef_common.launch.process import this_worker
from ef_keras import hooks
from ef_keras.backends import engine

BATCH_SIZE = 8
NUM_SAMPLES = 200
IS_TENSORFLOW = keras.config.backend() == "tensorflow"
IS_JAX = keras.config.backend() == "jax"
SEVERAL_STEPS = IS_TENSORFLOW or IS_JAX
"""Whether plain Keras can make several steps at a time."""


@dataclass
class Run:
    """One training.

    Attributes:
        elastic: By the workers of the job; else by plain Keras.
        world_size: Number of those workers.
        directory: For files.
    """

    elastic: bool
    world_size: int
    directory: Path
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        """Of one process."""
        return BATCH_SIZE if self.elastic else BATCH_SIZE * self.world_size

    def fit(
        self,
        model: Any,
        *args: Any,
        callbacks: Any = (),
        global_batch_size: int | None = None,
        hand_made: bool = False,
        **kwargs: Any,
    ) -> dict[str, list[float]]:
        """Train, perhaps with a list of callbacks that is made by hand. Returns the history."""
        batch_size = self.batch_size if self.elastic else global_batch_size or self.batch_size
        if args and isinstance(args[0], np.ndarray | list | dict | tuple):
            kwargs = {"batch_size": batch_size, **kwargs}
        settings = {"compensation": "none", "global_batch_size": global_batch_size, "log_workers": False}
        added = ef_keras.callbacks(**settings) if self.elastic else []
        kwargs = {"epochs": 2, "verbose": 0, "shuffle": False, **kwargs}
        everybody: Any = [*callbacks, *added]
        if hand_made:
            everybody = keras.callbacks.CallbackList(everybody, add_history=True, model=model)
        return dict(model.fit(*args, callbacks=everybody, **kwargs).history)


Feature = Callable[[Run], tuple[Any, dict[str, list[float]]]]
FEATURES: dict[str, Feature] = {}


def feature(function: Feature) -> Feature:
    """One of the features."""
    FEATURES[function.__name__] = function
    return function


def data(num: int = NUM_SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    dice = np.random.default_rng(0)
    x = dice.normal(size=(num, 12)).astype("float32")
    return x, (x[:, :4].sum(1) > 0).astype("int32")


def net() -> Any:
    return keras.Sequential([layers.Input((12,)), layers.Dense(16, activation="tanh"), layers.Dense(2)])


def compiled(model: Any, optimizer: Any = None, **kwargs: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], **kwargs)
    return model


# ---------------------------------------------------------------- data


@feature
def arrays_with_validation(run: Run) -> Any:
    model = compiled(net())
    return model, run.fit(model, *data(), validation_data=data(77))


@feature
def length_that_does_not_divide(run: Run) -> Any:
    model = compiled(net())
    return model, run.fit(model, *data(NUM_SAMPLES + 10), epochs=3)  # one worker has none of the last two


@feature
def validation_split(run: Run) -> Any:
    model = compiled(net())
    return model, run.fit(model, *data(), validation_split=0.2, validation_freq=2)


@feature
def class_weight(run: Run) -> Any:
    model = compiled(net())
    return model, run.fit(model, *data(), class_weight={0: 1.0, 1: 3.0})


@feature
def sample_weight(run: Run) -> Any:
    model = compiled(net())
    x, y = data()
    return model, run.fit(model, x, y, sample_weight=np.linspace(0, 2, len(x), dtype="float32"))


@feature
def steps_per_epoch(run: Run) -> Any:
    model = compiled(net())
    steps = 20 if run.elastic else 10
    return model, run.fit(model, *data(320), steps_per_epoch=steps, epochs=3)


@feature
def initial_epoch(run: Run) -> Any:
    model = compiled(net())
    return model, run.fit(model, *data(), initial_epoch=2, epochs=4)


@feature
def dictionary_of_inputs(run: Run) -> Any:
    inputs = {"a": layers.Input((4,), name="a"), "b": layers.Input((8,), name="b")}
    model = compiled(keras.Model(inputs, layers.Dense(2)(layers.Concatenate()([inputs["a"], inputs["b"]]))))
    x, y = data()
    return model, run.fit(model, {"a": x[:, :4], "b": x[:, 4:]}, y)


class MeansOfRows(keras.Model):
    """Of TensorFlow's ragged tensors, whose rows differ in length."""

    def __init__(self) -> None:
        super().__init__()
        self.last = layers.Dense(2)

    def call(self, x: Any, training: bool = False) -> Any:
        import tensorflow as tf

        return self.last(tf.reshape(tf.reduce_mean(x, axis=1), (-1, 1)))


@feature
def ragged_array(run: Run) -> Any:
    if not IS_TENSORFLOW:
        return net(), {}
    import tensorflow as tf

    x, y = data()
    model = compiled(MeansOfRows())
    rows = tf.ragged.constant([row[: 1 + number % 7].tolist() for number, row in enumerate(x)])
    return model, run.fit(model, rows, y, batch_size=run.batch_size)


class Batches(keras.utils.PyDataset):
    """Batches that can be asked for by their number."""

    def __init__(self, batch_size: int, num: int = 192) -> None:
        super().__init__()
        self._batch_size = batch_size
        self._x, self._y = data(num)

    def __len__(self) -> int:
        return -(-len(self._x) // self._batch_size)

    def __getitem__(self, index: int) -> Any:
        part = slice(index * self._batch_size, (index + 1) * self._batch_size)
        return self._x[part], self._y[part]


@feature
def py_dataset(run: Run) -> Any:
    model = compiled(net())
    return model, run.fit(model, Batches(run.batch_size), validation_data=Batches(run.batch_size))


@feature
def samples_read_one_by_one(run: Run) -> Any:
    model = compiled(net())

    def halve(x: Any, y: Any) -> Any:
        return x / 2, y

    def made(num: int) -> Any:
        return ef_keras.dataset(data(num), batch_size=run.batch_size, map=halve, shuffle=False)

    return model, run.fit(model, made(NUM_SAMPLES + 10), validation_data=made(77))


@feature
def samples_read_one_by_one_with_class_weight(run: Run) -> Any:
    model = compiled(net())
    samples = ef_keras.dataset(data(NUM_SAMPLES + 10), batch_size=run.batch_size, shuffle=False)
    return model, run.fit(model, samples, validation_data=data(77), class_weight={0: 1.0, 1: 3.0})


def stream(batch_size: int, num: int = 192) -> Any:
    if IS_TENSORFLOW:
        import tensorflow as tf

        return (
            tf.data.Dataset.from_tensor_slices(data(num))
            .shuffle(50, seed=3, reshuffle_each_iteration=False)
            .batch(batch_size)
        )
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(*(torch.from_numpy(part) for part in data(num))), batch_size)


@feature
def stream_of_batches(run: Run) -> Any:
    model = compiled(net())
    return model, run.fit(model, stream(run.batch_size), validation_data=stream(run.batch_size), epochs=3)


def of_unknown_length(batch_size: int, num: int = 192) -> Any:
    if IS_TENSORFLOW:
        return stream(batch_size, num).filter(lambda x, y: True)
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    class Samples(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter([(torch.from_numpy(x), int(y)) for x, y in zip(*data(num), strict=True)])

    return DataLoader(Samples(), batch_size)


@feature
def stream_of_unknown_length(run: Run) -> Any:
    model = compiled(net())
    return model, run.fit(
        model, of_unknown_length(run.batch_size, 188), validation_data=of_unknown_length(run.batch_size, 77), epochs=3
    )


def generated(batch_size: int, num: int) -> Any:
    x, y = data(num)
    while True:
        for start in range(0, num, batch_size):
            yield x[start : start + batch_size], y[start : start + batch_size]


@feature
def generators_without_an_end(run: Run) -> Any:
    model, factor = compiled(net()), 2 if run.elastic else 1
    return model, run.fit(
        model,
        generated(run.batch_size, 192),
        steps_per_epoch=8 * factor,
        validation_data=generated(run.batch_size, 64),
        validation_steps=3 * factor,
        epochs=1,
    )


@feature
def stream_whose_last_batch_is_short(run: Run) -> Any:
    model = compiled(net())
    # Of 23.5 batches, the workers' last window has one and a half: twelve samples, as the last batch of plain Keras.
    return model, run.fit(model, stream(run.batch_size, 188), epochs=3)


@feature
def py_dataset_whose_last_batch_is_short(run: Run) -> Any:
    model = compiled(net())
    return model, run.fit(model, Batches(run.batch_size, 188), epochs=3)


@feature
def wide_layers_and_a_short_last_batch(run: Run) -> Any:  # under torch the gradients lie in lent buckets
    model = compiled(wide_net(), keras.optimizers.SGD(0.01))
    return model, run.fit(model, stream(run.batch_size, 188))


@feature
def embedding(run: Run) -> Any:
    model = compiled(
        keras.Sequential([layers.Input((12,)), layers.Embedding(50, 4), layers.Flatten(), layers.Dense(2)])
    )
    x, y = data()
    return model, run.fit(model, np.clip(x * 10 + 25, 0, 49).astype("int32"), y)


# ---------------------------------------------------------------- models


class Around(keras.Model):
    """The network in a class of the user's."""

    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        self.inner = net() if inner is None else inner

    def call(self, x: Any, training: bool = False) -> Any:
        return self.inner(x)


class CustomStep(Around):
    """A `train_step` of the user's, which returns its own results."""

    def unpacked(self, batch: Any) -> Any:
        """The samples and labels of a batch."""
        return batch

    def changed(self, gradients: list[Any]) -> list[Any]:
        """What the optimizer gets."""
        return gradients

    def backward(self, loss: Any) -> list[Any]:
        """The gradients of a loss, on torch."""
        loss.backward()
        return [variable.value.grad for variable in self.trainable_variables]

    def train_step(self, *args: Any) -> Any:
        x, y = self.unpacked(args[-1])
        if IS_JAX:
            return self._train_step_of_jax(args[0], x, y)
        if IS_TENSORFLOW:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = self.changed(tape.gradient(loss, self.trainable_variables))
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        else:
            import torch

            self.zero_grad()
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = self.changed(self.backward(loss))
            with torch.no_grad():
                self.optimizer.apply(gradients, list(self.trainable_variables))
        return {"my_loss": loss}

    def _train_step_of_jax(self, state: Any, x: Any, y: Any) -> Any:
        import jax

        weights, others, settings, metrics = state

        def cost(weights: Any) -> tuple[Any, Any]:
            y_pred, others_then = self.stateless_call(weights, others, x, training=True)
            return self.compute_loss(y=y, y_pred=y_pred), others_then

        (loss, others), gradients = jax.value_and_grad(cost, has_aux=True)(weights)
        weights, settings = self.optimizer.stateless_apply(settings, self.changed(gradients), weights)
        return {"my_loss": loss}, (weights, others, settings, metrics)


def wide_net() -> Any:
    """Has gradients that are large enough to be reduced, under torch, while the backward pass runs."""
    hidden = [layers.Dense(width, activation="tanh", name=f"hidden_{width}") for width in (3000, 500)]
    return keras.Sequential([layers.Input((12,)), *hidden, layers.Dense(2, name="last")])


class HalvesGradients(CustomStep):
    """Gives the optimizer other tensors. The mean of the halves is half of the mean."""

    def changed(self, gradients: list[Any]) -> list[Any]:
        return [gradient * 0.5 for gradient in gradients]


class AveragesWeights(CustomStep):
    """Keeps a moving average of its weights, which moves after each update, as a mean teacher does."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [variable.shape for variable in self.trainable_variables]
        self.averages = [self.add_weight(shape=shape, initializer="zeros", trainable=False) for shape in shapes]

    def train_step(self, *args: Any) -> Any:
        found = super().train_step(*args)
        if not IS_JAX:
            for average, weight in zip(self.averages, self.trainable_variables, strict=True):
                average.assign(0.9 * average.value + 0.1 * weight.value)
            return found
        logs, (weights, others, *rest) = found
        places = {id(variable): place for place, variable in enumerate(self.non_trainable_variables)}
        others = list(others)
        for average, weight in zip(self.averages, weights, strict=True):
            others[places[id(average)]] = 0.9 * others[places[id(average)]] + 0.1 * weight
        return logs, (weights, others, *rest)


class HalvesInPlace(HalvesGradients):
    """Changes the tensors, past the count of their versions, after a backward pass that has begun with Keras's hook."""

    def backward(self, loss: Any) -> list[Any]:
        return super().backward(self.optimizer.scale_loss(loss))

    def changed(self, gradients: list[Any]) -> list[Any]:
        for gradient in gradients:
            gradient.data.mul_(0.5)
        return gradients


class AsksForGradients(HalvesGradients):
    """Leaves no gradients in the parameters."""

    def backward(self, loss: Any) -> list[Any]:
        import torch

        return list(torch.autograd.grad(loss, [variable.value for variable in self.trainable_variables]))


class OfInputsAlone(CustomStep):
    """Unpacks batches that have one part."""

    def unpacked(self, batch: Any) -> Any:
        (x,) = batch
        return x, keras.ops.cast(keras.ops.sum(x[:, :4], axis=1) > 0, "int32")

    def compute_loss(self, *args: Any, y: Any = None, y_pred: Any = None, **kwargs: Any) -> Any:
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))


@feature
def custom_train_step_that_averages_weights(run: Run) -> Any:
    model = AveragesWeights()
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    run.fit(model, *data())
    return model, {}


@feature
def custom_train_step(run: Run) -> Any:
    model = CustomStep()
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = run.fit(model, *data())
    assert set(history) == {"my_loss"}
    return model, {}  # the result of the last batch: of one worker's part there


class Autoencoder(keras.Model):
    """Variational, with a `train_step` in place of a `call`. Its noise is a function of the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([layers.Input((12,)), layers.Dense(8, activation="tanh"), layers.Dense(6)])
        self.decoder = keras.Sequential([layers.Input((3,)), layers.Dense(12)])
        self.mean_loss = keras.metrics.Mean("loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.mean_loss]

    def train_step(self, x: Any) -> Any:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            mean, spread = tf.split(self.encoder(x), 2, axis=1)
            z = mean + tf.exp(0.5 * spread) * tf.cos(9.0 * x[:, :3])
            divergence = tf.reduce_mean(tf.square(mean) + tf.exp(spread) - spread)
            loss = tf.reduce_mean(tf.square(self.decoder(z) - x)) + 0.1 * divergence
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.mean_loss.update_state(loss)
        return {"loss": self.mean_loss.result()}


@feature
def autoencoder_without_a_call(run: Run) -> Any:
    if not IS_TENSORFLOW:
        return net(), {}
    model = Autoencoder()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    return model, run.fit(model, data(192)[0])


class Adversaries(keras.Model):
    """Two networks, each with an optimizer of its own, and no `call`. The layers of one have not been built."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([layers.Input((4,)), layers.Dense(8, activation="tanh"), layers.Dense(12)])
        self.judge = keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dense(1)])
        self.losses_of = [keras.metrics.Mean("judge_loss"), keras.metrics.Mean("generator_loss")]

    def compile(self, judge_optimizer: Any, generator_optimizer: Any, **kwargs: Any) -> None:  # type: ignore[override]
        super().compile(**kwargs)
        self.judge_optimizer, self.generator_optimizer = judge_optimizer, generator_optimizer

    @property
    def metrics(self) -> list[Any]:
        return self.losses_of

    def train_step(self, batch: Any) -> Any:
        import tensorflow as tf

        x, _ = batch
        with tf.GradientTape() as tape:
            made = self.generator(x[:, :4])
            judge_loss = tf.reduce_mean(tf.nn.softplus(-self.judge(x)) + tf.nn.softplus(self.judge(made)))
        weights = self.judge.trainable_weights
        self.judge_optimizer.apply_gradients(zip(tape.gradient(judge_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            generator_loss = tf.reduce_mean(tf.nn.softplus(-self.judge(self.generator(x[:, :4]))))
        weights = self.generator.trainable_weights
        self.generator_optimizer.apply_gradients(zip(tape.gradient(generator_loss, weights), weights, strict=True))
        for metric, loss in zip(self.losses_of, (judge_loss, generator_loss), strict=True):
            metric.update_state(loss)
        return {metric.name: metric.result() for metric in self.losses_of}


@feature
def adversaries_without_a_call(run: Run) -> Any:
    if not IS_TENSORFLOW:
        return net(), {}
    model = Adversaries()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.SGD(0.05, momentum=0.9))
    built: list[list[int]] = []

    def look(epoch: int, logs: Any) -> None:
        everybody = model.judge_optimizer, model.generator_optimizer, model.optimizer
        built.append([len(hooks.trained_variables(one)) if one.built else 0 for one in everybody])

    history = run.fit(model, *data(192), callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=look)])
    assert built[0] == ([4, 4, 0] if run.elastic else [0, 0, 0])  # all that a checkpoint may hold can be loaded
    return model, history


@feature
def adversaries_without_a_call_that_run_eagerly(run: Run) -> Any:
    if not IS_TENSORFLOW:
        return net(), {}
    model = Adversaries()
    model.judge.build((None, 12))
    model.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.05), run_eagerly=True)
    return model, run.fit(model, *data(96), epochs=1)


def of_step(run: Run, model: Any, *given: Any, **kwargs: Any) -> Any:
    """Train a model that makes its own steps, with the optimizer alone that it was compiled with."""
    run.fit(model, *given, **kwargs)
    return model, {}


def changing(run: Run, model: Any) -> Any:
    model.compile(keras.optimizers.SGD(0.02), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return of_step(run, model, *data())


@feature
def custom_train_step_that_changes_gradients(run: Run) -> Any:
    return changing(run, HalvesGradients(wide_net()))


@feature
def custom_train_step_that_changes_gradients_in_place(run: Run) -> Any:
    if IS_TENSORFLOW or IS_JAX:  # whose gradients do not change
        return net(), {}
    return changing(run, HalvesInPlace(wide_net()))


@feature
def custom_train_step_that_asks_for_gradients(run: Run) -> Any:
    if IS_TENSORFLOW or IS_JAX:
        return net(), {}
    return changing(run, AsksForGradients(wide_net()))


@feature
def inputs_alone_read_one_by_one(run: Run) -> Any:
    model = OfInputsAlone()
    model.compile(keras.optimizers.SGD(0.1))
    return of_step(run, model, ef_keras.dataset(data()[0], batch_size=run.batch_size, shuffle=False))


@feature
def wide_layers(run: Run) -> Any:
    model = compiled(wide_net(), keras.optimizers.SGD(0.01))
    return model, run.fit(model, *data())


@feature
def several_outputs(run: Run) -> Any:
    inputs = layers.Input((12,))
    hidden = layers.Dense(16, activation="tanh")(inputs)
    model = keras.Model(
        inputs, {"kind": layers.Dense(2, name="kind")(hidden), "size": layers.Dense(1, name="size")(hidden)}
    )
    model.compile(
        keras.optimizers.SGD(0.05),
        {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    x, y = data(192)  # Keras weighs the losses of the outputs by batches, not by samples
    return model, run.fit(model, x, {"kind": y, "size": x.sum(1, keepdims=True)})


@feature
def steps_per_execution(run: Run) -> Any:
    if not SEVERAL_STEPS:
        return net(), {}
    model = compiled(net(), steps_per_execution=3)
    return model, run.fit(model, *data())


class OwnTrainFunction(Around):
    """Takes the batches of an execution by itself."""

    def make_train_function(self, force: bool = False) -> Any:
        if self.train_function is not None and not force:
            return self.train_function
        import tensorflow as tf

        compiled = tf.function(self.train_step, jit_compile=self.jit_compile)
        step = self.train_step if self.run_eagerly else compiled

        def function(iterator: Any) -> Any:
            for _ in range(self.steps_per_execution):
                logs = step(next(iterator))
            return logs

        self.train_function = function
        return function


def own_train_function(run: Run, **kwargs: Any) -> Any:
    if not IS_TENSORFLOW:
        return net(), {}
    model = OwnTrainFunction()
    model.build((None, 12))
    x, y = data(192)
    return compiled(model, jit_compile=run.elastic, **kwargs), (x, y)


@feature
def own_train_function_and_xla(run: Run) -> Any:
    model, given = own_train_function(run)
    return model, run.fit(model, *given) if given else {}


@feature
def own_train_function_of_several_steps_and_xla(run: Run) -> Any:
    model, given = own_train_function(run, steps_per_execution=2)
    return model, run.fit(model, *given) if given else {}


@feature
def run_eagerly(run: Run) -> Any:
    model = compiled(net(), run_eagerly=True)
    return model, run.fit(model, *data(), epochs=1)


class OnNumbers(Around):
    """Cannot be called on symbols."""

    def call(self, x: Any, training: bool = False) -> Any:
        return super().call(x) * (1.0 if float(keras.ops.max(x)) > -1e9 else 0.0)


@feature
def model_that_cannot_be_traced(run: Run) -> Any:
    if not IS_TENSORFLOW:  # plain Keras refuses it, too
        return net(), {}
    model = compiled(OnNumbers(), run_eagerly=True)
    return model, run.fit(model, *data(96), epochs=1)


class Averages(layers.Layer):
    """Has statistics, and no weights that are trained."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        shifted = x - self.mean
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
        return shifted


def untrained(**kwargs: Any) -> Any:
    frozen = layers.Dense(2)
    frozen.trainable = False
    return compiled(keras.Sequential([layers.Input((12,)), Averages(), frozen]), **kwargs)


@feature
def no_trainable_weights(run: Run) -> Any:
    model = untrained()
    return model, run.fit(model, *data(210), validation_data=data(77))  # one worker has few of the last ones


@feature
def no_trainable_weights_at_all_and_adam(run: Run) -> Any:
    model = net()
    model.trainable = False
    return compiled(model, keras.optimizers.Adam()), run.fit(model, *data())


@feature
def no_trainable_weights_and_several_steps_at_a_time(run: Run) -> Any:
    if not SEVERAL_STEPS:
        return net(), {}
    model = untrained(steps_per_execution=3)
    return model, run.fit(model, *data())


@feature
def no_trainable_weights_and_a_stop_of_one_worker(run: Run) -> Any:
    model = untrained()
    return model, run.fit(model, *data(), callbacks=[Stops(run)])


@feature
def no_trainable_weights_and_a_global_batch(run: Run) -> Any:
    model = untrained()
    return model, run.fit(model, *data(210), global_batch_size=32)


@feature
def evaluation_of_several_steps_at_a_time(run: Run) -> Any:
    model = compiled(net(), **({"steps_per_execution": 3} if SEVERAL_STEPS else {}))
    begun: list[int] = []
    noting = keras.callbacks.LambdaCallback(on_test_batch_begin=lambda batch, logs=None: begun.append(batch))
    history = run.fit(model, *data(), validation_data=data(77), callbacks=[noting])
    added = ef_keras.callbacks() if run.elastic else []
    size = run.batch_size
    results = model.evaluate(*data(77), batch_size=size, verbose=0, callbacks=[noting, *added])
    return model, {**history, "evaluated": results, "begun": begun}


@feature
def xla(run: Run) -> Any:
    model = compiled(net(), jit_compile=run.elastic and IS_TENSORFLOW)
    return model, run.fit(model, *data(), validation_data=data(77), epochs=1)


@feature
def torch_compile(run: Run) -> Any:
    if not run.elastic or IS_TENSORFLOW or IS_JAX:
        return (model := compiled(net())), run.fit(model, *data())
    import torch

    traced = partial(torch.compile, backend="eager")  # needs no C++ compiler
    with mock.patch.object(torch, "compile", traced):
        model = compiled(net(), jit_compile=True)
        return model, run.fit(model, *data())


@feature
def frozen_layer_and_unused_one(run: Run) -> Any:
    model = net()
    model.layers[0].trainable = False
    model.unused = layers.Dense(3)
    model.unused.build((None, 12))
    return compiled(model), run.fit(model, *data())


class Sum(layers.Layer):
    """Of its inputs, the second of which may be missing."""

    def call(self, x: Any, other: Any = None) -> Any:
        return x if other is None else x + other


@feature
def input_that_is_missing(run: Run) -> Any:
    x, y = data(96)
    parts = [slice(start, start + run.batch_size) for start in range(0, len(x), run.batch_size)]
    inputs = {"x": layers.Input((12,), name="x"), "other": layers.Input((12,), name="other", optional=True)}
    model = compiled(keras.Model(inputs, net()(Sum()(inputs["x"], inputs["other"]))))
    return model, run.fit(model, (({"x": x[part], "other": None}, y[part]) for part in parts), epochs=1)


@feature
def mixed_precision(run: Run) -> Any:
    policy = keras.mixed_precision.DTypePolicy("mixed_float16")
    inner = [layers.Dense(16, activation="tanh", dtype=policy), layers.Dense(2, dtype=policy)]
    model = keras.Sequential([layers.Input((12,)), *inner, layers.Activation("linear", dtype="float32")])
    optimizer = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)
    compiled(model, optimizer)
    return model, run.fit(model, *data(), epochs=1)


# ---------------------------------------------------------------- optimizers


@feature
def adam_with_clipping_and_averages(run: Run) -> Any:
    model = compiled(net(), keras.optimizers.Adam(0.01, global_clipnorm=0.1, use_ema=True))
    return model, run.fit(model, *data())


@feature
def gradient_accumulation(run: Run) -> Any:
    model = compiled(net(), keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    return model, run.fit(model, *data(192))


@feature
def learning_rate_schedule(run: Run) -> Any:
    num_steps = 5 * (run.world_size if run.elastic else 1)  # those of one worker
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, num_steps, 0.5, staircase=True)
    model = compiled(net(), keras.optimizers.SGD(rate))
    return model, run.fit(model, *data(26 * BATCH_SIZE))


# ---------------------------------------------------------------- callbacks


@feature
def learning_rate_callbacks(run: Run) -> Any:
    model = compiled(net())
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=10.0),
    ]
    return model, run.fit(model, *data(), callbacks=callbacks, epochs=3)


class SetsRates(keras.callbacks.Callback):
    """Sets other learning rates in each worker; those of the first one hold for all."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def _set(self, rate: float) -> None:
        rank = this_worker(engine(None)).session.rank if self._run.elastic else 0
        self.model.optimizer.learning_rate = rate * (1 + 5 * rank)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._set(0.1 / (1 + batch))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._set(0.02 + 0.01 * epoch)


def rates_of_workers(run: Run, *, optimizer: Any = None, global_batch_size: int | None = None, **kwargs: Any) -> Any:
    model = compiled(net(), optimizer, **kwargs)
    history = run.fit(model, *data(192), callbacks=[SetsRates(run)], global_batch_size=global_batch_size)
    assert float(model.optimizer.learning_rate) == float(np.float32(0.03))
    return model, history


@feature
def rates_that_differ_between_workers(run: Run) -> Any:
    return rates_of_workers(run, optimizer=keras.optimizers.Adam(0.1))  # whose step computes with the rate alone


@feature
def rates_that_differ_between_workers_and_xla(run: Run) -> Any:
    return rates_of_workers(run, jit_compile=run.elastic and IS_TENSORFLOW)


@feature
def rates_that_differ_between_workers_and_several_steps_at_a_time(run: Run) -> Any:
    return rates_of_workers(run, **({"steps_per_execution": 3} if SEVERAL_STEPS else {}))


@feature
def rates_that_differ_between_workers_and_a_scaled_loss(run: Run) -> Any:
    inner = keras.optimizers.SGD(0.1)
    return rates_of_workers(run, optimizer=keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=64.0))


@feature
def rates_that_differ_between_workers_and_a_global_batch(run: Run) -> Any:
    return rates_of_workers(run, global_batch_size=32)


@feature
def early_stopping(run: Run) -> Any:
    model = compiled(net(), keras.optimizers.SGD(1.0))
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    return model, run.fit(model, *data(), callbacks=[stopping], validation_data=data(50), epochs=12)


@feature
def model_checkpoint(run: Run) -> Any:
    model = compiled(net())
    path = run.directory / f"checkpoint-{run.elastic}" / "best.keras"
    saving = keras.callbacks.ModelCheckpoint(path, monitor="loss", save_best_only=True)
    history = run.fit(model, *data(), callbacks=[saving])
    if run.elastic:
        operations.gather(this_worker(engine(None)).session, 0)  # rank 0 may still be writing
        for mine, saved in zip(model.get_weights(), keras.saving.load_model(path).get_weights(), strict=True):
            np.testing.assert_array_equal(mine, saved)
    return model, history


@feature
def logs_on_disk(run: Run) -> Any:
    model = compiled(net())
    directory = run.directory / f"logs-{run.elastic}"
    directory.mkdir(exist_ok=True)
    callbacks = [keras.callbacks.CSVLogger(directory / "log.csv")]
    if IS_TENSORFLOW:
        callbacks.append(keras.callbacks.TensorBoard(directory / "board", write_graph=False))
    history = run.fit(model, *data(), callbacks=callbacks)
    if run.elastic:
        operations.gather(this_worker(engine(None)).session, 0)
        assert len((directory / "log.csv").read_text().splitlines()) == 3
        assert len(list(directory.glob("board/train/events*"))) == int(IS_TENSORFLOW)
    return model, history


class Stops(keras.callbacks.Callback):
    """Stops in the middle of an epoch, in one worker; the others follow after the next step."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._run.elastic:
            self.model.stop_training = batch == 4
        elif this_worker(engine(None)).session.rank == 1 and batch == 3:
            self.model.stop_training = True


@feature
def stop_of_one_worker_in_mid_epoch(run: Run) -> Any:
    model = compiled(net())
    return model, run.fit(model, *data(), callbacks=[Stops(run)])


class StopsBefore(keras.callbacks.Callback):
    """The same before a step. No callback in this `fit` has anything to do after one."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._run.elastic:
            self.model.stop_training = batch == 4
        elif this_worker(engine(None)).session.rank == 1 and batch == 3:
            self.model.stop_training = True


@feature
def stop_of_one_worker_before_a_step(run: Run) -> Any:
    model = compiled(net())
    return model, run.fit(model, *data(), callbacks=[StopsBefore(run)])


@feature
def list_of_callbacks_made_by_hand(run: Run) -> Any:
    model = compiled(net())
    return model, run.fit(model, *data(), hand_made=True)


# ---------------------------------------------------------------- a global batch
# Of plain Keras it is the batch; the workers share it, in passes of at most 8 samples.


@feature
def global_batch(run: Run) -> Any:
    model = compiled(net(), keras.optimizers.Adam(0.01, global_clipnorm=0.1))
    return model, run.fit(model, *data(210), global_batch_size=32, epochs=3, validation_data=data(77))


@feature
def global_batch_that_the_workers_cannot_share_evenly(run: Run) -> Any:
    model = compiled(net())
    return model, run.fit(model, *data(), global_batch_size=29, class_weight={0: 1.0, 1: 3.0})


@feature
def global_batch_of_a_dataset(run: Run) -> Any:
    model = compiled(net())
    size = BATCH_SIZE if run.elastic else 24
    made = ef_keras.dataset(data(210), batch_size=size, shuffle=False, global_batch_size=24)
    return model, run.fit(model, made)


@feature
def global_batch_and_steps_per_epoch(run: Run) -> Any:
    model = compiled(net())
    return model, run.fit(model, *data(320), global_batch_size=32, steps_per_epoch=5, epochs=4)


@feature
def global_batch_of_several_batches_of_a_stream(run: Run) -> Any:
    model = compiled(net())
    made = stream(BATCH_SIZE if run.elastic else 24, 188)  # the last update is of 20 samples
    return model, run.fit(model, made, global_batch_size=24, epochs=3)


@feature
def global_batch_that_is_a_batch_of_a_stream(run: Run) -> Any:
    model = compiled(net(), keras.optimizers.Adam(0.01))
    return model, run.fit(model, stream(25, 188), global_batch_size=25, epochs=3)  # slices of 13 and 12


@feature
def global_batch_of_a_py_dataset(run: Run) -> Any:
    model = compiled(net())
    return model, run.fit(model, Batches(BATCH_SIZE if run.elastic else 16, 188), global_batch_size=16)


@feature
def global_batch_of_a_stream_and_steps_per_epoch(run: Run) -> Any:
    model = compiled(net())
    made = stream(BATCH_SIZE if run.elastic else 16, 192)
    return model, run.fit(model, made, global_batch_size=16, steps_per_epoch=4, epochs=3)


@feature
def global_batch_of_which_one_worker_has_none(run: Run) -> Any:
    model = compiled(net())
    return model, run.fit(model, *data(99), global_batch_size=32, epochs=3)  # the last three are one's


@feature
def global_batch_and_a_custom_step(run: Run) -> Any:
    model = CustomStep()
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    run.fit(model, *data(), global_batch_size=32)
    return model, {}


class AtMost(layers.Layer):
    """Sees how many samples a pass has."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            assert (x.shape[0] or 0) <= self._limit
        return x


@feature
def global_batch_in_passes_that_are_not_larger_than_a_batch(run: Run) -> Any:
    model = net()
    model.add(AtMost(BATCH_SIZE if run.elastic else 32))
    return compiled(model, run_eagerly=True), run.fit(model, *data(), global_batch_size=32, epochs=1)


@feature
def global_batch_with_a_scaled_loss(run: Run) -> Any:
    inner = keras.optimizers.SGD(0.1)
    model = compiled(net(), keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=64.0, dynamic_growth_steps=3))
    return model, run.fit(model, *data(), global_batch_size=32)


@feature
def global_batch_and_a_stop_of_one_worker_in_mid_epoch(run: Run) -> Any:
    model = compiled(net())
    return model, run.fit(model, *data(), global_batch_size=16, callbacks=[Stops(run)])


# ---------------------------------------------------------------- the worker


def train_all(names: list[str] | None = None) -> dict[str, Any]:
    """Train with each feature, and in the first worker also by plain Keras.

    Returns:
        For each: the weights' sum, and in the first worker the largest difference of weights and of results between
        the two trainings.
    """
    environment = read_environment()
    directory = environment.run_dir or Path()
    found: dict[str, Any] = {}
    for name in names or FEATURES:
        plain = None if environment.local_rank else _train(name, Run(False, 2, directory / "plain"))
        weights, history = _train(name, Run(True, 2, directory / "files"))
        found[name] = {"sum": [float(np.asarray(part, np.float64).sum()) for part in weights]}
        if plain is not None:
            found[name] |= {
                "weights": max(float(np.abs(a - b).max()) for a, b in zip(plain[0], weights, strict=True)),
                "history": {key: float(np.abs(np.subtract(plain[1][key], history[key])).max()) for key in plain[1]},
            }
    return found


def _train(name: str, run: Run) -> tuple[list[np.ndarray], dict[str, list[float]]]:
    keras.utils.set_random_seed(7)
    run.directory.mkdir(exist_ok=True)
    model, history = FEATURES[name](run)
    return model.get_weights(), history
