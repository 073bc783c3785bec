"""What callbacks remember, so that those of another worker, or of the next run, can continue from it."""

from __future__ import annotations

from typing import Any

from ef_common.collectives.codec import ARRAYS

FIELDS: dict[str, tuple[str, ...]] = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    "OrbaxCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen", "_total_batches_seen"),
    "BackupAndRestore": ("_current_epoch", "_batches_seen_since_last_saving", "_last_batch_seen"),
    "History": ("epoch", "history"),
    "TensorBoard": ("_global_train_batch", "_global_test_batch"),
}
"""Fields of Keras's own callbacks that change while they run, by the name of their class."""


def memory_of(callback: Any) -> dict[str, Any] | None:
    """What a callback remembers; the user's define it with `state_dict` and `load_state_dict`."""
    if _is_stateful(callback):
        return {"user": callback.state_dict()}
    names = _fields_of(callback)
    if names is None:
        return None
    return {name: getattr(callback, name) for name in names if ARRAYS.knows(getattr(callback, name, None))}


def restore(callback: Any, memory: dict[str, Any]) -> None:
    """Restore a callback's memory, but not where it writes, for example: a memory may come from a store."""
    if "user" in memory:
        callback.load_state_dict(memory["user"])
    else:
        vars(callback).update({name: memory[name] for name in _fields_of(callback) or () if name in memory})


def _is_stateful(callback: Any) -> bool:
    return callable(getattr(callback, "state_dict", None)) and callable(getattr(callback, "load_state_dict", None))


def _fields_of(callback: Any) -> tuple[str, ...] | None:
    kinds = [kind.__name__ for kind in type(callback).__mro__ if kind.__module__.startswith("keras.")]
    return next((FIELDS[name] for name in kinds if name in FIELDS), None)
