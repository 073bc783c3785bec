"""What workers do in the tests of refusals, hooks and of a world of one; imported after Keras's backend is chosen."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from keras.src.callbacks import OrbaxCheckpoint
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

import ef_keras
from ef_common.errors import JobFailed, UnsupportedError, UsageError
from ef_common.launch.environment import read_environment
from ef_common.launch.failing import Failing
from ef_common.launch.process import this_worker
from ef_keras import hooks, probe
from ef_keras.backends import engine
from ef_keras.memories import memory_of, restore
from ef_keras.rank_zero import OnRankZero
from tests import sources
from tests.keras.features import Batches, CustomStep, compiled, data, net, untrained
from tests.parts import assert_one_sentence, changes


def _message(act: Callable[[], Any]) -> str:
    """What was raised, here or, before this worker has come so far, in another one."""
    try:
        act()
    except (UsageError, JobFailed) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# ---------------------------------------------------------------- refusals


def _endless() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(data(16)).batch(4).repeat()


def refuse_endless_data() -> str:
    return _message(lambda: compiled(net()).fit(_endless(), verbose=0, callbacks=ef_keras.callbacks()))


def refuse_endless_validation() -> str:
    model = compiled(net())
    callbacks = ef_keras.callbacks()
    message = _message(lambda: model.fit(*data(), validation_data=_endless(), verbose=0, callbacks=callbacks))
    assert not int(model.optimizer.iterations)
    return message


def refuse_endless_evaluation() -> str:
    return _message(lambda: compiled(net()).evaluate(_endless(), verbose=0, callbacks=ef_keras.callbacks()))


class Idle(CustomStep):
    """Forgets to make an update."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": self.compute_loss(y=y, y_pred=self(x, training=True))}


