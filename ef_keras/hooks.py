"""Nearly all private parts of Keras 3 that ElasticFlow touches, and why.

They are listed in `probe`, which tells at the start of a `fit` if a release of Keras has moved one, and so does
`tests/keras/test_hooks.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import keras
import numpy as np

from ef_common.errors import UnsupportedError

Batches = Iterator[tuple[int, int, Iterator[Any]]]
"""What an epoch of Keras consists of: (first step, last step, iterator over their batches)."""


def callback_list(callback: Any) -> Any:
    """The list of callbacks that is calling a hook of this callback."""
    found = _find(lambda frame: _is_list_with(frame.f_locals.get("self"), callback), "the list of callbacks")
    return found.f_locals["self"]


def _is_list_with(owner: Any, callback: Any) -> bool:
    return isinstance(owner, keras.callbacks.CallbackList) and any(one is callback for one in owner.callbacks)


def epoch_iterator(model: Any) -> Any:
    """The iterator over epochs in a local variable of this model's running `fit` or `evaluate`."""
    return _frame_with_data(model).f_locals["epoch_iterator"]


def _frame_with_data(model: Any) -> FrameType:
    return _find(lambda frame: _has_data(frame, model), "the data of fit() or evaluate()")


def _has_data(frame: FrameType, model: Any) -> bool:
    return frame.f_locals.get("self") is model and "epoch_iterator" in frame.f_locals


CALLED_BY_FIT = ("reset_metrics", "evaluate", "train_function", "_get_metrics_result_or_logs")
"""Methods of the model that `fit` calls, and in which the user's own code may run."""


def frame_of_fit(model: Any) -> FrameType | None:
    """The frame of this model's running `fit`, if it is among our callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _has_data(frame, model):
            return frame if frame.f_code.co_name == "fit" else None
        frame = frame.f_back
    return None


def is_running(wanted: FrameType) -> bool:
    """Whether this frame is one of our callers in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None


_GUARD = "_elasticflow_guard"


def guard_of(model: Any) -> Any:
    """The guard of this model's `fit`; None if there is none."""
    return vars(model).get(_GUARD)


def set_guard(model: Any, guard: Any) -> None:
    """Record the guard, bypassing Keras's tracking; None removes it."""
    if guard is None:
        vars(model).pop(_GUARD, None)
    else:
        vars(model)[_GUARD] = guard


def is_called_by(frame: FrameType | None) -> bool:
    """Whether this frame has called our caller."""
    return frame is not None and sys._getframe(2) is frame


def entries_of(callbacks: Any) -> list[str]:
    """Methods of a list of callbacks that `fit` calls, or that are called while the list is made."""
    return ["set_params", *(name for name in dir(type(callbacks)) if name.startswith("on_"))]


def _find(matches: Callable[[FrameType], bool], what: str) -> FrameType:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if matches(frame):
            return frame
        frame = frame.f_back
    raise UnsupportedError(
        f"cannot take hold of {what}: ef_keras.callbacks() go into model.fit(callbacks=…) or model.evaluate(…), and "
        f"this release of Keras may keep it elsewhere. Received: keras={keras.__version__}"
    )


def replace_batches(iterator: Any, batches: Callable[[], Batches]) -> None:
    """Let `fit` or `evaluate` iterate over other batches, for which it asks in each epoch."""
    iterator._enumerate_iterator = batches


def own_batches_again(iterator: Any) -> None:
    """Undo `replace_batches`."""
    vars(iterator).pop("_enumerate_iterator", None)


def own_batches(iterator: Any) -> Iterable[Any]:
    """The batches that Keras itself would iterate over, from the first one on.

    `num_passes` and `num_orders` count the calls.
    """
    data = _data_of(iterator)
    for counted in {id(one): one for one in (data, *_shuffles_in(data))}.values():
        vars(counted)[_PASSES] = _passes_over(counted) + 1
    found: Iterable[Any] = iterator._get_iterator()
    return found


def num_passes(iterator: Any) -> int:
    """Passes that were begun with `own_batches` over these data, in any `fit` or `evaluate`."""
    return _passes_over(_data_of(iterator))


