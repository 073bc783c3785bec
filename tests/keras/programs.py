"""Programs of one `forward`, and the same models by hand; imported after Keras's backend is chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
from keras import layers, ops

import ef_keras
import elasticflow
from ef_common.data.meter import COLUMNS
from ef_common.errors import UsageError
from ef_common.launch import process
from tests.keras.checkpoints import Steps
from tests.keras.features import compiled, data, stream

RATE = 0.1


def model() -> dict[str, Any]:
    hidden = layers.Dense(16, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))
    return {
        "nets": [keras.Sequential([hidden, layers.Dropout(0.2)]), {"head": layers.Dense(2)}],
        "scale": keras.Variable(np.ones(1, "float32")),
        "optimizer": keras.optimizers.SGD(RATE, momentum=0.9),
    }


def predict(x: Any, params: Any) -> Any:
    return params["nets"][1]["head"](params["nets"][0](x)) * params["scale"]


def forward(x: Any, y: Any, params: Any) -> Any:
    outputs = predict(x, params)
    hits = ops.equal(ops.argmax(outputs, -1), ops.cast(y, "int64"))
    loss = ops.mean(keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True))
    return {"loss": loss, "accuracy": ops.mean(ops.cast(hits, "float32"))}


def other_evaluation(x: Any, y: Any, params: Any, training: bool) -> Any:
    if training:
        raise ValueError("this is an evaluation")
    return {"error": ops.mean(ops.abs(predict(x, params)[:, 0] - ops.cast(y, "float32")))}


class ByHand(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        parts = model()
        (self.body, head), self.scale = parts["nets"], parts["scale"]
        self.head = head["head"]

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.body(x)) * self.scale


def program(**kwargs: Any) -> Any:
    return ef_keras.model(model, forward, predict=predict, **kwargs)


def _values(variables: Any) -> list[np.ndarray]:
    return [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in variables]


def _difference(ours: Any, theirs: Any) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(_values(ours), _values(theirs), strict=True))


# ---------------------------------------------------------------- as by hand


def as_by_hand(folder: str) -> Any:
    """Largest differences of weights, of the optimizer's variables, and of the histories."""
    found = {}
    for name, optimizer, fit in [
        ("arrays", keras.optimizers.SGD(RATE, momentum=0.9), {}),
        ("accumulated", keras.optimizers.SGD(RATE, gradient_accumulation_steps=2), {}),
        ("scaled", keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=64.0), {}),
        ("stream", keras.optimizers.Adam(0.01), {"x": stream(16)}),
    ]:
        results = []
        for by_hand in (False, True):
            keras.utils.set_random_seed(7)
            made = compiled(ByHand()) if by_hand else program()
            copy = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
            made.compile(copy, **({"loss": made.loss, "metrics": ["accuracy"]} if by_hand else {}))
            kwargs = {"verbose": 0, "epochs": 2, "validation_data": data(37), **fit}
            if "x" not in kwargs:
                kwargs |= {"x": data()[0], "y": data()[1], "batch_size": 16}
            results.append((made, made.fit(**kwargs).history))
        (ours, history), (theirs, expected) = results
        found[name] = {
            "weights": _difference(ours.trainable_variables, theirs.trainable_variables),
            "optimizer": _difference(ours.optimizer.variables, theirs.optimizer.variables),
            "names": [sorted(history), sorted(expected)],
            "history": max(float(np.abs(np.subtract(history[key], expected[key])).max()) for key in expected),
            "moved": float(abs(_values([ours._held.params["scale"]])[0][0] - 1)),
        }
    return found


def mixed(folder: str) -> Any:
    """Under mixed_float16: differences from the model by hand, and the types that `forward` sees."""
    types = {}

    def parts() -> dict[str, Any]:
        net = keras.Sequential([layers.Dense(16, activation="tanh"), layers.Dense(2)])
        return {"net": net, "optimizer": keras.optimizers.Adam(0.01)}

    def cost(x: Any, y: Any, params: Any) -> Any:
        outputs = params["net"](x)
        types.update(x=keras.backend.standardize_dtype(x.dtype), outputs=keras.backend.standardize_dtype(outputs.dtype))
        outputs = ops.cast(outputs, "float32")  # as the losses of Keras do
        return ops.mean(keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True))

    results = []
    keras.config.set_dtype_policy("mixed_float16")
    try:
        for by_hand in (False, True):
            keras.utils.set_random_seed(7)
            made = compiled(parts()["net"], keras.optimizers.Adam(0.01)) if by_hand else ef_keras.model(parts, cost)
            made.fit(*data(), epochs=2, batch_size=16, verbose=0)
            results.append(made)
    finally:
        keras.config.set_dtype_policy("float32")
    ours, theirs = results
    types["variables"] = ours.trainable_variables[0].dtype
    types["optimizer"] = type(ours.optimizer).__name__
    return {
        "weights": _difference(ours.trainable_variables, theirs.trainable_variables),
        "optimizer": _difference(ours.optimizer.variables, theirs.optimizer.variables),
        "types": types,
    }