def refuse_step_without_update() -> str:
    model = Idle()
    model.compile(keras.optimizers.SGD(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return _message(lambda: model.fit(*data(), verbose=0, callbacks=ef_keras.callbacks()))


def refuse_horovod_of_the_program() -> str:
    import horovod.tensorflow as hvd

    hvd.init()
    return _message(lambda: compiled(net()).fit(*data(), verbose=0, callbacks=ef_keras.callbacks()))


def refuse_streams_that_differ() -> str:
    import tensorflow as tf

    stream = tf.data.Dataset.from_tensor_slices(data(64)).shuffle(64).batch(4)  # no seed: another order everywhere
    return _message(lambda: compiled(net()).fit(stream, verbose=0, callbacks=ef_keras.callbacks()))


def refuse_data_that_ends_early() -> str:
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    class Short(IterableDataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 36

        def __iter__(self) -> Any:
            return iter([(torch.from_numpy(x), int(y)) for x, y in zip(*data(16), strict=True)])

    stream = DataLoader(Short(), 4)
    return _message(lambda: compiled(net()).fit(stream, verbose=0, callbacks=ef_keras.callbacks()))


def refuse_replicas() -> str:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = compiled(net())
    x, y = data(64)
    if ef_keras.is_rank_zero():
        return _message(lambda: model.evaluate(x, y, verbose=0, callbacks=ef_keras.callbacks()))
    return _message(lambda: model.fit(x, y, verbose=0, callbacks=ef_keras.callbacks()))


def _stateful() -> Any:
    """A model for batches of 8 samples, of which row i goes on where row i of the batch before has ended."""
    inputs = keras.Input(batch_shape=(8, 12))
    states = keras.layers.Bidirectional(keras.layers.LSTM(4, stateful=True))(keras.layers.Reshape((3, 4))(inputs))
    return compiled(keras.Model(inputs, keras.layers.Dense(2)(states)))


def refuse_stateful_layers() -> str:
    model, (x, y) = _stateful(), data(64)
    fit = {"batch_size": 8, "verbose": 0, "callbacks": ef_keras.callbacks()}
    if ef_keras.is_rank_zero():
        return _message(lambda: model.evaluate(x, y, **fit))
    return _message(lambda: model.fit(x, y, shuffle=False, **fit))


def refuse_layers() -> dict[str, Any]:
    """What comes of layers that several workers cannot have, in one worker."""
    Failing.tell = lambda self, error: None  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    x, y = data(64)

    def fit(model: Any, size: int | None = None) -> str:
        callbacks = ef_keras.callbacks(global_batch_size=size)
        return _message(lambda: model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks))

    found["stateful"], found["in passes"] = fit(_stateful()), fit(_stateful(), 16)
    model, results = _stateful(), []
    for callbacks in ([], ef_keras.callbacks()):
        options = {"batch_size": 8, "verbose": 0, "callbacks": callbacks}
        model.layers[2].reset_states()
        results.append([model.evaluate(x, y, **options), model.predict(x, **options).tolist()])
    found["evaluated"] = results[0] == results[1]
    for name in ("synchronized", "frozen"):
        layers = [keras.layers.BatchNormalization(synchronized=True, name="shared"), *net().layers]
        layers[0].trainable = name != "frozen"
        found[name] = fit(compiled(keras.Sequential(layers)))
    return found


class StopsEvaluating(keras.callbacks.Callback):
    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_evaluating = batch >= 1


def refuse_evaluation_that_is_stopped() -> str:
    callbacks = [StopsEvaluating(), *ef_keras.callbacks()]
    validation = Batches(8, 24)  # of which the other worker has one
    return _message(lambda: compiled(net()).fit(*data(64), validation_data=validation, verbose=0, callbacks=callbacks))


class Inner(CustomStep):
    """Makes its updates with an optimizer that is held somewhere."""

    def __init__(self, *places: str) -> None:
        super().__init__()
        optimizer = keras.optimizers.SGD(0.1, name="within")
        optimizer.build(self.trainable_variables)
        if "compiled" in places:
            self.inner.compile(optimizer)
        if "layer" in places:
            self.inner.layers[0].opt = optimizer
        if "containers of a layer" in places:
            self.inner.opts = {"gan": [{"d": optimizer}]}
        if "containers" in places:
            self.opts = {"gan": ({"d": optimizer}, 1)}
        self.held = lambda: optimizer

    def train_step(self, *args: Any) -> Any:
        outer, self.optimizer = self.optimizer, self.held()
        try:
            return super().train_step(*args)
        finally:
            self.optimizer = outer


def refuse_optimizer_of_a_model_within() -> list[str]:
    """What comes of trainings whose step uses it, if a layer alone holds it, and then if the model does, too."""
    Failing.tell = lambda self, error: None  # type: ignore[method-assign]
    found = []
    for places in (["compiled"], ["layer"], ["containers of a layer"], ["containers"], ["compiled", "containers"]):
        model = Inner(*places)
        model.compile(keras.optimizers.SGD(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        found.append(_message(lambda: model.fit(*data(), verbose=0, callbacks=ef_keras.callbacks())))  # noqa: B023
        assert not {"apply", "stateless_apply"} & set(vars(model.held()))
    return found


def _refusal(
    *fit: Any, deterministic: bool = False, size: Any = 32, model: Any = None, batch_size: int | None = 8, **kwargs: Any
) -> str:
    model = compiled(net()) if model is None else model
    if batch_size is not None:
        kwargs["batch_size"] = batch_size

    def act() -> None:
        callbacks = ef_keras.callbacks(global_batch_size=size, deterministic=deterministic)
        model.fit(*fit, verbose=0, callbacks=callbacks, **kwargs)

    return _message(act)


def _with_two_optimizers() -> Any:
    model = CustomStep()
    model.other = keras.optimizers.SGD()  # of a discriminator, say
    return compiled(model)


class DrawsItself(keras.layers.Layer):
    """Noise of TensorFlow's own."""

    def call(self, x: Any, training: bool = False) -> Any:
        import tensorflow as tf

        return x + tf.random.normal(tf.shape(x)) if training else x


class Averages(CustomStep):
    """Keeps a mean of its weights, which begins with them."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = keras.models.clone_model(self.inner)
        self.mean.set_weights(self.inner.get_weights())

    def train_step(self, *args: Any) -> Any:
        logs = super().train_step(*args)
        for mean, weight in zip(self.mean.weights, self.inner.weights, strict=True):
            mean.assign(0.5 * mean + 0.5 * weight)
        return logs


class Counts(keras.layers.Layer):
    """Counts its calls."""

    def build(self, shape: Any) -> None:
        self.num = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="num")

    def call(self, x: Any) -> Any:
        self.num.assign(self.num + 1)
        return x


class OfGraphs(keras.Model):  # type: ignore[misc, name-defined]
    """A mean over the nodes of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def call(self, x: Any) -> Any:
        return keras.ops.segment_sum(self.inner(x[0]), x[1], num_segments=8)


def _graphs() -> Any:
    """Batches of several graphs: the features of all nodes, the number of the graph of each, and the graphs' labels."""
    import tensorflow as tf

    x, y = data(64)
    return tf.data.Dataset.from_tensors(((x, np.repeat(np.arange(8), 8)), y[:8])).repeat(8)


def refuse_global_batches() -> list[str]:
    """Everything that cannot be done with a global batch."""
    import tensorflow as tf

    # The first refusal would end the job, in which the others are to be seen as well.
    Failing.tell = lambda self, error: None  # type: ignore[method-assign]
    stream = tf.data.Dataset.from_tensor_slices(data(64)).batch(8)
    samples = ef_keras.dataset(data(64), batch_size=8, global_batch_size=16)
    drawing = compiled(keras.Sequential([DrawsItself(), *net().layers]))
    keras.utils.set_random_seed(1)
    return [
        _refusal(*data(), size=0),
        _refusal(*data(), size=1),
        _refusal(*data(), size=None, deterministic=True),
        _refusal(*data(), size=20, deterministic=True),
        _refusal(samples, batch_size=None),
        _refusal(stream, size=20, batch_size=None),
        _refusal(*data(), model=compiled(net(), keras.optimizers.SGD(gradient_accumulation_steps=2))),
        _refusal(*data(), model=compiled(net(), steps_per_execution=2)),
        _refusal(*data(), model=drawing, deterministic=True),
        _refusal(*data(), model=_with_two_optimizers()),
        _refusal(*data(), model=compiled(Averages())),
        _refusal(*data(), model=compiled(keras.Sequential([Counts(), *net().layers]))),
        _refusal(_graphs(), size=64, batch_size=None, model=compiled(OfGraphs())),
    ]


def refuse_threads() -> str:
    keras.Variable(1.0)  # TensorFlow begins
    return _message(lambda: ef_keras.callbacks(global_batch_size=32, deterministic=True))


def train_global_alone() -> dict[str, Any]:
    """A global batch without a job, as plain Keras trains with it."""
    weights, steps = [], []
    for size, callbacks in ((32, []), (8, ef_keras.callbacks(global_batch_size=32))):
        keras.utils.set_random_seed(3)
        model = compiled(net())
        model.fit(*data(210), batch_size=size, shuffle=False, epochs=2, verbose=0, callbacks=callbacks)
        weights.append(model.get_weights())
        steps.append(int(model.optimizer.iterations))
    clean = "apply" not in vars(model.optimizer)
    return {
        "off": max(float(np.abs(a - b).max()) for a, b in zip(*weights, strict=True)),
        "steps": steps,
        "clean": clean,
    }


class Fails(keras.callbacks.Callback):
    def __init__(self, *ranks: int) -> None:
        super().__init__()
        self._ranks = ranks

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2 and this_worker(engine(None)).session.rank in self._ranks:
            raise ArithmeticError("the user's own")


def pass_on_an_error_of_the_users() -> str:
    model, callbacks = compiled(net()), [Fails(0, 1), *ef_keras.callbacks()]
    try:
        return _message(lambda: model.fit(*data(), verbose=0, callbacks=callbacks))
    except ArithmeticError as error:
        return str(error)


# ---------------------------------------------------------------- XLA


class Compiled(keras.Sequential):  # type: ignore[misc]
    """Notes which of its functions are compiled by XLA."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.made: list[Any] = []

    def make_train_function(self, force: bool = False) -> Any:
        if force or self.train_function is None:
            self.made.append(["train", bool(self.jit_compile)])
        return super().make_train_function(force)

    def make_test_function(self, force: bool = False) -> Any:
        if force or self.test_function is None:
            self.made.append(["test", bool(self.jit_compile)])
        return super().make_test_function(force)


def keep_xla() -> dict[str, Any]:
    """What is compiled by XLA in an elastic `fit`, and after it."""
    found: dict[str, Any] = {}
    for name, settings in {"each": {}, "shared": {"global_batch_size": 16}}.items():
        keras.utils.set_random_seed(1)
        model = compiled(Compiled(net().layers), jit_compile=True)
        model.fit(*data(), validation_data=data(32), verbose=0, callbacks=ef_keras.callbacks(**settings))
        in_fit, model.made = list(map(list, model.made)), []
        model.fit(*data(), validation_data=data(32), verbose=0)
        found[name] = {"fit": in_fit, "then": list(map(list, model.made)), "model": model.jit_compile}
    return found


def raise_in_one_worker() -> str:
    """What comes out of the `fit` of the one that raises, and of the others'."""
    try:
        return _message(
            lambda: compiled(net()).fit(
                *data(), batch_size=4, epochs=1000, verbose=0, callbacks=[Fails(1), *ef_keras.callbacks()]
            )
        )
    except ArithmeticError as error:
        return str(error)


# ---------------------------------------------------------------- hooks


def fit_with_a_bar() -> int:
    """A training, and an evaluation, that Keras shows. Returns this worker's rank."""
    model = compiled(net())
    model.fit(*data(), epochs=2, verbose=2, callbacks=ef_keras.callbacks())
    model.evaluate(*data(), verbose=2, callbacks=ef_keras.callbacks())
    return this_worker(engine(None)).session.rank


class Looks(keras.callbacks.Callback):
    """Uses every hook from where ElasticFlow does."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__()
        self._found = found

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._found["list"] = hooks.callback_list(self)

    def on_train_begin(self, logs: Any = None) -> None:
        iterator = self._found["fit"] = hooks.epoch_iterator(self.model)
        roots = {"model": self.model, "optimizer": self.model.optimizer, "callbacks": self._found["list"]}
        package = probe.package({**roots, "iterator": iterator, "arrays": iterator.data_adapter})
        seen = [part for part in package.here() if part.owner in (*roots, "iterator", "arrays")]
        self._found["moved"] = [problem for p in seen if (problem := p.look(package.roots, in_training=True))]
        arrays = hooks.arrays_of(iterator)
        assert arrays is not None
        self._found["sizes"] = (arrays.num_samples, arrays.batch_size, arrays.shuffle)
        batch = arrays.batch(np.arange(5))
        hooks.build(self.model, batch)
        self._found["batch"] = [tuple(part.shape) for part in batch]
        assert hooks.num_batches(iterator) == 5
        assert hooks.steps_per_execution(iterator) == 1
        hooks.start_at(self.model, 1)

        def one_batch() -> Any:
            self._found["epochs"] = self._found.get("epochs", 0) + 1
            yield 0, 0, iter([batch])

        hooks.replace_batches(iterator, one_batch)

    def on_test_begin(self, logs: Any = None) -> None:
        self._found["evaluate"] = hooks.epoch_iterator(self.model)


def become_rank_zero() -> dict[str, bool]:
    """Whether a ModelCheckpoint of the best model writes, in a worker that becomes rank 0 after the first epoch."""
    path = (read_environment().run_dir or Path()) / "best.weights.h5"
    session: Any = SimpleNamespace(rank=1, newcomer=False)
    callback: Any = OnRankZero(
        keras.callbacks.ModelCheckpoint(path, "loss", save_best_only=True, save_weights_only=True), session
    )
    model = compiled(net())
    callback.wrapped.set_model(model)
    wrote = {}
    callback.on_train_begin()
    for name, loss in {"another is rank 0": 0.3, "worse": 0.5, "better": 0.2}.items():
        callback.on_epoch_end(0, {"loss": loss})
        wrote[name] = path.exists()
        callback.memory, session.rank = {"best": 0.3}, 0  # as rank 0 had it, before it was lost
    return wrote


class Notes(keras.callbacks.ProgbarLogger):
    """Notes which of its hooks were called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        for name in ("on_train_begin", "on_epoch_begin", "on_epoch_end", "on_test_begin", "on_test_end"):
            setattr(self, name, lambda *args, name=name, logs=None: self.seen.append([name, *args]))


def take_over() -> dict[str, Any]:
    """What callbacks that write do in a worker that becomes rank 0 in the middle of an epoch."""
    folder = read_environment().run_dir or Path()
    model = compiled(net())
    first, second = (SimpleNamespace(rank=rank, newcomer=False) for rank in (0, 1))

    def on_rank_zero(callback: Any, session: Any) -> Any:
        callback.set_model(model)
        callback.set_params({"verbose": 0, "epochs": 9, "steps": 9})
        return OnRankZero(callback, session)

    def backup(session: Any) -> Any:
        return on_rank_zero(keras.callbacks.BackupAndRestore(folder / "backup", save_freq=1), session)

    lost, next_one = backup(first), backup(second)
    path = folder / "{epoch}-{batch}.weights.h5"
    saving = on_rank_zero(keras.callbacks.ModelCheckpoint(path, save_freq=1, save_weights_only=True), second)
    noting = on_rank_zero(Notes(), second)
    for callback in (lost, next_one, saving, noting):
        callback.on_train_begin()
        callback.on_epoch_begin(2)
        callback.on_train_batch_end(0, {})
        callback.on_epoch_end(2, {})
        callback.on_epoch_begin(3)
        callback.on_test_begin()
    next_one.memory = lost.memory
    model.set_weights([weight + 1.0 for weight in model.get_weights()])  # the training has gone on since it was saved
    before = model.get_weights()
    second.rank = 0
    noting.on_test_end()
    for callback in (next_one, saving):
        callback.on_train_batch_end(5, {})
    metadata = json.loads((folder / "backup" / "training_metadata.json").read_text())
    best = on_rank_zero(keras.callbacks.ModelCheckpoint(path, save_freq=1, save_weights_only=True), first)
    best.on_train_begin()
    best.memory = {"best": 0.25}  # of a checkpoint
    return {
        "weights are kept": all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True)),
        "begins at": model._initial_epoch,
        "backup": metadata,
        "saved": sorted(file.name for file in folder.glob("*.weights.h5")),
        "seen": noting.wrapped.seen,
        "best": best.wrapped.best,
    }


def look_at_hooks() -> dict[str, Any]:
    """Whether each private place of Keras still is where it was. Trains without a job."""
    found: dict[str, Any] = {}
    model = compiled(
        keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])
    )
    model.layers[0].trainable = True
    x, y = data(40)
    model.fit(x, y, batch_size=8, epochs=3, verbose=0, validation_data=(x, y), callbacks=[Looks(found)])
    optimizer = model.optimizer
    with hooks.other_settings(optimizer, lambda rate: rate * 2, {"momentum": 0.5}):
        others = [round(float(optimizer.learning_rate), 3), optimizer.momentum]
    return {
        "settings": [others, round(float(optimizer.learning_rate), 3), optimizer.momentum],
        "applied": hooks.num_applied(hooks.parts_of(optimizer)[0]),
        "momenta": [tuple(momentum.shape) for momentum in hooks.momenta_with_rate(optimizer)],
        "list": isinstance(found["list"], keras.callbacks.CallbackList),
        "iterators": found["fit"] is not found["evaluate"],
        "sizes": found["sizes"],
        "batch": found["batch"],
        "epochs": found["epochs"],
        "updates": int(model.optimizer.iterations),
        "statistics": [tuple(variable.shape) for variable in hooks.statistics(model)],
        "frozen": [[tuple(variable.shape) for variable in hooks.statistics(one)] for one in frozen()],
        "quantized": [hooks.statistics(one) for one in [quantized()] if one.layers[0]._non_trainable_variables],
        "state": sorted(tuple(variable.shape) for variable in hooks.state_variables(model)),
        "optimizers": len(hooks.optimizers(model)),
        "seeds": [tuple(state.shape) for state in hooks.seed_states(model)],
        "seed": [hooks.random_seed(), keras.utils.set_random_seed(5), hooks.random_seed()],
        "step": hooks.new_train_function(model) is not model.train_function,
        "moved": [*found["moved"], *probe.package().problems()],
        "parts": sorted({part.name for part in (*probe.KERAS, *probe.OF_JAX)}),
        "users": sorted(sources.unknown_users(probe.KERAS, Path(hooks.__file__).parent)),
        "releases": list(probe.RELEASES["keras"]),
        "unseen": [root for root, value in probe.package().roots.items() if value is None],
        "remembered": _remembered(),
        "remembered_by_orbax": _remembered_by_orbax(),
    }


