"""Small logical collectives on NumPy arrays and plain values: metrics, decisions, start-up."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ef_common.collectives.codec import ARRAYS, Codec
from ef_common.core.view import View
from ef_common.ports import Group
from ef_common.session import LoneGroup, Session


class GatherBytes:
    """Gathers the payload of every member, in rank order.

    Args:
        payload: This worker's.
        call: Purpose of the collective.
    """

    def __init__(self, payload: bytes, call: str = "a gather") -> None:
        self._payload = payload
        self.call = call
        self.parts: list[bytes] = []

    def run(self, group: Group, view: View) -> None:
        """Exchange the payloads."""
        self.parts = group.all_gather(self._payload, self.call)

    def describe(self) -> bytes:
        """All payloads."""
        return json.dumps([base64.b64encode(part).decode() for part in self.parts]).encode()

    def result(self, header: bytes | None) -> Sequence[Any]:
        """There are no tensors; the header holds everything."""
        if header is not None:
            self.parts = [base64.b64decode(part) for part in json.loads(header)]
        return ()


class FirstRankArrays:
    """Broadcasts arrays of rank 0 (a model at the start). `apply` changes the local arrays in place."""

    call = "copy of rank 0's model at the start"

    def __init__(self, arrays: Sequence[np.ndarray], session: Session) -> None:
        self._arrays = list(arrays)
        self._session = session
        self._bytes = np.zeros(sum(array.nbytes for array in self._arrays), dtype=np.uint8)

    def run(self, group: Group, view: View) -> None:
        """Sum rank 0's bytes with the others' zeros, which completes only when all are here."""
        own = view.rank_of(self._session.worker.id) in (0, None)
        self._bytes[:] = 0
        for array, part in self._parts() if own else ():
            part[:] = array.reshape(-1).view(np.uint8)
        if isinstance(group, LoneGroup) or not self._bytes.size:
            group.all_gather(b"", self.call)
        else:
            group.all_reduce(self._bytes, self.call).wait()

    def describe(self) -> bytes:
        """Nothing to describe."""
        return b""

    def result(self, header: bytes | None) -> Sequence[Any]:
        """The bytes of the arrays."""
        return [self._bytes] if self._bytes.size else []

    def apply(self) -> list[np.ndarray]:
        """Set the arrays to those of rank 0."""
        return [part.view(array.dtype).reshape(array.shape) for array, part in self._parts()]

    def _parts(self) -> list[tuple[np.ndarray, np.ndarray]]:
        parts, offset = [], 0
        for array in self._arrays:
            parts.append((array, self._bytes[offset : offset + array.nbytes]))
            offset += array.nbytes
        return parts


def gather(
    session: Session, value: Any, *, what: str = "value", call: str | None = None, codec: Codec = ARRAYS
) -> tuple[list[Any], View]:
    """Every member's value (a plain tree, see `codec`) in rank order, and the view of these members.

    Args:
        session: The worker's session.
        value: This worker's.
        what: Its name, for errors.
        call: Purpose of the exchange, if that says more.
        codec: For it.
    """
    operation = GatherBytes(codec.dumps(value, what=what), call or f"exchange of {what}")
    view = session.run(operation)
    return [codec.loads(part) for part in operation.parts], view