def num_orders(iterator: Any) -> int:
    """Orders that these data have been given in passes that were begun with `own_batches`.

    The order of a shuffled `tf.data.Dataset` is a function of its seed and of this number. All data sets that are made
    of one `shuffle` (by `take` and `skip`, say) share it: a pass over any of them gives the others another order.
    """
    data = _data_of(iterator)
    return max(map(_passes_over, _shuffles_in(data) or [data]))


def _passes_over(data: Any) -> int:
    return int(vars(data).get(_PASSES, 0))


def _shuffles_in(data: Any) -> list[Any]:
    """The shuffles that a `tf.data.Dataset` is made of, and that give each pass another order; none of other data."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or not isinstance(data, tensorflow.data.Dataset):
        return []
    found = {id(data): data}
    waiting = [data]
    while waiting:
        within = {id(one): one for one in waiting.pop()._inputs() if id(one) not in found}
        found.update(within)
        waiting += within.values()
    shuffles = [one for one in found.values() if "Shuffle" in type(one).__name__]
    return [one for one in shuffles if getattr(one, "_reshuffle_each_iteration", True) is not False]


def _data_of(iterator: Any) -> Any:
    """The user's data set or loader, which outlives a `fit`; Keras's adapter if it keeps neither."""
    adapter = iterator.data_adapter
    given = getattr(adapter, "_dataset", getattr(adapter, "_dataloader", None))
    return given if hasattr(given, "__dict__") else adapter


def num_batches(iterator: Any) -> int | None:
    """Batches of the data, whatever `steps_per_epoch` is; None if Keras cannot tell."""
    found = iterator.data_adapter.num_batches
    return None if found is None or found < 0 else int(found)


def num_steps(iterator: Any) -> int | None:
    """Batches of an epoch if `steps_per_epoch` sets them; a whole number of executions."""
    steps = iterator.steps_per_epoch
    return None if not steps else -(-int(steps) // steps_per_execution(iterator)) * steps_per_execution(iterator)


def steps_per_execution(iterator: Any) -> int:
    """Number of batches that Keras processes at a time."""
    return int(iterator.steps_per_execution)


def is_missing(leaf: Any) -> bool:
    """Whether a part of a batch is None, or an Optional, which TensorFlow's data use for it."""
    return leaf is None or hasattr(leaf, "has_value")


def build(model: Any, batch: Any) -> None:
    """Create all variables of model, metrics and optimizer, as Keras does before the first step on torch and JAX.

    Raises:
        Exception: The model cannot be called with a batch, or its loss or metrics cannot.
    """
    model._symbolic_build(data_batch=without_missing(batch))


