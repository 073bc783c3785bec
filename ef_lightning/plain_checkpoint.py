"""Checkpoints that torch loads without running what they name (`weights_only`): the store brings no code into a worker.

A checkpoint of Lightning's may hold more than tensors and plain values. Hyper-parameters of other types are left out:
nothing is resumed from them. What the codec knows, as newcomers get it, is encoded. The rest only the user can allow.
"""

from __future__ import annotations

import io
import logging
import pickle
from typing import Any

import numpy as np
import torch

from ef_common.collectives.torch_codec import TENSORS
from ef_common.errors import ProtocolError, UnsupportedError, UsageError
from ef_common.storage.layout import Path
from ef_lightning import hooks

logger = logging.getLogger(__name__)

CHECKPOINT_KEY = "elasticflow"
"""Where a checkpoint file holds what Lightning does not know: how far its epoch is, the ratio of the run …"""

_BASIC = (type(None), bool, int, float, str)
_MOST_TOLD = 3
_HELP = (
    "Keep tensors, arrays, numbers, texts and containers of them, or name what may be loaded by "
    "torch.serialization.add_safe_globals([…]), or, if you trust whoever may write into the store, let everything be "
    "loaded by Trainer.fit(…, weights_only=False) (since Lightning 2.6)"
)


class PlainCheckpoints:
    """Makes the checkpoints of one training plain, and loads them.

    Args:
        weights_only: Of `Trainer.fit`: whether to refuse objects of types that torch does not know. None for torch's
            default, which is to do so. False: checkpoints stay as they are.
    """

    def __init__(self, weights_only: bool | None) -> None:
        self._weights_only = weights_only
        self._refused: set[type] = set()
        self._told: set[str] = set()

    def of(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The same checkpoint, as basic values and what torch loads. Warns of what torch will refuse all the same.

        Args:
            checkpoint: Lightning's. It is not changed.
        """
        if self._weights_only is False:
            return checkpoint
        kept = dict(checkpoint)
        for keys in hooks.HYPER_PARAMETERS:
            self._leave_out(kept, *keys)
        found = _Found()
        plain: dict[str, Any] = self._plain(kept, (), found)
        if found.encoded:
            payload = bytearray(TENSORS.dumps(found.encoded, what="checkpoint"))
            encoded = torch.frombuffer(payload, dtype=torch.uint8)
            plain[CHECKPOINT_KEY] = {**plain.get(CHECKPOINT_KEY, {}), "encoded": encoded}
        news = [where for where, kind in found.refused.items() if kind not in self._told]
        if news:
            self._told |= set(found.refused.values())
            shown = ", ".join(f"{where} ({found.refused[where]})" for where in news[:_MOST_TOLD])
            more = f" and {len(news) - _MOST_TOLD} more" if len(news) > _MOST_TOLD else ""
            logger.warning(
                "this training will not go on from its checkpoints by itself. %s. Received: %s%s", _HELP, shown, more
            )
        return plain

    def load(self, file: Any) -> dict[str, Any]:
        """Read a file of `torch.save`, with what `of` has encoded in its place.

        Args:
            file: Can seek.

        Raises:
            UsageError: There are objects in it that torch does not load.
            ProtocolError: What is encoded in it has no place in it.
        """
        try:
            checkpoint: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            if self._weights_only is False:
                raise
            raise UsageError(
                f"the checkpoint holds objects that torch does not load, as they could run any code. {_HELP}. "
                f"Received: {_reason(error)}"
            ) from None
        try:
            encoded = checkpoint.get(CHECKPOINT_KEY, {}).pop("encoded", None)
            for path, value in () if encoded is None else TENSORS.loads(encoded.numpy().tobytes()):
                checkpoint[path[0]] = _replaced(checkpoint[path[0]], path[1:], value)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ProtocolError(f"a checkpoint with values that have no place in it: {error!r}") from None
        return checkpoint

    def _leave_out(self, checkpoint: dict[str, Any], key: str, name_key: str, type_key: str) -> None:
        """Leave out the hyper-parameters that are not plain; all of them if they are one argument."""
        if key not in checkpoint:
            return
        values, argument = checkpoint[key], checkpoint.get(name_key)
        argument = key if argument in (None, "kwargs") else argument
        if isinstance(values, dict) and argument == key:
            left_out = [name for name, value in values.items() if not self._is_plain(value)]
            checkpoint[key] = {name: value for name, value in values.items() if name not in left_out}
        else:
            left_out = [] if self._is_plain(values) else [argument]
            for each in (key, name_key, type_key) if left_out else ():
                checkpoint.pop(each, None)
        if left_out and key not in self._told:
            self._told.add(key)
            logger.info(
                "checkpoints lack the hyper-parameters that are not plain. Nothing goes on from them; "
                "hand them to load_from_checkpoint. Received: %s",
                ", ".join(map(str, left_out)),
            )

    def _is_plain(self, value: Any) -> bool:
        found = _Found()
        self._plain(value, (), found)
        return not found.encoded and not found.refused

    def _plain(self, value: Any, path: Path, found: _Found) -> Any:
        if type(value) in _BASIC or isinstance(value, torch.Tensor):
            return value
        if isinstance(value, dict) and all(map(_is_basic, value)):
            return {key: self._plain(part, (*path, key), found) for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._plain(part, (*path, index), found) for index, part in enumerate(value))
        if self._is_loaded(value):
            return value
        try:
            TENSORS.encode(value)
        except UnsupportedError:
            where = "".join(f"[{key!r}]" for key in path)
            found.refused[where] = f"{type(value).__module__}.{type(value).__qualname__}"
            return value
        found.encoded.append((path, value))
        number = value.item() if isinstance(value, np.generic) else None
        return number if type(number) in _BASIC else None

    def _is_loaded(self, value: Any) -> bool:
        """Whether torch loads what it saves of this."""
        kind = type(value)
        if kind in self._refused:
            return False
        file = io.BytesIO()
        try:
            torch.save(value, file)
            file.seek(0)
            torch.load(file, weights_only=self._weights_only)
        except Exception as error:  # an object of the user's may do anything when it is saved
            logger.debug("torch does not load what is of type %s: %r", kind, error)
            if kind.__module__ != "builtins":  # of containers it depends on what is in them
                self._refused.add(kind)
            return False
        return True


class _Found:
    """What is not plain in a tree.

    Attributes:
        encoded: What the codec knows, with its place.
        refused: The names of the other types, by their place.
    """

    def __init__(self) -> None:
        self.encoded: list[tuple[Path, Any]] = []
        self.refused: dict[str, str] = {}


def _is_basic(key: Any) -> bool:
    return type(key) in _BASIC or (type(key) is tuple and all(map(_is_basic, key)))


def _replaced(tree: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    part = _replaced(tree[path[0]], path[1:], value)
    if isinstance(tree, tuple):
        return (*tree[: path[0]], part, *tree[path[0] + 1 :])
    tree[path[0]] = part
    return tree


def _reason(error: Exception) -> str:
    """The line in which torch says what it has refused; the others are advice."""
    lines = [line.strip().removeprefix("WeightsUnpickler error: ") for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Weights only load", "(1)", "(2)", "Check the"))]
    return kept[0].split(". Please use")[0] if kept else str(error)
