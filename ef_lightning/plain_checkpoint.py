"""Checkpoints that torch loads with `weights_only`, so that a store brings no code into a worker.

A checkpoint of Lightning's may hold more than tensors and plain values. Hyper-parameters of other types are left out:
Lightning resumes nothing from them. What the codec knows is encoded as for newcomers. The rest only the user can allow.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections import OrderedDict, deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

from ef_common.collectives.codec import type_of_numbers
from ef_common.collectives.module_versions import versions_of, with_versions
from ef_common.collectives.torch_codec import TENSORS
from ef_common.errors import ProtocolError, UsageError
from ef_common.storage.layout import Path
from ef_lightning import hooks

logger = logging.getLogger(__name__)

CHECKPOINT_KEY = "elasticflow"
"""Where a checkpoint file holds what Lightning does not know: how far its epoch is, the ratio of the run …"""

BETWEEN_STEPS = ("running", "gradients")
"""Parts of that for a training that goes on between the two steps; the gradients are those of a manual accumulation."""

_BASIC = (type(None), bool, int, float, complex, str, torch.Size, torch.dtype, torch.device)
_ENCODED = (type(None), bool, int, float, str, bytes, timedelta, type(FilePath()), torch.Tensor)
_NUMBERS = "biufc"
_MOST_BITS = 2000
_HELP = (
    "Keep tensors, arrays, numbers, texts and containers of them, or name what may be loaded by "
    "torch.serialization.add_safe_globals([…]), or, if you trust whoever may write into the store, let everything be "
    "loaded by Trainer.fit(…, weights_only=False) (since Lightning 2.6)"
)


class PlainCheckpoints:
    """Makes the checkpoints of one training plain, and loads them.

    Args:
        weights_only: Argument of `Trainer.fit`. False: checkpoints are saved as they are, and all they name is loaded.
    """

    def __init__(self, weights_only: bool | None) -> None:
        self._weights_only = weights_only is not False
        self._left_out: set[tuple[str, Any]] = set()
        self._refused: set[type] = set()

    def of(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint as basic values and types that torch loads. Warns of what torch will still refuse.

        Args:
            checkpoint: Lightning's. It is not changed.
        """
        if not self._weights_only:
            return checkpoint
        kept = dict(checkpoint)
        for keys in hooks.HYPER_PARAMETERS:
            self._leave_out(kept, *keys)
        found = _Found()
        plain: dict[str, Any] = _plain(kept, (), found)
        if found.numbers or found.encoded:
            header, leaves = TENSORS.encode([value for _, value in found.encoded])
            encoded = ([path for path, _ in found.encoded], header, leaves)
            plain[CHECKPOINT_KEY] = {**plain.get(CHECKPOINT_KEY, {}), "numbers": found.numbers, "encoded": encoded}
        self._warn_of(found.others)
        return plain

    def load(self, file: Any) -> dict[str, Any]:
        """Read a file of `torch.save`, and put back what `of` has taken out.

        Args:
            file: Can seek.

        Raises:
            UsageError: There are objects in it that torch does not load.
            ProtocolError: A value that was taken out has no place in it.
        """
        try:
            checkpoint: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            if not self._weights_only:
                raise
            raise UsageError(
                f"the checkpoint holds objects that torch does not load, as they could run any code. {_HELP}. "
                f"Received: {_reason(error)}"
            ) from None
        return restore(checkpoint)

    def _leave_out(self, checkpoint: dict[str, Any], key: str, name_key: str, type_key: str) -> None:
        """Leave out hyper-parameters that are not plain, or all of them if they are one argument."""
        if key not in checkpoint:
            return
        values, argument = checkpoint[key], checkpoint.get(name_key)
        several = isinstance(values, dict) and argument in (None, "kwargs")
        named = values if several else {argument or key: values}
        kept, news = {}, []
        for name, value in named.items():
            found = _Found()
            if (key, name) in self._left_out:
                continue
            plain = _plain(value, (), found)
            if found.encoded or not all(_is_loaded(other) for _, other in found.others):
                self._left_out.add((key, name))
                news.append(str(name))
            else:
                kept[name] = plain  # with NumPy's numbers as Python's
        if news:
            logger.warning(
                "checkpoints leave out hyper-parameters that are objects. The training does not need them; to load a "
                "model, pass them to load_from_checkpoint. Received: %s",
                ", ".join(news),
            )
        if several:
            checkpoint[key] = kept
        elif kept:
            (checkpoint[key],) = kept.values()
        else:
            for each in (key, name_key, type_key):
                checkpoint.pop(each, None)

    def _warn_of(self, others: list[tuple[Path, Any]]) -> None:
        """Warn of the types that torch does not load, once for each class."""
        others = [(path, value) for path, value in others if type(value) not in self._refused]
        if not others or _is_loaded([value for _, value in others]):
            return
        refused = []
        for path, value in others:
            if type(value) not in self._refused and not _is_loaded(value):
                self._refused.add(type(value))
                refused.append(f"{''.join(f'[{key!r}]' for key in path)} ({_name(type(value))})")
        if refused:
            logger.warning(
                "this training will not go on from its checkpoints by itself. %s. Received: %s",
                _HELP,
                ", ".join(refused),
            )