def build_eagerly(model: Any, batch: Any) -> None:
    """The same for a model that can only be called on numbers, but for its optimizer."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(without_missing(batch))
    y_pred = model(x)
    model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
    model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    model.reset_metrics()


def has_call(model: Any) -> bool:
    """Whether a model can be called: one that only trains in a `train_step` of its own need not."""
    return type(model).call is not keras.Model.call


def without_missing(batch: Any) -> Any:
    """A batch with None for its missing parts."""
    return keras.tree.map_structure(lambda leaf: None if is_missing(leaf) else leaf, batch)


def unbuilt_layers_within(model: Any) -> list[Any]:
    """Layers of a model that have no variables yet."""
    return [layer for layer in layers_within(model, keras.layers.Layer) if not layer.built]


def layers_within(model: Any, kind: type) -> list[Any]:
    """Layers of this class in a model, however deep they are."""
    return [layer for layer in model._flatten_layers(include_self=False) if isinstance(layer, kind)]


def normalized_kernels(model: Any) -> list[Any]:
    """Kernels that a pass replaces by themselves, normalized. Further passes change nothing in them."""
    return [layer.kernel for layer in layers_within(model, keras.layers.SpectralNormalization)]


def adapted_variables(model: Any) -> list[Any]:
    """Variables of layers with LoRA, which save them merged, and load them so."""
    layers = [layer for layer in layers_within(model, keras.layers.Layer) if getattr(layer, "lora_enabled", False)]
    return [variable for layer in layers for variable in layer.variables]


def metric_variables(model: Any) -> list[Any]:
    """Variables of the loss and of all metrics."""
    if _backend() == "jax":
        model.jax_state_sync()  # an evaluation has the state of the model elsewhere
    return list(model.metrics_variables)


def state_variables(model: Any) -> list[Any]:
    """All other variables of the model, including those of its random generators; each once."""
    skipped = {id(variable) for variable in metric_variables(model)}
    found = {}
    for variable in [*model.trainable_variables, *model.non_trainable_variables]:
        if id(variable) not in skipped:
            found[id(variable)] = variable
    return list(found.values())


def copied(variable: Any) -> np.ndarray:
    """What a variable holds now, in memory of its own."""
    return np.array(keras.ops.convert_to_numpy(variable))


def averaged(model: Any) -> bool:
    """Whether an optimizer replaces the weights by their averages at the end of `fit`, even if that makes no step."""
    return any(optimizer.use_ema for optimizer in optimizers(model))


def shared_variables(model: Any) -> list[Any]:
    """All variables that must be equal in all workers, in an order that is the same everywhere."""
    found = state_variables(model)
    for optimizer in optimizers(model):
        found += optimizer.variables
    return found


def statistics(model: Any) -> list[Any]:
    """Floating variables that a training step changes without a gradient (the statistics of BatchNorm).

    A frozen weight is none. Those that are averaged come first.
    """
    found = {}
    for layer in model._flatten_layers():
        for variable in () if _has_constants(layer) else layer._non_trainable_variables:
            if str(variable.dtype).startswith(("float", "bfloat")):
                found[id(variable)] = variable
    return sorted(found.values(), key=is_taken)


def _has_constants(layer: Any) -> bool:
    """Whether no step changes what a layer holds beside its weights, as far as that is known.

    Constants are left alone: a mean of equal values may differ from them in its last bits, and an index that a
    quantized layer holds would become another one. A frozen layer of the user's may have statistics that still change.
    """
    is_of_keras = type(layer).__module__.partition(".")[0] in ("keras", "keras_hub")
    goes_on = isinstance(layer, (keras.layers.SpectralNormalization, keras.layers.JaxLayer))
    is_still = not layer.trainable and is_of_keras and not goes_on
    return is_still or getattr(layer, "quantization_mode", None) is not None


def rates(model: Any) -> list[Any]:
    """The variables of the learning rates, each once; a schedule has none.

    A callback may set one by what its worker sees (the loss of its batches), so in each update all take one worker's.
    """
    found = {id(one._learning_rate): one._learning_rate for one in updating_optimizers(model)}
    return [rate for rate in found.values() if isinstance(rate, keras.Variable)]


def numbers_of(variables: Iterable[Any]) -> list[float]:
    """What scalar variables hold."""
    return [float(copied(variable)) for variable in variables]


def set_numbers(variables: Sequence[Any], numbers: Iterable[float]) -> None:
    """Set those scalar variables that hold other numbers."""
    for variable, held, number in zip(variables, numbers_of(variables), numbers, strict=False):
        if held != number:
            variable.assign(number)


def is_taken(variable: Any) -> bool:
    """Whether all workers take one worker's value, as a mean would make no sense (of the rows of a queue)."""
    return bool(variable.aggregation == "only_first_replica")


def seed_state() -> Any:
    """The variable of the random generator for code that names none."""
    from keras.src.random import seed_generator

    return seed_generator.global_seed_generator().state


def seed_states(model: Any) -> list[Any]:
    """The variables of the model's random generators; the last one serves code that names none."""
    found = {}
    for layer in model._flatten_layers():
        for generator in layer._seed_generators:
            found[id(generator.state)] = generator.state
    everybodys = seed_state()
    found.pop(id(everybodys), None)
    return [*found.values(), everybodys]


def random_seed() -> int | None:
    """What `keras.utils.set_random_seed` was called with."""
    from keras.src.utils import rng_utils

    found = rng_utils.get_random_seed()
    return None if found is None else int(found)


def num_replicas(model: Any) -> int:
    """Copies of the model that one process trains: several with a strategy of `tf.distribute` for several devices."""
    strategy = getattr(model, "distribute_strategy", None)
    return 1 if strategy is None else int(strategy.num_replicas_in_sync)


