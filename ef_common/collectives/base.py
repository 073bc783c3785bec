"""Ports of the data plane: a group of one view, and what builds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ef_common.core.view import View


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Block until it is complete; the result stands in the tensor.

        Raises:
            GroupBroken: A member is gone, or the group was aborted.
        """


class Group(Protocol):
    """The process group of one view.

    Every member must call the same collectives in the same order. Each raises `GroupBroken`, and nothing else,
    when communication fails; after that the group is good for nothing but `abort`. A tensor is whatever the
    adapter's framework calls one; it must be contiguous.
    """

    def all_reduce(self, tensor: Any) -> Pending:
        """Start to sum `tensor` over the members, in place; bit for bit equal in all of them."""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Exchange small payloads; returns everybody's, in rank order. Completes only if all have entered."""

    def send(self, tensors: Sequence[Any], target: int) -> None:
        """Send tensors to one rank."""

    def receive(self, tensors: Sequence[Any], source: int) -> None:
        """Receive tensors of the same shapes and types from one rank, in place."""

    def abort(self) -> None:
        """End the group, from any thread: operations in flight raise `GroupBroken` at once. May be repeated."""


class Bootstrap(Protocol):
    """Small values that members of one view exchange to find each other (addresses, mostly)."""

    def put(self, key: str, value: bytes) -> None:
        """Publish a value to the members of the view."""

    def get(self, key: str) -> bytes:
        """Wait for a value that a member publishes.

        Raises:
            GroupBroken: The view has been replaced meanwhile.
        """

    def replaced(self) -> bool:
        """A newer view is known, or none can come any more: whoever builds this one's group should give up."""


class GroupFactory(Protocol):
    """Builds the group of a view."""

    def build(self, view: View, *, rank: int, bootstrap: Bootstrap) -> Group:
        """Connect to the other members.

        Raises:
            GroupBroken: A member could not be reached, or the view has been replaced meanwhile.
        """

    def empty_bytes(self, num_bytes: int) -> Any:
        """A tensor of so many bytes, to receive a byte string into."""

    def from_bytes(self, payload: bytes) -> Any:
        """A tensor with a copy of these bytes."""

    def to_bytes(self, tensor: Any) -> bytes:
        """The bytes of such a tensor."""
