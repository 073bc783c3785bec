"""A collective that exchanges nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ef_common.core.view import View
from ef_common.session.ports import Group


class Barrier:
    """An operation without a result. When it completes, all members have arrived, and the view that counts is known.

    Args:
        call: Purpose of the barrier.
    """

    def __init__(self, call: str = "barrier") -> None:
        self.call = call

    def run(self, group: Group, view: View) -> None:
        """Wait for all members."""
        group.all_gather(b"", self.call)

    def describe(self) -> bytes:
        """There is nothing to describe."""
        return b""

    def result(self, header: bytes | None) -> Sequence[Any]:
        """There are no tensors."""
        return ()
