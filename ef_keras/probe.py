"""The list of private parts of Keras that ElasticFlow touches, and the search for them.

They are looked for when a `fit` or `evaluate` sets its callbacks up, and by the contract tests; see `ef_common.parts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import keras

from ef_common.parts import Package, Part, check, find, listed
from ef_keras import hooks, memories

RELEASES = {"keras": ("3.13", "3.15.1")}
"""The oldest release that `pyproject.toml` allows, and the newest that the tests were run with."""

_SAVING = "keras.src.saving.saving_lib"
_CALLBACKS = "keras.src.callbacks"  # some of them are not public in all releases

OF_JAX: tuple[Part, ...] = tuple(
    chain(
        listed("model", "train_step(state, data)", "JaxStep"),
        listed("model", "jax_state_sync()", "metric_variables"),
        listed("model.fit", "_jax_state_synced", "are_synced"),
        listed("keras.Variable", "_direct_assign(value)", "set_value"),
        listed(
            "optimizer",
            "stateless_apply(optimizer_variables, grads, trainable_variables)",
            "Reducer",
            replaced=True,
        ),
    )
)
"""What is touched under the JAX backend only."""

KERAS: tuple[Part, ...] = tuple(
    chain(
        # ------------------------------------------------------------ fit and evaluate
        listed("model.fit", "epoch_iterator", "epoch_iterator"),
        listed("model.fit", "initial_epoch", "initial_epoch"),
        listed("model.fit", "epochs", "num_epochs"),
        listed("model.fit", "class_weight", "class_weight"),
        listed("model.fit", "x val_x steps_per_epoch validation_steps", "endless_data"),
        listed("model.fit", " ".join(hooks.CALLED_BY_FIT), "CALLED_BY_FIT"),
        listed("model.evaluate", "epoch_iterator", "epoch_iterator"),
        listed("model.evaluate", "x steps", "endless_data"),
        listed("model", "_initial_epoch", "start_at"),
        listed("model", "_symbolic_build(iterator, data_batch)", "build Program", replaced=True),
        listed("model", "make_train_function(force=) jit_compile", "renew_train_function"),
        listed("model", "distribute_strategy", "num_replicas") if keras.config.backend() == "tensorflow" else (),
        listed("callbacks", "callbacks", "callback_list"),
        listed("progress_bar", "target progbar", "set_num_steps"),
        OF_JAX if keras.config.backend() == "jax" else (),
        # ------------------------------------------------------------ data
        listed("iterator", "data_adapter num_batches steps_per_execution", "num_batches arrays_of"),
        listed("iterator", "_enumerate_iterator()", "replace_batches", replaced=True),
        listed("iterator", "_get_iterator()", "own_batches"),
        listed("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter", "arrays_of"),
        listed("arrays", "_inputs _num_samples _shuffle batch_size", "Arrays"),
        listed(
            "keras.src.trainers.data_adapters.array_slicing",
            "convert_to_sliceable(arrays, target_backend=)",
            "Arrays",
        ),
        listed("sliceable", "convert_to_numpy(x) convert_to_torch_compatible(x)", "Arrays"),
        listed("dataset", "py_dataset num_batches shuffle", "Indexed"),
        listed("dataset", "_standardize_batch(batch)", "Indexed"),
        listed("keras.src.trainers.data_adapters.torch_data_loader_adapter", "TorchDataLoaderAdapter", "loader_of"),
        listed("torch_loader", "_dataloader", "Loader own_batches"),
        listed("tf_dataset", "_dataset", "own_batches num_passes num_orders"),
        listed(
            "keras.src.trainers.data_adapters.generator_data_adapter",
            "GeneratorDataAdapter(generator)",
            "is_generator generated",
        ),
        listed("generator", "generator", "generated maker_of"),
        # ------------------------------------------------------------ variables and random numbers
        listed("layer", "_flatten_layers(include_self=)", "statistics seed_states layers_within"),
        listed("layer", "_non_trainable_variables", "statistics"),
        listed("layer", "_seed_generators", "seed_states"),
        listed("keras.src.random.seed_generator", "global_seed_generator()", "seed_states"),
        listed("keras.src.utils.rng_utils", "get_random_seed()", "random_seed"),
        # ------------------------------------------------------------ optimizers
        listed("optimizer", "apply(grads, trainable_variables) scale_loss(loss)", "Reducer", replaced=True),
        listed("optimizer", "save_own_variables(store)", "optimizers_that_hand_over_variables", replaced=True),
        listed("optimizer", "_get_current_learning_rate()", "other_settings shift_schedule", replaced=True),
        listed("optimizer", "_learning_rate", "schedule_of"),
        listed("optimizer", "_iterations", "num_applied shift_schedule"),
        listed("optimizer", "_trainable_variables", "trained_variables"),
        listed("optimizer", "_backend_update_step _backend_apply_gradients", "kind_of"),
        listed("keras.optimizers.SGD", "momentums", "momenta_with_rate"),
        listed("keras.optimizers.RMSprop", "_momentums", "momenta_with_rate"),
        # ------------------------------------------------------------ files and memories
        listed(_SAVING, "_serialize_model_as_json(model)", "serialized"),
        listed(
            _SAVING,
            "_save_state(model, weights_store=, assets_store=, inner_path=, visited_saveables=)",
            "save_state",
        ),
        listed(_SAVING, "DiskIOStore(folder, mode=)", "assets_in"),
        listed(_SAVING, "NpzIOStore(path, mode=)", "store_that_makes"),
        listed(f"{_SAVING}.NpzIOStore", "make(path, metadata)", "store_that_makes", replaced=True),
        *(listed(f"{_CALLBACKS}.{name}", " ".join(fields), "FIELDS") for name, fields in memories.FIELDS.items()),
    )
)

_CLASSES = {
    "model": "Model",
    "layer": "Layer",
    "optimizer": "optimizers.Optimizer",
    "callbacks": "callbacks.CallbackList",
    "progress_bar": "callbacks.ProgbarLogger",
    "iterator": "src.trainers.epoch_iterator.EpochIterator",
    "arrays": "src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter",
    "sliceable": "src.trainers.data_adapters.array_slicing.Sliceable",
    "tf_dataset": "src.trainers.data_adapters.tf_dataset_adapter.TFDatasetAdapter",
    "torch_loader": "src.trainers.data_adapters.torch_data_loader_adapter.TorchDataLoaderAdapter",
    "generator": "src.trainers.data_adapters.generator_data_adapter.GeneratorDataAdapter",
    "dataset": "src.trainers.data_adapters.py_dataset_adapter.PyDatasetAdapter",
}
"""Classes of what exists while a `fit` runs. Importing Keras imports all of them."""


def package(seen: Mapping[str, Any] | None = None) -> Package:
    """The package and the parts to look at.

    Args:
        seen: Objects of a `fit`, in place of their classes.
    """
    roots = {"keras": keras, **{root: find(keras, path) for root, path in _CLASSES.items()}, **(seen or {})}
    return Package("keras", keras.__version__, *RELEASES["keras"], parts=KERAS, roots=roots)


def check_hooks() -> None:
    """Refuse a release of Keras with other private parts.

    Raises:
        UnsupportedError: Naming what has moved, and what to install.
    """
    check([package()])
