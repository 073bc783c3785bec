"""Small logical collectives on NumPy arrays and plain values: metrics, decisions, start-up."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from ef_common.collectives.codec import ARRAYS, Codec
from ef_common.core.view import View
from ef_common.session import LoneGroup, Session
from ef_common.session.ports import Group


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


class FirstRank:
    """What broadcasts of rank 0's values have in common: nothing is sent if all members hold the same.

    Args:
        session: The worker's session.

    Attributes:
        equal: Whether all hold the same, so that this worker's own values are the result.
    """

    call = "copy of rank 0's model at the start"

    def __init__(self, session: Session) -> None:
        self._session = session
        self.equal = False

    @cached_property
    def _digest(self) -> bytes:
        digest = xxhash.xxh3_128()
        for part in self._contents():
            digest.update(part)
        return digest.digest()

    def run(self, group: Group, view: View) -> None:
        """Compare everybody's digest, and copy if they differ."""
        self.equal = isinstance(group, LoneGroup) or len(set(group.all_gather(self._digest, self.call))) == 1
        if not self.equal:
            self._copy(group, own=view.rank_of(self._session.worker.id) == 0)

    def describe(self) -> bytes:
        """Whether all hold the same."""
        return b"equal" if self.equal else b""

    def result(self, header: bytes | None) -> Sequence[Any]:
        """The buffers that were copied, if any were."""
        if header is not None:
            self.equal = header == b"equal"
        return [] if self.equal else self._buffers()

    def _contents(self) -> Iterator[Any]:
        """The memory of each of this worker's values, and their kinds."""
        raise NotImplementedError

    def _copy(self, group: Group, *, own: bool) -> None:
        """Sum rank 0's values with the others' zeros, which completes only when all are here."""
        raise NotImplementedError

    def _buffers(self) -> Sequence[Any]:
        raise NotImplementedError


class FirstRankArrays(FirstRank):
    """Broadcasts arrays of rank 0 (a model at the start).

    Args:
        arrays: This worker's.
        session: The worker's session.
    """

    def __init__(self, arrays: Sequence[np.ndarray], session: Session) -> None:
        super().__init__(session)
        self._arrays = list(arrays)

    def apply(self) -> list[np.ndarray]:
        """Rank 0's arrays."""
        if self.equal:
            return self._arrays
        return [part.view(array.dtype).reshape(array.shape) for array, part in self._parts()]

    def _contents(self) -> Iterator[Any]:
        for array in self._arrays:
            yield f"{array.dtype} {array.shape}".encode()
            yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

    def _copy(self, group: Group, *, own: bool) -> None:
        self._bytes[:] = 0
        for array, part in self._parts() if own else ():
            part[:] = array.reshape(-1).view(np.uint8)
        if self._bytes.size:
            group.all_reduce(self._bytes, self.call).wait()

    def _buffers(self) -> Sequence[Any]:
        return [self._bytes] if self._bytes.size else []

    @cached_property
    def _bytes(self) -> np.ndarray:
        return np.zeros(sum(array.nbytes for array in self._arrays), dtype=np.uint8)

    def _parts(self) -> list[tuple[np.ndarray, np.ndarray]]:
        ends = np.cumsum([array.nbytes for array in self._arrays], dtype=int)
        return list(zip(self._arrays, np.split(self._bytes, ends), strict=False))  # nothing is left behind the last


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