def dict_batches(folder: str) -> Any:
    """Entries of a dict are bound by their names, whatever their order; so are those of a stream."""
    x, y = data()
    values = []
    for batches in ((x, y), ({"y": y, "x": x},)):
        keras.utils.set_random_seed(7)
        made = program()
        made.fit(*batches, batch_size=16, epochs=1, verbose=0)
        values.append(made.trainable_variables)
    return _difference(*values)


def evaluation(folder: str) -> Any:
    """Results of an own evaluation, and what they are in closed form; and of a fit with it."""
    x, y = data(77)
    made = program(evaluate=other_evaluation)
    results = made.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
    expected = float(np.abs(made.predict(x, verbose=0)[:, 0] - y).mean())
    history = made.fit(x, y, validation_data=(x, y), epochs=2, verbose=0).history
    return [results, expected, sorted(history)]


def callbacks(folder: str) -> Any:
    """Keras's callbacks and schedules."""
    rate = keras.optimizers.schedules.ExponentialDecay(RATE, 5, 0.5)
    made = ef_keras.model({**model(), "optimizer": keras.optimizers.SGD(rate)}, forward)
    stopping = keras.callbacks.EarlyStopping("val_loss", min_delta=100.0, patience=1)
    saving = keras.callbacks.ModelCheckpoint(Path(folder) / "best.weights.h5", save_weights_only=True)
    csv = keras.callbacks.CSVLogger(Path(folder) / "log.csv")
    history = made.fit(*data(), validation_data=data(20), epochs=9, verbose=0, callbacks=[stopping, saving, csv])
    lines: list[str] = []
    made.summary(print_fn=lambda line, **_: lines.append(line))
    again = program()
    again.evaluate(*data(), verbose=0)
    again.load_weights(Path(folder) / "best.weights.h5", skip_mismatch=False)
    return {
        "epochs": len(history.epoch),
        "rate": float(made.optimizer.learning_rate),
        "files": sorted(path.name for path in Path(folder).iterdir()),
        "summary": "Total params" in "".join(lines),
        "loaded": _difference(made.trainable_variables, again.trainable_variables),
    }


def evaluated_together() -> Any:
    """In each worker of a job: the history of a fit with an own evaluation, and its result in closed form."""
    x, y = data(77)
    keras.utils.set_random_seed(7)
    made = program(evaluate=other_evaluation)
    settings = {"epochs": 2, "batch_size": 8, "verbose": 0, "callbacks": ef_keras.callbacks()}
    history = made.fit(x, y, validation_data=(x, y), **settings).history
    expected = float(np.abs(made.predict(x, verbose=0)[:, 0] - y).mean())
    kept = {name: values for name, values in history.items() if name not in COLUMNS}
    return [kept, expected]


# ---------------------------------------------------------------- files


def saved(folder: str) -> Any:
    """A saved model, loaded: how far it is off in weights, optimizer and results; and a training of both."""
    made = program()
    made.fit(*data(), epochs=1, verbose=0)
    made.save(f"{folder}/model.keras")
    functions = {"model": model, "forward": forward, "predict": predict}
    loaded = keras.models.load_model(f"{folder}/model.keras", custom_objects=functions)
    same = [
        _difference(made.trainable_variables, loaded.trainable_variables),
        _difference(made.optimizer.variables, loaded.optimizer.variables),
    ]
    before = _values(made.trainable_variables)
    predictions = [m.predict(data()[0], verbose=0) for m in (made, loaded)]
    for one in (made, loaded):
        keras.utils.set_random_seed(1)
        one.fit(*data(), epochs=1, verbose=0, shuffle=False)
    moved = max(float(np.abs(a - b).max()) for a, b in zip(before, _values(loaded.trainable_variables), strict=True))
    unknown = _message(lambda: keras.models.load_model(f"{folder}/model.keras"))
    own = ef_keras.model(known_model, known_forward)
    own.fit(*data(), epochs=1, verbose=0)
    own.save(f"{folder}/known.keras")
    again = keras.models.load_model(f"{folder}/known.keras")
    same.append(_difference(own.trainable_variables, again.trainable_variables))
    del keras.saving.get_custom_objects()["tests>known_forward"]  # as in a program that has not imported its module
    not_imported = _message(lambda: keras.models.load_model(f"{folder}/known.keras"))
    local = _message(lambda: ef_keras.model(model, lambda x, y, params: 0).save(f"{folder}/other.keras"))
    difference = float(np.abs(np.subtract(*predictions)).max())
    messages = {"unknown": unknown, "local": local, "not imported": not_imported}
    return {"same": same, "predictions": difference, "moved": moved, **messages}


@keras.saving.register_keras_serializable("tests")
def known_model() -> dict[str, Any]:
    return model()


@keras.saving.register_keras_serializable("tests")
def known_forward(x: Any, y: Any, params: Any) -> Any:
    return forward(x, y, params)


# ---------------------------------------------------------------- elasticflow.train


