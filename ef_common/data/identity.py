"""Checks that the data sets of all workers are one, where each reads the samples that are dealt to it from its own.

Nothing is read for it. Compared are what an unseeded split or an unsorted list makes different: lengths, the indices of
subsets, and some rows of arrays and of lists of names.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ef_common.collectives import operations
from ef_common.data.comparison import checksum, fingerprint
from ef_common.errors import UsageError
from ef_common.session import Session

logger = logging.getLogger(__name__)

_NUM_ROWS, _ROW_SIZE = 64, 1 << 14
_NUM_INDICES = 1 << 17
_DIFFERENT = (
    "the workers have different data, so that samples are used twice or never, and trained on where they validate"
)
_CAUSES = (
    "Usual causes are a split or random data without a seed, a list of files that is not sorted, and a part of the "
    "data for each rank. Pass a seed (`generator=torch.Generator().manual_seed(0)`, `seed=0`, `random_state=0`), sort "
    "the list, and give each worker the whole data"
)

Identity = dict[str, list[int]]
"""Of the data of one worker: `"lengths"` and `"indices"` of data sets, and their `"rows"`, which may be random data."""


def identity_of(data: Iterable[Any]) -> Identity:
    """What tells map-style data sets apart. Never raises.

    Args:
        data: Data sets of torch, or things that look like them, and arrays. What nobody knows tells nothing.
    """
    data = list(data)
    found: Identity = {"lengths": [_length(part) for part in data], "indices": [], "rows": []}
    for part in _parts(data):
        attributes = _attributes(part)
        if "dataset" in attributes:
            found["indices"] += _checksum_of_indices(attributes.get("indices"))
        found["indices"] += _checksum_of_indices(attributes.get("_indices"))  # of Hugging Face
        tensors = attributes.get("tensors")
        for rows in (part, *attributes.values(), *(tensors if isinstance(tensors, tuple) else ())):
            found["rows"] += _checksum_of_rows(rows)
    return found


def _attributes(part: Any) -> dict[str, Any]:
    """Those that are stored in it: to ask for others may run code of the user's."""
    return vars(part) if hasattr(part, "__dict__") and not _is_array(part) else {}


def _parts(data: Iterable[Any]) -> Iterator[Any]:
    """These data sets, and those that they are made of."""
    pending, seen = list(data)[::-1], set()
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        attributes = _attributes(part)
        several = attributes.get("datasets")
        inner = [attributes.get("dataset"), *(several if isinstance(several, list | tuple) else ())]
        pending += [one for one in inner[::-1] if hasattr(type(one), "__getitem__")]


def _length(data: Any) -> int:
    try:
        return len(data)
    except Exception:  # of a user's class
        return -1


def _checksum_of_indices(indices: Any) -> list[int]:
    """Checksum of how many there are, and of the first ones; nothing of anything that is no sequence of integers."""
    try:
        if hasattr(indices, "column"):  # a table
            indices = indices.column(0)
        array = np.asarray(indices[:_NUM_INDICES])
        return [fingerprint(len(indices), [checksum(array.astype(np.int64))])] if array.dtype.kind in "iu" else []
    except Exception:  # of a user's class
        return []


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (type(value).__module__ == "torch" and hasattr(value, "dtype"))


def _checksum_of_rows(value: Any) -> list[int]:
    """Checksum of some rows of an array, or of some names of a list of files; nothing of anything else."""
    try:
        if _is_array(value) and len(value.shape):
            found = [np.asarray(value[row]).flat[:_ROW_SIZE] for row in some_rows(len(value))]
        elif isinstance(value, list | tuple) and value and isinstance(value[0], str | os.PathLike):
            found = [np.asarray(os.path.basename(value[row])) for row in some_rows(len(value))]
        else:
            return []
        if any(array.dtype.hasobject for array in found):
            return []
        return [fingerprint(0, [checksum(array) for array in found])]
    except Exception:  # on a device, say
        return []


def some_rows(length: int) -> list[int]:
    """Indices from the first one to the last one that stand for all."""
    rows: list[int] = np.linspace(0, length - 1, min(length, _NUM_ROWS)).astype(int).tolist()
    return rows


class DataComparison:
    """Compares the data sets, in the first step of a training and in newcomers.

    Args:
        session: The worker's session.
        identify: Finds the identity of the worker's data; None if what is read is compared otherwise.

    Attributes:
        is_due: The next step is the first one.
    """

    def __init__(self, session: Session, identify: Callable[[], Identity] | None) -> None:
        self._session = session
        self._identify = identify
        self._found: Identity = {}
        self.is_due = identify is not None

    def _identity(self) -> Identity:
        if not self._found and self._identify is not None:
            self._found = self._identify()
        return self._found

    def follow(self) -> None:
        """The first step has been dealt. All members call this together.

        Raises:
            UsageError: In all members: they have different data.
        """
        self.is_due = False
        mine = self._identity()  # as it is now: code of the user's may change the data later
        if self._session.completed_in.world_size == 1:
            return
        self._session.entering = False  # a newcomer has been dealt its first batch, and meets the others here
        found, _ = operations.gather(self._session, mine, what="identity of the data")
        for what in ("lengths", "indices"):
            parts = [one[what] for one in found]
            if any(part != parts[0] for part in parts):
                raise UsageError(f"{_DIFFERENT}. {_CAUSES}. Received: {what} {[part[:4] for part in parts]}")
        if self._session.rank == 0 and any(one["rows"] != found[0]["rows"] for one in found):
            logger.warning("%s. %s", _DIFFERENT, _CAUSES)

    def state(self) -> dict[str, Any]:
        """What newcomers and new starts compare with their data."""
        return {"due": self.is_due, **self._identity()}

    def load_state(self, state: dict[str, Any] | None, *, saved: bool, compares: bool = True) -> None:
        """Compare with the others' data, or with those of a checkpoint. Data may have grown since.

        Args:
            state: What `state` returned there; None if nothing was recorded.
            saved: It is a checkpoint's, which is worth a warning and no error.
            compares: Whether this worker has its data for this epoch already.

        Raises:
            UsageError: The others' data are different.
        """
        if state is None or self._identify is None:
            return
        if not saved:
            self.is_due = state["due"]
        if not compares or not state.get("lengths"):
            return
        mine = self._identity()
        if state["indices"] != mine["indices"] and not saved:
            raise UsageError(
                f"{_DIFFERENT}. {_CAUSES}. Expected: indices {state['indices'][:4]}. Received: {mine['indices'][:4]}"
            )
        is_other = state["lengths"] == mine["lengths"] and state["rows"] != mine["rows"]
        if is_other or state["indices"] != mine["indices"]:
            logger.warning("%s. %s", _DIFFERENT, _CAUSES)