def is_distributed() -> bool:
    """Whether a model on the JAX backend is on several devices of one process."""
    return _backend() == "jax" and keras.distribution.distribution() is not None


def uses_nnx() -> bool:
    """Whether Keras's variables on the JAX backend are those of Flax."""
    return _backend() == "jax" and bool(keras.config.is_nnx_enabled())


def optimizers(model: Any) -> list[Any]:
    """The model's optimizers: the compiled one, and those that a custom `train_step` keeps in attributes.

    They may be in lists, tuples and dicts there. One that is only a part of another one is not among them.
    """
    found = {id(model.optimizer): model.optimizer} if model.optimizer is not None else {}
    found.update((id(one), one) for one in _optimizers_in(vars(model), set()))
    within = {id(part) for one in found.values() for part in with_parts(one)[1:]}
    return [one for number, one in found.items() if one is model.optimizer or number not in within]


def _optimizers_in(container: Any, seen: set[int]) -> Iterator[Any]:
    seen.add(id(container))  # which may contain itself
    for value in container.values() if isinstance(container, dict) else container:
        if isinstance(value, keras.optimizers.Optimizer):
            yield value
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            yield from _optimizers_in(value, seen)


def optimizers_within(model: Any) -> list[Any]:
    """Those of layers and models within the model, compiled or in attributes, unless they are its own, too."""
    known, seen = set(map(id, all_optimizers(model))), set[int]()
    layers = layers_within(model, keras.layers.Layer)
    held = (part for layer in layers for one in _optimizers_in(vars(layer), seen) for part in with_parts(one))
    return [one for number, one in {id(one): one for one in held}.items() if number not in known]


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers that make an optimizer's updates: a `MultiOptimizer` has several, perhaps only once built."""
    return [part for part in with_parts(optimizer) if not isinstance(part, _WRAPPERS)]


def with_parts(optimizer: Any) -> list[Any]:
    """An optimizer, and those within it, which it calls in an update."""
    within: Iterable[Any] = ()
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        within = [optimizer.inner_optimizer]
    elif isinstance(optimizer, _MULTI):
        within = optimizer.optimizers
    return [optimizer, *(part for one in within for part in with_parts(one))]


def all_optimizers(model: Any) -> list[Any]:
    """The model's optimizers and those within them, each once."""
    return list({id(part): part for one in optimizers(model) for part in with_parts(one)}.values())


def updating_optimizers(model: Any) -> list[Any]:
    """Those of `all_optimizers` that make updates themselves."""
    return [one for one in all_optimizers(model) if not isinstance(one, _WRAPPERS)]


_MULTI = getattr(keras.optimizers, "MultiOptimizer", ())
_WRAPPERS = (keras.optimizers.LossScaleOptimizer, _MULTI)


def accumulation(optimizer: Any) -> int:
    """Number of batches whose gradients an optimizer accumulates for an update."""
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)


def num_applied(optimizer: Any) -> int:
    """How often an optimizer has received gradients."""
    return int(keras.ops.convert_to_numpy(optimizer._iterations))


