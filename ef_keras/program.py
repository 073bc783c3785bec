"""`ef_keras.model()` makes a Keras model of a `model` and a `forward`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import keras

from ef_common.errors import UsageError
from ef_common.program.binding import Binding, binding_of, no_predict
from ef_common.program.outcome import LOSS, check_tensor, outcome_of
from ef_common.program.parts import Model, Parts, check_framework, parts_of
from ef_keras.backends import train_step_of

Function = Callable[..., Any]


def model(
    model: Model,
    forward: Function,
    *,
    evaluate: Function | None = None,
    predict: Function | None = None,
    allow_unused: bool = False,
) -> Program:
    """Make a Keras model of a program, compiled if it has an optimizer.

    Example::

        def model():
            return {"net": keras.layers.Dense(2), "optimizer": keras.optimizers.SGD(0.1)}

        def forward(x, y, params):
            return keras.ops.mean((params["net"](x) - y) ** 2)

        ef_keras.model(model, forward).fit(x, y, epochs=10, callbacks=ef_keras.callbacks())

    Args:
        model: Returns a dict of layers and variables, which may be nested in dicts and lists; or that dict itself.
            "optimizer" is a Keras optimizer, its class or its name; a schedule is its learning rate. The function runs
            under the caller's seed.
        forward: Called with the entries of a batch and the model. Returns the cost, of shape (), or a dict with the
            cost as "loss" and with metrics, each a mean over the samples. See :mod:`ef_common.program.binding`. Losses
            of the layers themselves (regularizers) are added, as Keras does.
        evaluate: The same for `evaluate` and the validation of `fit`, where a dict needs no "loss". The default is
            `forward`. Results are means over the samples.
        predict: Called like `forward`, with the entries that it names; implements `model.predict` and `model(x)`.
        allow_unused: Allow parameters that the cost of the first step does not depend on.

    Returns:
        A Keras model. To be saved with `model.save`, its functions must be defined at the top level of a module. To be
        loaded, they must be registered with `@keras.saving.register_keras_serializable()`, or be in `custom_objects`.

    Raises:
        UnsupportedError: Keras runs on a backend other than TensorFlow and torch.
        UsageError: The model has no parameters, or is of torch or of both frameworks; a function cannot be called with
            a batch; or, in the first step: entries do not fit the parameters, or the cost is not a scalar, has no
            gradient, or does not depend on all parameters.
    """
    return program(parts_of(model), Functions(model, forward, evaluate, predict), allow_unused=allow_unused)


@dataclass(frozen=True)
class Functions:
    """The functions of a program.

    Args:
        model: Makes the model; or a model that was made, which cannot be saved then.
        forward: The cost of a batch.
        evaluate: The same in an evaluation, if it is another function.
        predict: Predictions, if there are any.
    """

    model: Model
    forward: Function
    evaluate: Function | None = None
    predict: Function | None = None


@dataclass
class _Held:
    """A holder for objects that Keras must not track or save."""

    functions: Functions
    params: dict[str, Any]
    places: dict[int, str]
    bindings: dict[str, Binding]
    metrics: dict[str, keras.metrics.Mean] = field(default_factory=dict)
    shapes: Any = None  # of the first batch


def program(parts: Parts, functions: Functions, *, allow_unused: bool) -> Program:
    """The model of parts that already exist; see :func:`model`."""
    made = Program(parts, functions, allow_unused=allow_unused)
    optimizer = parts.optimizer
    if isinstance(optimizer, type | partial | FunctionType):
        optimizer = optimizer()
    if optimizer is not None:
        made.compile(optimizer)
    return made


@keras.saving.register_keras_serializable(package="elasticflow")
class Program(keras.Model):
    """A model whose steps are functions of a batch; see :func:`model`.

    Args:
        parts: Layers, variables and anything else.
        functions: Functions of the program.
        allow_unused: See :func:`model`.
        name: Name of the model.

    Raises:
        UsageError: There is nothing to train.
    """

    def __init__(self, parts: Parts, functions: Functions, *, allow_unused: bool = False, name: str | None = None):
        super().__init__(name=name, autocast=False)  # layers cast what they are called with; targets stay as they are
        self._train = train_step_of()
        check_framework(parts, "keras")
        if parts.scheduler is not None:
            raise UsageError(
                'Keras has no "scheduler" beside the optimizer: pass a keras.optimizers.schedules.… as its '
                "learning_rate, or a keras.callbacks.LearningRateScheduler to fit()"
            )
        bindings = {"forward": binding_of(functions.forward)}
        bindings["evaluate"] = bindings["forward"]
        for role in ("evaluate", "predict"):
            if getattr(functions, role) is not None:
                bindings[role] = binding_of(getattr(functions, role), role=role)
        leaves = list(parts.leaves())
        places = {id(part): place for place, part in leaves}
        self._held = _Held(functions, parts.params, places, bindings)
        self.parts = [part for _, part in leaves if isinstance(part, keras.layers.Layer)]
        self.parameters_of_model = [part for _, part in leaves if isinstance(part, keras.Variable)]
        self._allow_unused = allow_unused
        self._checked = False
        self._role = "predict"

    # ------------------------------------------------------------ steps

    def call(self, batch: Any, training: bool = False) -> Any:
        """Predictions for a batch; within a step, its cost and metrics."""
        held = self._held
        if self._role == "predict":
            if "predict" not in held.bindings:
                raise no_predict("model")
            return held.bindings["predict"].call(_unwrapped(batch), held.params, training=training, partly=True)
        binding = held.bindings[self._role]
        needs_loss = binding is held.bindings["forward"]
        returned = binding.call(batch, held.params, training=training)
        outcome = outcome_of(returned, name=binding.name, needs_loss=needs_loss)
        if needs_loss:
            check_tensor(outcome[LOSS], keras.ops.is_tensor, name=binding.name, framework="Keras's backend")
        return outcome

    def train_step(self, data: Any) -> dict[str, Any]:
        """Make an update."""
        batch = _unwrapped(data)
        cost = partial(self._cost, batch, "forward", training=True)
        return self._measure(batch, self._train(self, cost, check=self._check))

    def test_step(self, data: Any) -> dict[str, Any]:
        """Evaluate a batch."""
        batch = _unwrapped(data)
        return self._measure(batch, self._cost(batch, "evaluate", training=False))

    def _cost(self, batch: Any, role: str, *, training: bool) -> dict[str, Any]:
        if self._held.shapes is None:
            self._held.shapes = keras.tree.map_structure(_spec, batch)
        with self._as(role):
            outcome: dict[str, Any] = self(batch, training=training)
        if self.losses and LOSS in outcome:
            outcome[LOSS] = keras.ops.sum([outcome[LOSS], *map(keras.ops.sum, self.losses)])
        return outcome

    @contextmanager
    def _as(self, role: str) -> Iterator[None]:
        before, self._role = self._role, role
        try:
            yield
        finally:
            self._role = before

    # ------------------------------------------------------------ metrics

    @property
    def metrics(self) -> list[Any]:
        """The means of the values that `forward` and `evaluate` have returned."""
        return list(self._held.metrics.values())

    def get_metrics_result(self) -> dict[str, Any]:
        """Metrics that have seen a batch since their reset: an evaluation may have others than the training."""
        return {m.name: m.result() for m in self.metrics if float(keras.ops.convert_to_numpy(m.count)) > 0}

    def _measure(self, batch: Any, outcome: Mapping[str, Any]) -> dict[str, Any]:
        metrics = self._metrics_of(outcome)
        num_samples = _num_samples(batch)
        for name, value in outcome.items():
            metrics[name].update_state(value, sample_weight=num_samples)
        return {name: metrics[name].result() for name in outcome}

    def _metrics_of(self, outcome: Mapping[str, Any]) -> dict[str, Any]:
        found = self._held.metrics
        for name in outcome:
            if name not in found:
                found[name] = keras.metrics.Mean(name)
        return found

    # ------------------------------------------------------------ building and checks

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Create all variables of layers and metrics with a step on the first batch that leaves nothing behind."""
        if any(not layer.built for layer in self._flatten_layers()):
            self.built = True
            batch = _first(iterator) if data_batch is None else data_batch
            self._build_on(_unwrapped(batch))
        super()._symbolic_build(data_batch=data_batch)

    def _build_on(self, batch: Any) -> None:
        roles = ["forward"]
        if self._held.bindings["evaluate"] is not self._held.bindings["forward"]:
            roles.append("evaluate")
        for role in roles:
            self._metrics_of(self._cost(batch, role, training=False))

    def _check(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        missing = [
            self._held.places.get(id(variable), variable.path)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is None
        ]
        if not variables:
            raise UsageError(
                "the model has no parameters to train. Return layers with weights, or a keras.Variable. "
                f"Received: {sorted(self._held.params)}"
            )
        if len(missing) == len(variables):
            raise UsageError(
                "the loss that forward() returns has no gradient: it does not depend on a parameter, or was made by "
                "operations that have none. Compute it from the layers and variables in `params`"
            )
        if missing and not self._checked and not self._allow_unused:
            raise UsageError(
                "the loss of the first step does not depend on these parameters, so they would never change. Use them "
                "in forward(), freeze them with trainable=False, or pass allow_unused=True if other batches use them. "
                f"Received: {', '.join(missing)}"
            )
        self._checked = True

    def go_on(self) -> None:
        """The training has begun before, so its first step has been checked; later ones may use fewer parameters."""
        self._checked = True

    # ------------------------------------------------------------ files

    def get_config(self) -> dict[str, Any]:
        """The functions, by their names.

        Raises:
            UsageError: One of them cannot be found by its name.
        """
        functions = self._held.functions
        saved = {role: _saved(getattr(functions, role), role) for role in ("model", "forward", "evaluate", "predict")}
        return {**saved, "allow_unused": self._allow_unused, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Program:
        """Recreate the model.

        Raises:
            UsageError: A function cannot be found.
        """
        found = {role: _loaded(config.pop(role), role) for role in ("model", "forward", "evaluate", "predict")}
        return cls(parts_of(found["model"]), Functions(**found), **config)

    def get_build_config(self) -> dict[str, Any]:
        """Shapes and types of the batch on which it was built."""
        return {"batch": self._held.shapes}

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Create all variables."""
        if config.get("batch") is not None:
            self.built = True
            self._build_on(_zeros(config["batch"]))


def _unwrapped(batch: Any) -> Any:
    """The entries of a batch: Keras puts anything but a pair into a tuple, and adds missing entries."""
    while isinstance(batch, tuple | list):
        if len(batch) > 1 and batch[-1] is None:
            batch = batch[:-1]
        elif len(batch) == 1 and isinstance(batch[0], Mapping | tuple | list):
            batch = batch[0]
        else:
            break
    return batch


def _first(iterator: Any) -> Any:
    for _, _, found in iterator:
        return found[0] if isinstance(found, list | tuple) else next(found)
    raise UsageError("the data have no batch")


def _num_samples(batch: Any) -> Any:
    first = next((part for part in keras.tree.flatten(batch) if part is not None and len(part.shape)), None)
    return 1 if first is None else keras.ops.shape(first)[0]


def _spec(part: Any) -> Any:
    if part is None:
        return None
    shape = [1 if size is None else int(size) for size in part.shape]  # a graph may leave open how many samples
    return {"shape": shape, "dtype": keras.backend.standardize_dtype(part.dtype)}


def _zeros(spec: Any) -> Any:
    if isinstance(spec, Mapping) and set(spec) == {"shape", "dtype"}:
        return keras.ops.zeros(spec["shape"], spec["dtype"])
    if isinstance(spec, Mapping):
        return {name: _zeros(part) for name, part in spec.items()}
    return None if spec is None else tuple(_zeros(part) for part in spec)


def _saved(function: Any, role: str) -> Any:
    if function is None:
        return None
    if not isinstance(function, FunctionType) or "<" in function.__qualname__:
        received = getattr(function, "__qualname__", type(function).__name__)
        raise UsageError(
            f"a saved model names its functions, and nobody could find {role} by its name. Define it at the top of a "
            f"module, or save the weights only: model.save_weights(…), ModelCheckpoint(…, save_weights_only=True). "
            f"Received: {role}={received}"
        )
    return keras.saving.serialize_keras_object(function)


def _loaded(saved: Any, role: str) -> Any:
    if saved is None:
        return None
    try:
        return keras.saving.deserialize_keras_object(saved)
    except (TypeError, ValueError) as error:
        name = saved["config"]
        function = name.rpartition(">")[2]  # behind the package that it was registered for
        raise UsageError(
            f"the function {role} of the saved model is not known here: Keras imports no code that a file names. Pass "
            f'it, load_model(path, custom_objects={{"{name}": {function}, …}}); or decorate it with '
            "@keras.saving.register_keras_serializable() and import its module before you load the model. "
            f"Received: {role}={function}"
        ) from error
