"""The group of a world of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ef_common.errors import ProtocolError
from ef_common.session.ports import Meeting


class LoneGroup:
    """The group of a world of one, in which everything is complete at once."""

    def meet(self, call: str, tensors: Sequence[Any] | None = None) -> LoneGroup:
        return self

    def all_reduce(self, tensor: Any, call: str = "", meeting: Meeting | None = None) -> LoneGroup:
        return self

    def wait(self) -> None:
        """There is nothing to wait for."""

    def all_gather(self, payload: bytes, call: str = "") -> list[bytes]:
        return [payload]

    def send(self, tensors: Sequence[Any], target: int) -> None:
        raise ProtocolError("a world of one has nobody to send to")

    def receive(self, tensors: Sequence[Any], source: int, target: int | None = None) -> None:
        raise ProtocolError("a world of one has nobody to receive from")

    def abort(self) -> None:
        """There is nothing to end."""