def trained(folder: str) -> Any:
    """What comes of `elasticflow.train` with arrays, a dict and a stream; and of a second start."""
    x, y = data()
    plain = {"epochs": 2, "batch_size": 16, "shuffle": False, "verbose": 0}
    found: dict[str, Any] = {}
    keras.utils.set_random_seed(7)
    by_hand = program()
    by_hand.fit(x, y, validation_data=(x, y), callbacks=ef_keras.callbacks(), **plain)
    for name, given in {"tuple": (x, y), "dict": {"y": y, "x": x}}.items():
        keras.utils.set_random_seed(7)
        result = elasticflow.train(model, forward, given, validation=given, predict=predict, **plain)
        found[name] = _difference(by_hand.trainable_variables, result.model.trainable_variables)
        found["metrics"] = sorted(result.metrics)
        found["predictions"] = list(result.model.predict(x, verbose=0).shape)
    keras.utils.set_random_seed(7)
    streamed = elasticflow.train(model(), forward, stream(16), validation=stream(16), epochs=1, verbose=0)
    found["stream"] = int(streamed.model.optimizer.iterations)
    three = (x, y, np.ones(len(x), "float32"))
    weighted = elasticflow.train(model, weighted_forward, three, validation=three, epochs=1, verbose=0)
    found["three"] = sorted(weighted.metrics)
    settings = {**plain, "checkpoint": f"{folder}/checkpoints"}
    for epochs in (2, 4):
        process._this = None  # as if this were another process
        steps = Steps()
        result = elasticflow.train(model, forward, (x, y), **settings | {"epochs": epochs, "callbacks": [steps]})
        found[f"epochs {epochs}"] = [int(result.model.optimizer.iterations), steps.made]
    process._this = None
    settings["epochs"] = 5
    found["fewer later"] = _message(lambda: elasticflow.train(model, MISTAKES["unused"], (x, y), **settings))
    found["list"] = int(elasticflow.train(model, forward, [x, y], **plain).model.optimizer.iterations)
    found["global batch"] = int(
        elasticflow.train(model, forward, (x, y), global_batch_size=32, **plain).model.optimizer.iterations
    )
    found["x"] = _message(lambda: elasticflow.train(model, forward, (x, y), validation_data=(x, y)))
    found["optimizer"] = _message(lambda: elasticflow.train({"w": model()["scale"]}, forward, (x, y)))
    return found


def weighted_forward(x: Any, y: Any, weight: Any, params: Any) -> Any:
    return ops.mean(keras.losses.sparse_categorical_crossentropy(y, predict(x, params), from_logits=True) * weight)


# ---------------------------------------------------------------- mistakes


def _message(act: Callable[[], Any]) -> str:
    try:
        act()
    except UsageError as error:
        return str(error)
    return "nothing was raised"


def _errors(x: Any, y: Any, params: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(y, predict(x, params), from_logits=True)


MISTAKES: dict[str, Callable[..., Any]] = {
    "no scalar": _errors,
    "no loss": lambda x, y, params: {"accuracy": ops.mean(_errors(x, y, params))},
    "no tensor": lambda x, y, params: 1.0,
    "no gradient": lambda x, y, params: ops.mean(ops.stop_gradient(_errors(x, y, params))),
    "unused": lambda x, y, params: ops.mean(params["nets"][1]["head"](params["nets"][0](x))),
    "one entry too many": lambda x, params: ops.mean(predict(x, params)),
    "one entry missing": lambda x, y, z, params: ops.mean(predict(x, params)),
}


def mistakes(folder: str) -> Any:
    """Messages, and how far the weights have moved before each."""
    found = {}
    for name, mistaken in MISTAKES.items():
        made = ef_keras.model(model, mistaken)
        made.parts[0].layers[0].kernel_regularizer = None  # it has a gradient of its own
        message = _message(lambda made=made: made.fit(*data(), batch_size=16, epochs=1, verbose=0))
        scale = float(_values([made._held.params["scale"]])[0][0])
        found[name] = [message, scale]
    made = ef_keras.model(model, MISTAKES["unused"], allow_unused=True)
    found["allowed"] = [_message(lambda: made.fit(*data(), epochs=1, verbose=0)), 1.0]
    made = program()
    made.parts[0].trainable = made.parts[1].trainable = False
    made._held.params["scale"].trainable = False
    found["frozen"] = [_message(lambda: made.fit(*data(), epochs=1, verbose=0)), 1.0]
    for name, parts in {
        "scheduler": {**model(), "scheduler": 1},
        "torch": {"w": model()["scale"], "optimizer": _stranger("torch.optim")},
        "of torch": {"net": _stranger("torch.nn")},
    }.items():
        found[name] = [_message(lambda parts=parts: ef_keras.model(parts, forward)), 1.0]
    with patch.object(keras.config, "backend", lambda: "jax"):
        found["jax"] = [_message(lambda: ef_keras.model(model, forward)), 1.0]
        found["trained on jax"] = [_message(lambda: elasticflow.train(model, forward, data())), 1.0]
    without = ef_keras.model(model, forward)
    found["no predict"] = [_message(lambda: without.predict(data()[0], verbose=0)), 1.0]
    return found


def _stranger(module: str) -> Any:
    return type("Thing", (), {"__module__": module})()