def trained_variables(optimizer: Any) -> list[Any]:
    """The variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def momenta_with_rate(optimizer: Any) -> list[Any]:
    """Variables of an optimizer that sum up gradients multiplied by the learning rate."""
    found: list[Any] = []
    if isinstance(optimizer, keras.optimizers.SGD):
        found = getattr(optimizer, "momentums", [])
    elif isinstance(optimizer, keras.optimizers.RMSprop):
        found = getattr(optimizer, "_momentums", [])
    return [momentum for momentum in found if momentum is not None]


@contextmanager
def optimizers_that_hand_over_variables(model: Any) -> Iterator[None]:
    """Let the model's optimizers pass their variables when saved, as layers do; Keras's own pass copies.

    One with a `save_own_variables` of the user's is left alone.
    """
    kerass = keras.optimizers.Optimizer.save_own_variables
    own = [one for one in all_optimizers(model) if type(one).save_own_variables is kerass]
    for optimizer in own:
        vars(optimizer)["save_own_variables"] = partial(_hand_over, optimizer)
    try:
        yield
    finally:
        for optimizer in own:
            del vars(optimizer)["save_own_variables"]


def _hand_over(optimizer: Any, store: Any) -> None:
    for index, variable in enumerate(optimizer.variables):
        store[str(index)] = variable


@contextmanager
def other_settings(optimizer: Any, scaled: Callable[[Any], Any], settings: dict[str, Any]) -> Iterator[None]:
    """Put other settings into an optimizer, so that Keras neither tracks nor saves them.

    Args:
        optimizer: The optimizer.
        scaled: Makes of a learning rate the one that is in use.
        settings: The others.
    """
    own, rate = vars(optimizer), optimizer._get_current_learning_rate
    before = {name: own[name] for name in (*settings, _RATE) if name in own}
    own.update(settings, **{_RATE: lambda: scaled(rate())})
    try:
        yield
    finally:
        del own[_RATE]
        own.update(before)


def serialized(model: Any) -> tuple[str, str]:
    """The description of its architecture and of itself in the file of a whole model."""
    from keras.src.saving import saving_lib

    config, metadata = saving_lib._serialize_model_as_json(model)
    return config, metadata


def save_state(model: Any, weights: Any, assets: Any = None) -> None:
    """Let layers and optimizers write to a store of weights, and to a store of assets."""
    from keras.src.saving import saving_lib

    saving_lib._save_state(model, weights_store=weights, assets_store=assets, inner_path="", visited_saveables=set())


def assets_in(folder: Any) -> Any:
    """A store of assets that writes to a folder."""
    from keras.src.saving import saving_lib

    return saving_lib.DiskIOStore(folder, mode="w")


def store_that_makes(entry: Callable[[str, Any], Any]) -> Any:
    """A store of weights for Keras: `entry` makes what a layer fills, given its path and texts."""
    from keras.src.saving import saving_lib

    store = saving_lib.NpzIOStore("", mode="w")
    store.make = lambda path, metadata=None: entry(path, metadata)
    return store


_PASSES = "_elasticflow_passes"
_RATE, _SHIFT, _SHOWN = "_get_current_learning_rate", "_elasticflow_shift", "_elasticflow_shown_shift"


def schedule_of(optimizer: Any) -> Any:
    """The schedule of an optimizer's learning rate; None unless it is called with a number of updates."""
    found = optimizer._learning_rate
    return found if isinstance(found, keras.optimizers.schedules.LearningRateSchedule) else None


def shift_schedule(optimizer: Any, num: Any) -> None:
    """Call the schedule with the number of updates plus this variable. Keras still saves the schedule.

    Args:
        optimizer: The optimizer.
        num: An integer variable.
    """
    plain = optimizer._get_current_learning_rate

    def shifted() -> Any:
        schedule = schedule_of(optimizer)
        return plain() if schedule is None else schedule(optimizer._iterations + num)

    vars(optimizer).update({_RATE: shifted, _SHOWN: num})


def unshift_schedule(optimizer: Any) -> None:
    """Undo `shift_schedule`."""
    for name in (_RATE, _SHOWN):
        vars(optimizer).pop(name, None)


def shifts_of(model: Any) -> list[Any]:
    """The shift variables of the schedules of a model's optimizers."""
    return [vars(one)[_SHOWN] for one in updating_optimizers(model) if _SHOWN in vars(one)]


def remember_shift(optimizer: Any, num: int) -> None:
    """Record on an optimizer how far its schedule is ahead of its updates, bypassing Keras's tracking."""
    if num:
        vars(optimizer)[_SHIFT] = (num, num_applied(optimizer))


def recalled_shift(optimizer: Any, num_updates: int) -> int:
    """The recorded shift, unless the optimizer has gone back since: other variables may have been loaded."""
    num, noted = vars(optimizer).pop(_SHIFT, (0, 0))
    return int(num) if num_updates >= noted else 0


def initial_epoch(model: Any) -> int:
    """The `initial_epoch` argument of the running `fit`."""
    frame = frame_of_fit(model)
    return 0 if frame is None else int(frame.f_locals.get("initial_epoch") or 0)


def num_epochs(model: Any) -> int:
    """The `epochs` argument of the running `fit`, which a list of callbacks that was made by hand does not know."""
    return int(_frame_with_data(model).f_locals["epochs"])