def _plain(value: Any, path: Path, found: _Found) -> Any:
    """A tree of basic values and tensors; other content is recorded in `found`."""
    kind = type(value)
    if isinstance(value, torch.Tensor) or _is_basic(value):
        return value
    if isinstance(value, dict) and all(map(_is_key, value)):
        return with_versions(
            {key: _plain(part, (*path, key), found) for key, part in value.items()}, versions_of(value)
        )
    if kind in (list, tuple):
        if len(value) > 1 and _is_number(value[0]) and all(type(part) is type(value[0]) for part in value):
            found.numbers.setdefault(value[0].dtype.name, []).append(path)
            return kind(part.item() for part in value)
        return kind(_plain(part, (*path, index), found) for index, part in enumerate(value))
    if (kind is bytes and value) or (kind is set and all(map(_is_basic, value))):
        return value  # without bytes, torch refuses them
    if _is_number(value):
        found.numbers.setdefault(value.dtype.name, []).append(path)
        return value.item()
    if _is_encoded(value):
        found.encoded.append((path, value))
        return None
    found.others.append((path, value))
    return value


class _Found:
    """The parts of a tree that are not plain.

    Attributes:
        numbers: Places of NumPy's numbers, and of lists and tuples of them, which are in the tree as Python's; by the
            name of their type.
        encoded: Values that only the codec knows, which are not in the tree, with their places.
        others: All else, with its place.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, list[Path]] = {}
        self.encoded: list[tuple[Path, Any]] = []
        self.others: list[tuple[Path, Any]] = []


def _is_basic(value: Any) -> bool:
    kind = type(value)
    return kind in _BASIC and (kind is not int or value.bit_length() < _MOST_BITS)  # torch reads no longer ones


def _is_key(key: Any) -> bool:
    """Whether the key can be part of a path; one that does not equal itself is not found again."""
    return all(map(_is_key, key)) if type(key) is tuple else _is_basic(key) and key == key


def _is_number(value: Any) -> bool:
    return isinstance(value, np.generic) and value.dtype.kind in _NUMBERS and type(value.item()) in _BASIC


def _is_encoded(value: Any) -> bool:
    """Whether the codec restores it as it is; of some classes it makes their base class."""
    kind = type(value)
    if kind in (list, tuple, set, frozenset, deque):
        return all(map(_is_encoded, value))
    if isinstance(value, dict):  # of any class: files hold none but dicts
        return all(map(_is_encoded, value)) and all(map(_is_encoded, value.values()))
    if kind in (np.ndarray, np.memmap):
        return TENSORS.takes(value)
    if isinstance(value, np.generic):
        return value.dtype.kind in _NUMBERS
    return kind in _ENCODED and (kind is not int or value.bit_length() < _MOST_BITS)


def _is_loaded(value: Any) -> bool:
    """Whether torch loads what it saves of this."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # an object of the user's may do anything when it is saved
        logger.debug("torch does not load what is of type %s: %r", type(value), error)
        return False
    return True


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# ---------------------------------------------------------------- back


def restore(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Put back what `PlainCheckpoints.of` has taken out of a checkpoint, if it made this one.

    Raises:
        ProtocolError: A value that was taken out has no place in the checkpoint.
    """
    places: dict[Any, Any] = {}
    try:
        own = checkpoint.get(CHECKPOINT_KEY, {})
        numbers, (paths, header, leaves) = own.pop("numbers", {}), own.pop("encoded", ([], None, []))
        for name, found in numbers.items():
            for path in found:
                _place(places, path, partial(_numbers, type_of_numbers(name).type))
        for path, value in zip(paths, TENSORS.decode(header, leaves) if paths else (), strict=True):
            _place(places, path, partial(_instead, value))
        return checkpoint if not places else dict(_replaced(checkpoint, places))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ProtocolError(f"a checkpoint with values that have no place in it: {error!r}") from None


def _numbers(kind: Callable[[Any], Any], value: Any) -> Any:
    return type(value)(map(kind, value)) if type(value) in (list, tuple) else kind(value)


def _instead(value: Any, _: Any) -> Any:
    return value


def _place(places: dict[Any, Any], path: Path, make: Callable[[Any], Any]) -> None:
    for key in path[:-1]:
        places = places.setdefault(key, {})
    places[path[-1]] = make


def _replaced(tree: Any, places: Any) -> Any:
    """A tree with other values in some places; each container is made once."""
    if callable(places):
        return places(tree)
    is_dict = type(tree) in (dict, OrderedDict)  # the latter with versions of modules
    items = dict(tree) if is_dict else dict(enumerate(tree)) if type(tree) in (list, tuple) else {}
    replaced = {key: _replaced(items[key], part) for key, part in places.items()}
    parts = {**items, **replaced}
    return with_versions(parts, versions_of(tree)) if is_dict else type(tree)(parts.values())


def _reason(error: Exception) -> str:
    """The line in which torch says what it has refused; the other lines are advice."""
    lines = [line.strip().removeprefix("WeightsUnpickler error: ") for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Weights only load", "(1)", "(2)", "Check the"))]
    return kept[0].split(". Please use")[0] if kept else str(error)
