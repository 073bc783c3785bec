"""Small logical collectives on torch tensors; `operations` has those that need no framework."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ef_common.collectives import operations
from ef_common.collectives.gradients.buckets import Bucket, by_kind
from ef_common.collectives.torch_codec import TENSORS, as_bytes
from ef_common.core.view import View
from ef_common.session import Session
from ef_common.session.ports import Group

_FEW = 1024
"""Sums of so few numbers are made in double precision. Exact, and safe: what is logged may have another precision
in a worker that has nothing to log, and Gloo ends a process that receives another number of bytes."""


class SumTensor:
    """Sum of a tensor over the members.

    Args:
        tensor: This worker's.
        call: Purpose of the collective.
    """

    def __init__(self, tensor: Tensor, call: str = "") -> None:
        self.call = call
        self._input = tensor.detach()
        self.total = torch.empty_like(self._input, memory_format=torch.contiguous_format)

    def run(self, group: Group, view: View) -> None:
        """Sum the input, of which a copy was kept."""
        self.total.copy_(self._input)
        group.all_reduce(self.total, self.call).wait()

    def describe(self) -> bytes:
        """Nothing to describe."""
        return b""

    def result(self, header: bytes | None) -> Sequence[Any]:
        """The sum."""
        return [self.total]


class FirstRankValues(operations.FirstRank):
    """Broadcasts tensors of rank 0 (the state of a module at the start).

    Args:
        tensors: This worker's.
        session: The worker's session.
    """

    def __init__(self, tensors: Sequence[Tensor], session: Session) -> None:
        super().__init__(session)
        self._tensors = list(tensors)

    def apply(self) -> None:
        """Write rank 0's values into the tensors."""
        for bucket in () if self.equal else self._buckets:
            bucket.write_values()

    def _contents(self) -> Iterator[Any]:
        for tensor in self._tensors:
            yield f"{tensor.dtype} {tuple(tensor.shape)}".encode()
            yield as_bytes(tensor).numpy().data

    def _copy(self, group: Group, *, own: bool) -> None:
        for bucket in self._buckets:
            bucket.fill_values(own=own)
        meeting = group.meet(self.call, self._buffers())
        for pending in [group.all_reduce(bucket.buffer, self.call, meeting) for bucket in self._buckets]:
            pending.wait()

    def _buffers(self) -> Sequence[Any]:
        return [bucket.buffer for bucket in self._buckets]

    @cached_property
    def _buckets(self) -> list[Bucket]:
        return [Bucket(group, num_flags=0, num_buffers=1, like=group[0]) for group in by_kind(self._tensors)]


def gather(session: Session, value: Any, *, what: str = "value", call: str | None = None) -> tuple[list[Any], View]:
    """Every member's value (a plain tree with tensors) in rank order, and the view of these members."""
    return operations.gather(session, value, what=what, call=call, codec=TENSORS)


def reduce(session: Session, tensor: Tensor, op: str, *, call: str = "reduce") -> Tensor:
    """Reduce a tensor: "sum", "mean", "max" or "min" over the members; same shape, floating for a mean.

    Args:
        session: The worker's session.
        tensor: A tensor of the same shape in all members.
        op: How.
        call: Purpose of the collective.
    """
    shape = list(tensor.shape) if tensor.numel() > 1 else "one number"
    call = f"{call}, {op} of {shape}"
    if op in ("sum", "mean"):
        small = tensor.is_floating_point() and tensor.numel() <= _FEW
        operation = SumTensor(tensor.double() if small else tensor, call)
        view = session.run(operation)
        total = operation.total.to(tensor.dtype) if small else operation.total
        return total / view.world_size if op == "mean" else total
    parts, _ = gather(session, tensor, call=call)
    stacked = torch.stack([part.to(tensor.device) for part in parts])
    return stacked.amax(0) if op == "max" else stacked.amin(0)