def class_weight(model: Any) -> Any:
    """The `class_weight` argument of the running `fit`."""
    frame = frame_of_fit(model)
    return None if frame is None else frame.f_locals.get("class_weight")


def endless_data(model: Any) -> str | None:
    """The missing argument without which the running `fit` or `evaluate` would never end."""
    frame = _frame_with_data(model)
    of_fit = {"steps_per_epoch": "x", "validation_steps": "val_x"}
    for steps, data in (of_fit if frame.f_code.co_name == "fit" else {"steps": "x"}).items():
        if frame.f_locals.get(steps) is None and _is_endless(frame.f_locals.get(data)):
            return steps
    return None


def _is_endless(data: Any) -> bool:
    if isinstance(data, keras.utils.PyDataset):
        return data.num_batches is None
    cardinality = getattr(data, "cardinality", None)
    return callable(cardinality) and int(cardinality()) == -1  # tf.data.INFINITE_CARDINALITY


def start_of(model: Any) -> int | None:
    """The epoch at which `fit` begins, if it differs from its argument."""
    epoch = model._initial_epoch
    return None if epoch is None else int(epoch)


def start_at(model: Any, epoch: int | None) -> None:
    """Set the epoch at which `fit` begins, if it differs from its argument, as BackupAndRestore does."""
    model._initial_epoch = epoch


def renew_train_function(model: Any, *, xla: bool = True) -> None:
    """Rebuild the train function, because its graph was traced before ElasticFlow was installed or removed.

    Args:
        model: The model.
        xla: Whether it is compiled by XLA, if the model's functions are. Those of `evaluate` and `predict` stay as
            they are.
    """
    compiled = model.jit_compile
    if not xla:
        model.jit_compile = False
    try:
        model.make_train_function(force=True)
    finally:
        if not xla:
            model.jit_compile = compiled


def has_own_train_function(model: Any) -> bool:
    """Whether a user's code makes the train function of a model, which may take its batches in a way of its own."""
    return getattr(model.make_train_function, "__func__", None) is not keras.Model.make_train_function


def has_own_train_step(model: Any) -> bool:
    """Whether a user's code makes the steps of a model, which may do anything with the gradients before the update."""
    step = getattr(model.train_step, "__func__", None)
    known = step is not None and step.__module__.startswith(("keras.", "ef_keras."))
    return not known or has_own_train_function(model)


def new_train_function(model: Any, *, xla: bool = True) -> Callable[[Any], Any]:
    """An untraced train function; the model keeps its own."""
    own = model.train_function
    renew_train_function(model, xla=xla)
    new, model.train_function = model.train_function, own
    found: Callable[[Any], Any] = new
    return found


def inlined_train_function(model: Any) -> Callable[[Any], Any]:
    """A train function without a graph of its own: its step becomes part of the graph being traced."""
    eagerly, model.run_eagerly = model.run_eagerly, True
    try:
        return new_train_function(model, xla=False)
    finally:
        model.run_eagerly = eagerly


def set_num_steps(params: dict[str, Any], callbacks: Iterable[Any], num_steps: int | None) -> None:
    """Tell the progress bar the current number of steps of an epoch, if it is known."""
    params["steps"] = num_steps
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ProgbarLogger):
            callback.target = num_steps
            if callback.progbar is not None:
                callback.progbar.target = num_steps


def variables_of_steps(model: Any) -> list[list[Any]]:
    """The variables whose values are the state of a training step on the JAX backend, as that has them."""
    others = model.optimizer.variables, model.metrics_variables
    return [list(group) for group in (model.trainable_variables, model.non_trainable_variables, *others)]


def set_value(variable: Any, value: Any) -> None:
    """Set a variable to a value that is known to fit."""
    variable._direct_assign(value)


def are_synced(model: Any) -> None:
    """Tell Keras on the JAX backend that a callback has synchronized the state into the variables."""
    vars(model)["_jax_state_synced"] = True  # past what Keras tracks