def _count(params: Any, state: Any, rng: Any, inputs: Any, training: bool) -> Any:
    return inputs, {"seen": state["seen"] + len(inputs) if training else state["seen"]}


def frozen() -> list[Any]:
    """Models whose first layer is frozen. A step still changes what it holds in the first two, and in JAX's own."""
    normalized = keras.layers.SpectralNormalization(keras.layers.Dense(2))
    kinds = [normalized, keras.layers.BatchNormalization(), keras.layers.Normalization()]
    if keras.backend.backend() == "jax":
        kinds.append(keras.layers.JaxLayer(_count, params={}, state={"seen": np.zeros(3, np.float32)}))
    models = [untrained(), *(compiled(keras.Sequential([keras.layers.Input((4,)), kind])) for kind in kinds)]
    for model in models:
        model.layers[0].trainable = False
    return models


def quantized() -> Any:
    """A model with a layer that is trained, and holds scales."""
    model = compiled(keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)]))
    model.quantize("int8")
    return model


def move_parts() -> list[str]:
    """Move each private part of Keras, and change it; where one sentence does not tell of that at the start."""
    package, wrong = probe.package(), []
    for part in package.here():
        for change in changes(part, package.roots):
            with pytest.MonkeyPatch.context() as patch:
                change(patch)
                try:
                    probe.check_hooks()
                except UnsupportedError as error:
                    assert_one_sentence(str(error), package, part)
                else:
                    wrong.append(f"{part.path}: {change}")
    probe.check_hooks()  # all is as it was
    return wrong


