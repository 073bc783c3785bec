"""Flat buffers for a module's gradients and buffers, and the place of each tensor in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ef_common.collectives.gradients.sparse import check_dense

ONE_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
DOUBLE_BUFFER_BYTES = 1 << 20
LARGE_GRADIENT_BYTES = 1 << 16  # is copied as soon as it is ready, while it is in the processor's cache
# Change pending, stale, skipped, wants to stop, wish, lacking weight, squared norm, asked batch, finds.
NUM_FIXED_FLAGS = 9


class Bucket:
    """A flat buffer, and the tensors whose copies it holds.

    Args:
        sources: Parameters or buffers, in the order in which they lie in the buffer.
        num_flags: Number of flags at the end.
        num_buffers: Two if they alternate, else one.
    """

    def __init__(self, sources: Sequence[Tensor], *, num_flags: int, num_buffers: int, like: Tensor) -> None:
        self.sources = list(sources)
        numel = max(1, sum(source.numel() for source in sources) + num_flags)
        self._buffers = [_touched(numel, like) for _ in range(num_buffers)]
        self._views = [self._split(buffer) for buffer in self._buffers]
        self._flags = [buffer[numel - num_flags :] for buffer in self._buffers]
        self._turn = 0

    def _split(self, buffer: Tensor) -> list[Tensor]:
        views, offset = [], 0
        for source in self.sources:
            stride = source.stride() if _is_dense(source) else torch.empty(source.shape, device="meta").stride()
            views.append(buffer.as_strided(source.shape, stride, offset))
            offset += source.numel()
        return views

    def next_turn(self) -> None:
        """Go on to the other buffer, so that the last result stays intact."""
        self._turn = (self._turn + 1) % len(self._buffers)

    @property
    def buffer(self) -> Tensor:
        """The buffer of this turn."""
        return self._buffers[self._turn]

    @property
    def views(self) -> list[Tensor]:
        """The parts of the buffer, in the shapes of the sources."""
        return self._views[self._turn]

    @property
    def flags(self) -> Tensor:
        """The flags at the end of the buffer."""
        return self._flags[self._turn]

    def fill_gradients(self, weight: float, ready: AbstractSet[int] = frozenset()) -> None:
        """Copy the weighted local gradients in; zeros where there is none. Flags are to be written after it.

        Args:
            weight: Factor. Zero marks a padded batch, whose gradient may be anything, NaN too.
            ready: Identities of the sources whose gradients have been copied already.
        """
        targets, gradients = [], []
        for source, view in zip(self.sources, self.views, strict=True):
            if source.grad is None or not weight:
                view.zero_()
            elif id(source) not in ready:
                targets.append(view)
                gradients.append(source.grad)
        if targets:
            torch._foreach_copy_(targets, gradients)
            torch._foreach_mul_(targets, weight)

    def fill_values(self, *, own: bool) -> None:
        """Copy the values in on the rank whose values count, zeros elsewhere."""
        for source, view in zip(self.sources, self.views, strict=True):
            if own:
                view.copy_(source)
            else:
                view.fill_(-0.0)  # with which a sum has the same bits

    def write_values(self, *, spares_equal: bool = False) -> None:
        """Copy the values out again.

        Args:
            spares_equal: Leave sources alone that have these values. To autograd, what is written to has changed.
        """
        if not spares_equal:
            torch._foreach_copy_(self.sources, self.views)
            return
        for source, view in zip(self.sources, self.views, strict=True):
            if not torch.equal(bits(source), bits(view.to(source.dtype))):
                source.copy_(view)


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors that can lie in one bucket: those of one type on one device."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """A tensor as integers, among which the two zeros differ and everything is equal to itself."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kind = _INTEGERS.get(parts.element_size()) if parts.is_floating_point() else None
    return parts if kind is None else parts.view(kind)


