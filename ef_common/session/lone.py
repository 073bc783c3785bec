"""A world of one: its group, and the control channel of a process that has no coordinator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ef_common.core.view import View
from ef_common.core.watermark import Watermark
from ef_common.errors import ProtocolError
from ef_common.session.ports import Bootstrap, GetClaim, Meeting


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


class LoneChannel:
    """The control channel of a process without a coordinator: nobody listens, and nothing comes."""

    change_pending = False
    room = None

    def start(self, on_view: Callable[[int], None]) -> bool:
        return False

    def send(self, kind: str, generation: int = 0) -> None: ...

    def next_view(self, after: int) -> View:
        raise ProtocolError("a group broke, but there is no coordinator")

    def fail(self, why: str) -> bool:
        return True

    def bootstrap(self, generation: int) -> Bootstrap:
        raise ProtocolError("there is no coordinator that could relay a value")

    def tell_watermark(self, watermark: Watermark) -> None: ...

    def job_watermark(self) -> Watermark | None:
        return None

    def job_training(self) -> int:
        return 0

    def want(self, num_nodes: int) -> None: ...

    def use_store(self, store: str, claim: GetClaim | None = None) -> None: ...

    def stop(self) -> None: ...