class Arrays:
    """The content of Keras's adapter for arrays. Its batches are accessible in any order.

    Attributes:
        num_samples: Number of samples in an epoch.
        batch_size: Size of a full batch.
        shuffle: True, False, or "batch".
    """

    def __init__(self, adapter: Any) -> None:
        from keras.src.trainers.data_adapters import array_slicing

        slice_as = "torch" if _backend() == "torch" else "numpy"
        self._inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend=slice_as)
        self._convert = "convert_to_torch_compatible" if _backend() == "torch" else "convert_to_numpy"
        self.num_samples = int(adapter._num_samples)
        self.batch_size = int(adapter.batch_size)
        self.shuffle = adapter._shuffle

    def batch(self, indices: Any) -> Any:
        """These samples as the backend's tensors, in the structure that a step accepts."""

        def pick(sliceable: Any) -> Any:
            if sliceable is None:  # a leaf, since Keras 3.12
                return None
            part = sliceable[indices]
            if _backend() == "tensorflow" and hasattr(part, "row_splits"):
                return part  # ragged, as in plain Keras; the conversion would fill its rows up with zeros
            return keras.ops.convert_to_tensor(getattr(sliceable, self._convert)(part))

        return keras.tree.lists_to_tuples(keras.tree.map_structure(pick, self._inputs))


def arrays_of(iterator: Any) -> Arrays | None:
    """The arrays behind a `fit` or `evaluate`, if its data are arrays."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    adapter = iterator.data_adapter
    return Arrays(adapter) if isinstance(adapter, ArrayDataAdapter) else None


def as_batch(arrays: Any) -> Any:
    """Arrays as the backend's tensors, in the structure that a step accepts."""
    tensors = keras.tree.map_structure(keras.ops.convert_to_tensor, arrays, none_is_leaf=False)
    return keras.tree.lists_to_tuples(tensors)


class Indexed:
    """A `PyDataset`, whose batches are accessible in any order.

    Attributes:
        data: The data set.
        shuffle: Whether `fit` is to shuffle its batches.
    """

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self.data = adapter.py_dataset
        self.shuffle = bool(adapter.shuffle) and adapter.num_batches is not None

    def batch(self, index: int) -> Any:
        """One batch as the backend's tensors, in the structure that a step accepts."""
        return self.made_of(self.data[index])

    def made_of(self, read: Any) -> Any:
        """The same for a batch that the data set has returned."""
        return as_batch(self._adapter._standardize_batch(read))


def indexed_of(iterator: Any) -> Indexed | None:
    """The `PyDataset` behind a `fit` or `evaluate`, if its data are one."""
    adapter = iterator.data_adapter
    is_indexed = isinstance(getattr(adapter, "py_dataset", None), keras.utils.PyDataset)
    return Indexed(adapter) if is_indexed else None


class Loader:
    """A `DataLoader`.

    Attributes:
        loader: The user's.
    """

    def __init__(self, adapter: Any) -> None:
        self.loader = adapter._dataloader

    def made_of(self, read: Any) -> Any:
        """A batch of the loader's in the form that Keras passes to a step; under torch, it is the loader's own."""
        if _backend() == "torch":
            return read
        arrays = keras.tree.map_structure(lambda part: part.cpu().numpy(), read, none_is_leaf=False)
        return as_batch(tuple(arrays))


def loader_of(iterator: Any) -> Loader | None:
    """The `DataLoader` behind a `fit` or `evaluate`, if its data are one."""
    from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter

    adapter = iterator.data_adapter
    return Loader(adapter) if isinstance(adapter, TorchDataLoaderAdapter) else None


def generated(batches: Callable[[], Iterator[Any]], first: Iterable[Any]) -> Any:
    """Data of unknown length for `fit` and `evaluate`, of which each pass is made anew.

    Args:
        batches: Makes a pass.
        first: Some batches, from which Keras learns the shapes.
    """
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

    adapter = GeneratorDataAdapter(iter(first))
    adapter.generator = batches
    return adapter


def maker_of(iterator: Any) -> Any:
    """What makes the passes of a `fit` or `evaluate`, if its data are `generated`."""
    return getattr(iterator.data_adapter, "generator", None)


def is_generator(iterator: Any) -> bool:
    """Whether the data come from a plain generator."""
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

    return isinstance(iterator.data_adapter, GeneratorDataAdapter)


def _backend() -> str:
    return str(keras.config.backend())