def _touched(numel: int, like: Tensor) -> Tensor:
    """Zeros that can be summed, whose memory is allocated at once, and not on the first write."""
    dtype = torch.uint8 if like.dtype == torch.bool else like.dtype
    return torch.empty(numel, dtype=dtype, device=like.device).zero_()


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps and overlaps, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class BucketLayout:
    """Which tensor lies in which bucket: gradients in backward order, the module's buffers before the last of these.

    A backward pass may change buffers, so theirs are filled after it, as is the last bucket.

    Args:
        parameters: Parameters whose gradients are reduced.
        module_buffers: Buffers that take rank 0's values.
        sparse: Identities of the parameters whose gradients are sparse.
        num_more_flags: Flags besides the fixed ones and those of the parameters.

    Attributes:
        value_buckets: Indices of the buckets that hold buffers of the module.
        double_buffered: The buckets alternate between two buffers; else a barrier has to follow each reduction.
        retired: Local gradients that have been reduced.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        module_buffers: Sequence[Tensor],
        sparse: AbstractSet[int] = frozenset(),
        *,
        num_more_flags: int = 0,
    ) -> None:
        self.parameters = list(parameters)
        self.sparse = [parameter for parameter in self.parameters if id(parameter) in sparse]
        self.ids = [id(parameter) for parameter in self.parameters]
        values = by_kind(module_buffers)
        gradients = _group_by_size(self.parameters)
        num_flags = NUM_FIXED_FLAGS + num_more_flags + len(self.parameters)
        if not gradients or gradients[-1][0].dtype != torch.float32:
            gradients.append([])  # for the flags alone
        self.value_buckets = range(len(gradients) - 1, len(gradients) - 1 + len(values))
        groups = [*gradients[:-1], *values, gradients[-1]]
        self.double_buffered = sum(tensor.nbytes for group in groups for tensor in group) <= DOUBLE_BUFFER_BYTES
        self.buckets: list[Bucket] = []
        for index, group in enumerate(groups):
            like = group[0] if group else torch.empty(0, dtype=torch.float32, device=self.parameters[0].device)
            last = index == len(groups) - 1
            self.buckets.append(
                Bucket(group, num_flags=num_flags * last, num_buffers=2 if self.double_buffered else 1, like=like)
            )
        self.retired: list[Tensor | None] = []
        self._is_checked = False
        # Index of the bucket of each parameter, and its place there.
        self.place_of = {
            id(source): (index, place)
            for index, bucket in enumerate(self.buckets)
            if index not in self.value_buckets
            for place, source in enumerate(bucket.sources)
        }

    def hooked(self) -> list[Parameter]:
        """Parameters whose gradients must be reported when they are ready.

        The last bucket is filled after the backward pass, but for what is large.
        """
        last = len(self.buckets) - 1
        return [p for p in self.parameters if self.place_of[id(p)][0] < last or is_copied_early(p)]

    def follow_buffers(self, module_buffers: Sequence[Tensor]) -> None:
        """The module has these buffers now: as many, in the same order, and each of the same type and shape."""
        for index, group in zip(self.value_buckets, by_kind(module_buffers), strict=True):
            self.buckets[index].sources = group

    def check_first_gradients(self) -> None:
        """Refuse, in a world of one, gradients that cannot be reduced; once, because it takes time.

        Raises:
            UnsupportedError: A sparse gradient of a parameter that is to have none.
        """
        if not self._is_checked:
            self._is_checked, sparse = True, {id(parameter) for parameter in self.sparse}
            check_dense(parameter for parameter in self.parameters if id(parameter) not in sparse)

    def own_gradients(self) -> None:
        """Before new gradients are added, move every `param.grad` out of the buckets."""
        self.retired.clear()
        for index, bucket in enumerate(self.buckets):
            if index in self.value_buckets:
                continue
            for parameter, view in zip(bucket.sources, bucket.views, strict=True):
                gradient = parameter.grad
                if gradient is not None and not gradient.is_sparse and gradient.data_ptr() == view.data_ptr():
                    parameter.grad = gradient.clone()


def is_copied_early(parameter: Tensor) -> bool:
    """Whether the hook copies the gradient; small ones are copied with their bucket, in fewer calls."""
    return parameter.nbytes >= LARGE_GRADIENT_BYTES


def _group_by_size(parameters: Sequence[Parameter]) -> list[list[Tensor]]:
    """Gradients become ready from the last parameter to the first; a bucket holds one type on one device.

    Few buckets of equal size: each costs a message, and the last one cannot overlap the backward pass.
    """
    total = sum(parameter.nbytes for parameter in parameters)
    capacity = total / max(1 if total <= ONE_BUCKET_BYTES else 2, -(-total // BUCKET_BYTES))
    groups: list[list[Tensor]] = []
    filled, key = 0, None
    for parameter in reversed(parameters):
        if not groups or filled >= capacity or (parameter.dtype, parameter.device) != key:
            filled, key = 0, (parameter.dtype, parameter.device)
            groups.append([])
        groups[-1].append(parameter)
        filled += parameter.nbytes
    return groups