def refuse_keras() -> list[Any]:
    """A `fit`, and an `evaluate`, with a Keras that has moved a part; whether weights have changed."""
    model = compiled(net())
    x, y = data(40)
    before = [np.array(weight) for weight in model.get_weights()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras, "__version__", "3.99")
        patch.delattr(PyDatasetAdapter, "_standardize_batch")
        messages = [
            _message(lambda: model.fit(x, y, verbose=0, callbacks=ef_keras.callbacks())),
            _message(lambda: model.evaluate(x, y, verbose=0, callbacks=ef_keras.callbacks())),
        ]
    same = all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))
    return [*messages, same]


def _remembered() -> list[Any]:
    """What a callback takes in of a memory that says more than callbacks remember."""
    callback = keras.callbacks.ModelCheckpoint("x.keras")
    restore(callback, {"best": 0.5, "filepath": "/elsewhere.keras", "new": 1})
    return [callback.filepath, "new" in vars(callback), callback.best, sorted(memory_of(callback) or {})]


def _remembered_by_orbax() -> Any:
    """What the callback that needs Orbax remembers of what another worker's has seen. Its constructor needs Orbax."""
    first, second = (OrbaxCheckpoint.__new__(OrbaxCheckpoint) for _ in range(2))
    vars(first).update(
        best=0.5, _batches_seen_since_last_saving=3, _last_batch_seen=7, _total_batches_seen=27, directory="/elsewhere"
    )
    restore(second, memory_of(first) or {})
    return vars(second)


# ---------------------------------------------------------------- exceptions that leave a fit


class Bug(keras.callbacks.Callback):
    """Raises in one of its hooks."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self._hook = hook
        setattr(self, hook, self._raise)

    def _raise(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(f"in {self._hook}")


class BadSamples(keras.utils.PyDataset):
    """Cannot read one of its batches."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise ValueError("in data")
        return data(8)


class BadMetric(keras.metrics.Mean):
    """Cannot be reset in the second epoch."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(y_true)

    def reset_state(self) -> None:
        if self.model.optimizer.iterations >= 5:
            raise ValueError("in metric")
        super().reset_state()


class BadStep(keras.Model):
    """Cannot train, or evaluate, in the second epoch."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._net, self._where = net(), where

    def call(self, x: Any, training: bool = False) -> Any:
        if self._where and training == (self._where == "train_step") and self.optimizer.iterations >= 5:
            raise ValueError(f"in {self._where}")
        return self._net(x, training=training)


class Evaluates(keras.callbacks.Callback):
    """Evaluates on data that are none, and knows what to do then."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        try:
            self.model.evaluate(BadSamples(), verbose=0)
        except Exception:  # TensorFlow makes another one of it
            self.model.reset_metrics()


class Leaves(keras.callbacks.Callback):
    def __init__(self, status: Any) -> None:
        super().__init__()
        self._status = status

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        raise SystemExit(self._status)


def guard_fit() -> dict[str, Any]:
    """What is told of exceptions that leave a `fit`, which is within a `try`; of each, in a world of one."""
    told: list[BaseException] = []
    Failing.tell_if_heard = lambda self, error: told.append(error)  # type: ignore[method-assign]
    found: dict[str, Any] = {}

    def attempt(name: str, *callbacks: Any, of: Any = None, where: str = "", hand_made: bool = False) -> None:
        model: Any = BadStep(where)
        metric = BadMetric()
        metric.model = model
        metrics = [metric] if name == "metric" else []
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=metrics, run_eagerly=True)
        everybody: Any = [*callbacks, *ef_keras.callbacks()]
        if hand_made:
            everybody = keras.callbacks.CallbackList(everybody, model=model, epochs=2, steps=5)
        raised: BaseException | None = None
        num_told = len(told)
        kwargs: dict[str, Any] = (
            {"x": of} if of is not None else {**dict(zip("xy", data(40), strict=True)), "batch_size": 8}
        )
        try:
            model.fit(
                **kwargs,
                shuffle=False,  # `fit` itself reads the first batch, before it has callbacks
                epochs=2,
                verbose=0,
                validation_data=None if name == "metric" else data(8),
                callbacks=everybody,
            )
        except BaseException as error:
            raised = error
        left = [one for one in hooks.CALLED_BY_FIT if hasattr(vars(model).get(one), "__wrapped__")]
        new = told[num_told:]
        found[name] = [str(raised), [one is raised for one in new], left]

    for hook in (
        "set_params",
        "on_train_begin",
        "on_epoch_begin",
        "on_train_batch_end",
        "on_test_begin",
        "on_train_end",
    ):
        attempt(hook, Bug(hook))
    attempt("hand-made", Bug("on_epoch_begin"), hand_made=True)
    attempt("data", of=BadSamples())
    attempt("metric")
    attempt("train_step", where="train_step")
    attempt("test_step", where="test_step")
    attempt("caught", Evaluates())
    attempt("leaves", Leaves(0))
    attempt("exits", Leaves("in exits"))
    attempt("well")
    return found


class ReadInThreads(keras.utils.PyDataset):
    def __init__(self) -> None:
        super().__init__(workers=2)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return data(8)


class FailsInEvaluation(keras.callbacks.Callback):
    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        raise ArithmeticError("the user's own")


def raise_while_data_are_read_ahead() -> dict[str, Any]:
    """Whether threads read while a `fit` trains or evaluates, and how many are left while its exception is known."""
    Failing.tell = lambda self, error: None  # type: ignore[method-assign]
    found = {}
    for fails in (Fails(0), FailsInEvaluation()):
        seen: list[int] = []

        def count(seen: list[int] = seen) -> None:
            seen.append(sum("reads-ahead" in thread.name for thread in threading.enumerate()))

        counts = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: count())
        callbacks = [counts, fails, *ef_keras.callbacks()]
        try:
            compiled(net()).fit(ReadInThreads(), validation_data=ReadInThreads(), verbose=0, callbacks=callbacks)
        except ArithmeticError as error:
            count()
            found[type(fails).__name__] = [max(seen) > 0, seen[-1], str(error)]  # a second one comes only if needed
    return found


# ---------------------------------------------------------------- a world of one


def train_alone() -> dict[str, Any]:
    """Nothing of Keras is touched where there is no job."""
    seen: dict[str, Any] = {}

    class Sees(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen["function"] = getattr(self.model.train_function, "__module__", "")
            seen["apply"] = "apply" in vars(self.model.optimizer)

    weights = []
    for callbacks in ([], ef_keras.callbacks()):
        keras.utils.set_random_seed(3)
        model = compiled(net())
        model.fit(*data(), verbose=0, callbacks=[Sees(), *callbacks])
        weights.append([part.tolist() for part in model.get_weights()])
    return {"same": weights[0] == weights[1], **seen}


def train_alone_with_a_log() -> dict[str, Any]:
    """A world of one that logs what it does."""
    model = compiled(net())
    saving = keras.callbacks.ModelCheckpoint((read_environment().run_dir or Path()) / "best.keras")
    model.fit(*data(), epochs=2, verbose=0, validation_data=data(40), callbacks=[saving, *ef_keras.callbacks()])
    return {
        "clean": "apply" not in vars(model.optimizer),
        "saved": (read_environment().run_dir or Path()).joinpath("best.keras").exists(),
        "wrapped": OnRankZero.__name__,
    }
