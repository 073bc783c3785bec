"""Gradient reduction in buckets, overlapping the backward pass, that can be run again after a loss.

The local gradient of a parameter stays in `param.grad` until the reduction has completed; buckets hold scaled
copies of it, which are summed in place. So a reduction that a loss interrupts is run again from the local
gradients with the weights of the members that are left, without another forward or backward.

A completed result must stay intact until every member has it (it may have to be handed on). The buckets of a
small module have two buffers in turn: whoever begins the next reduction but one has completed the next one, which
every member has begun. A larger module is spared the memory: a barrier follows its reduction, and `param.grad`
becomes a view of the bucket, without a copy. Its own memory is let go of when the next backward pass is about to
want it: earlier, the allocator would hand it back to the system, and get it again page by page.

The last bucket ends with flags, each summed over the members: "I know of a pending change", "a gradient was
accumulated twice, so the overlapped copy is stale", "I had no backward pass in this step", and one per
parameter, "it has a gradient here".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ef_common.core.view import View
from ef_common.errors import GroupBroken, UsageError
from ef_common.ports import Group, Pending
from ef_common.session import Barrier, LoneGroup, Session

ONE_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
DOUBLE_BUFFER_BYTES = 1 << 20
_LARGE_GRADIENT_BYTES = 1 << 16  # is copied as soon as it is ready, while it is in the processor's cache
_NUM_FIXED_FLAGS = 3  # change pending, stale, skipped

Weights = Callable[[View], Sequence[float]]
"""Weight of each member's gradient in rank order; they sum to one."""


class Bucket:
    """A flat buffer, and the tensors whose copies it holds.

    Args:
        sources: Parameters or buffers, in the order in which they lie in the buffer.
        num_flags: Room for so many flags at the end.
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
        """Its parts, in the shapes of the sources."""
        return self._views[self._turn]

    @property
    def flags(self) -> Tensor:
        """The flags at its end."""
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
                view.zero_()


def _touched(numel: int, like: Tensor) -> Tensor:
    """Zeros whose memory is there already, not only from the first time on that it is written to."""
    return torch.empty(numel, dtype=like.dtype, device=like.device).zero_()


def _is_dense(tensor: Tensor) -> bool:
    """Whether it fills its memory without gaps and without overlaps, in whatever order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class Layout:
    """Which tensor lies in which bucket: buffers of the module first, then gradients in backward order.

    Attributes:
        double_buffered: The buckets alternate between two buffers; else a barrier has to follow each reduction.
        retired: Local gradients that have been reduced.
    """

    def __init__(self, parameters: Sequence[Parameter], module_buffers: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.ids = [id(parameter) for parameter in self.parameters]
        values: dict[Any, list[Tensor]] = {}
        for buffer in module_buffers:
            values.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        groups: list[list[Tensor]] = list(values.values())
        gradients = _group_by_size(self.parameters)
        self.num_value_buckets = len(groups)
        groups += gradients
        num_flags = _NUM_FIXED_FLAGS + len(self.parameters)
        needs_own = len(groups) == self.num_value_buckets or groups[-1][0].dtype != torch.float32
        if needs_own:
            groups.append([])
        self.double_buffered = sum(tensor.nbytes for group in groups for tensor in group) <= DOUBLE_BUFFER_BYTES
        self.buckets: list[Bucket] = []
        for index, group in enumerate(groups):
            like = group[0] if group else torch.empty(0, device=self.parameters[0].device)
            if like.dtype == torch.bool:
                like = like.to(torch.uint8)
            last = index == len(groups) - 1
            self.buckets.append(
                Bucket(group, num_flags=num_flags * last, num_buffers=2 if self.double_buffered else 1, like=like)
            )
        self.retired: list[Tensor | None] = []
        # Index of the bucket of each parameter, and its place there.
        self.place_of = {
            id(source): (index, place)
            for index in range(self.num_value_buckets, len(self.buckets))
            for place, source in enumerate(self.buckets[index].sources)
        }

    def hooked(self) -> list[Parameter]:
        """Parameters of which it must be known when their gradient is ready.

        The last bucket is filled after the backward pass, but for what is large.
        """
        last = len(self.buckets) - 1
        return [p for p in self.parameters if self.place_of[id(p)][0] < last or _is_copied_early(p)]

    def own_gradients(self) -> None:
        """Before new gradients are added: let no `param.grad` lie in a bucket any more."""
        self.retired.clear()
        for bucket in self.buckets[self.num_value_buckets :]:
            for parameter, view in zip(bucket.sources, bucket.views, strict=True):
                gradient = parameter.grad
                if gradient is not None and gradient.data_ptr() == view.data_ptr():
                    parameter.grad = gradient.clone()


def _is_copied_early(parameter: Tensor) -> bool:
    return parameter.nbytes >= _LARGE_GRADIENT_BYTES


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


class Reduction:
    """One gradient reduction: an operation of the session. See the module for what it keeps and when."""

    def __init__(self, layout: Layout, session: Session, weights: Weights) -> None:
        self.layout = layout
        self.stale = False
        self.skipped = False
        self.num_skipped = 0.0
        self._flags: list[float] = []
        self._session = session
        self._weights = weights
        self._group: Group | None = None
        self._pending: list[Pending] = []
        self._missing = [len(bucket.sources) for bucket in layout.buckets]
        self._fired: set[int] = set()
        self._copied: set[int] = set()
        self._weight = 1.0
        self._rank = 0
        for bucket in layout.buckets:
            bucket.next_turn()
        self._tensors = [bucket.buffer for bucket in layout.buckets]

    # ------------------------------------------------------------ during the backward pass

    def start(self) -> None:
        """Begin to reduce on the session's group what is ready: the module's buffers."""
        self._bind(self._session.group, self._session.view)
        self._try_issue(self.layout.num_value_buckets)

    def gradient_ready(self, parameter: Tensor) -> None:
        """The gradient of a parameter is complete (a hook during the backward pass; it must never raise)."""
        if id(parameter) in self._fired:
            # Once more (reentrant checkpointing): its bucket may be under way with half of the gradient.
            self.stale = True
            return
        self._fired.add(id(parameter))
        index, place = self.layout.place_of[id(parameter)]
        if self._group is not None and self._weight and _is_copied_early(parameter):
            torch.mul(parameter.grad, self._weight, out=self.layout.buckets[index].views[place])  # type: ignore[arg-type]
            self._copied.add(id(parameter))
        self._missing[index] -= 1
        if self._missing[index] == 0:
            upto = len(self._pending)
            while upto < len(self.layout.buckets) - 1 and self._missing[upto] <= 0:
                upto += 1
            self._try_issue(upto)

    def _try_issue(self, upto: int) -> None:
        if self._group is None:
            return
        try:
            self._issue(upto)
        except GroupBroken:
            self._group = None  # `run` starts over, after recovery

    # ------------------------------------------------------------ operation of the session

    def run(self, group: Group, view: View) -> None:
        """Reduce everything with the members of `view`; see :class:`~ef_common.session.Operation`."""
        if isinstance(group, LoneGroup):
            self._write_flags()
            return
        if self._group is not group:
            self._bind(group, view)
        self._finish()
        if self.layout.buckets[-1].flags[1].item() > 0:
            # Somebody's overlapped copies were stale: all reduce again, from the complete gradients.
            self._bind(group, view)
            self.stale = False
            self._finish()

    def describe(self) -> bytes:
        """The layout is the same everywhere, so the buffers say it all."""
        return b""

    def result(self, header: bytes | None) -> Sequence[Tensor]:
        """The buffers of this reduction."""
        return self._tensors

    def _bind(self, group: Group, view: View) -> None:
        self._group = group
        self._rank = view.rank_of(self._session.worker.id) or 0
        self._weight = self._weights(view)[self._rank]
        self._pending = []
        self._copied = set()

    def _finish(self) -> None:
        self._issue(len(self.layout.buckets))
        for pending in self._pending:
            pending.wait()

    def _write_flags(self) -> None:
        flags = [float(self._session.change_pending), float(self.stale), float(self.skipped)]
        flags += [float(p.grad is not None) for p in self.layout.parameters]
        self.layout.buckets[-1].flags.copy_(torch.tensor(flags))

    def _issue(self, upto: int) -> None:
        if self._group is None:
            raise GroupBroken("not bound to a group")
        while len(self._pending) < upto:
            index = len(self._pending)
            bucket = self.layout.buckets[index]
            if index < self.layout.num_value_buckets:
                bucket.fill_values(own=self._rank == 0)
            else:
                self._fill_gradients(bucket)
            self._pending.append(self._group.all_reduce(bucket.buffer))

    def _fill_gradients(self, bucket: Bucket) -> None:
        bucket.fill_gradients(self._weight, self._copied)
        if bucket is self.layout.buckets[-1]:
            self._write_flags()

    # ------------------------------------------------------------ result

    def read_flags(self) -> float:
        """Take in the members' flags. Returns how many know of a pending change."""
        self._flags = self.layout.buckets[-1].flags.tolist()
        self.num_skipped = self._flags[2]
        return float(self._flags[0])

    def apply(self) -> None:
        """Put the reduced gradients into `param.grad` and the buffers into the module; after `read_flags`."""
        used = dict(zip(self.layout.ids, self._flags[_NUM_FIXED_FLAGS:], strict=True))
        for index, bucket in enumerate(self.layout.buckets):
            if index < self.layout.num_value_buckets:
                torch._foreach_copy_(bucket.sources, bucket.views)
            elif self.layout.double_buffered:
                _copy_gradients(bucket, used)
            else:
                self.layout.retired += [source.grad for source in bucket.sources]
                _lend_gradients(bucket, used)


def _copy_gradients(bucket: Bucket, used: dict[int, float]) -> None:
    targets, values = [], []
    for parameter, view in zip(bucket.sources, bucket.views, strict=True):
        if parameter.grad is not None:
            targets.append(parameter.grad)
            values.append(view)
        elif used[id(parameter)] > 0:
            parameter.grad = view.clone()
    if targets:
        torch._foreach_copy_(targets, values)


def _lend_gradients(bucket: Bucket, used: dict[int, float]) -> None:
    for parameter, view in zip(bucket.sources, bucket.views, strict=True):
        if used[id(parameter)] > 0:
            parameter.grad = view


class Confirmation(Barrier):
    """A barrier that may be on its way before the session runs it."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._pending: Pending | None = None

    def start(self, group: Group) -> None:
        """Begin."""
        with suppress(GroupBroken):  # `run` starts over, after recovery
            self._begin(group)

    def run(self, group: Group, view: View) -> None:
        """Wait for everybody."""
        pending = self._pending if self._group is group else None
        # Begun here or earlier, it is the same message: others may have begun it on this group already.
        (pending or self._begin(group)).wait()

    def _begin(self, group: Group) -> Pending:
        self._pending = group.all_reduce(torch.zeros(1))
        self._group = group
        return self._pending


def _hook(parameter: Parameter, act: Callable[[Tensor], None]) -> Any:
    return parameter.register_post_accumulate_grad_hook(act)  # type: ignore[no-untyped-call]


class Inventory:
    """Notices that a module has got another parameter, or one that begins to require a gradient.

    It is asked before each backward pass, and `module.parameters()` would take longer than all else there.
    """

    def __init__(self, module: Module) -> None:
        modules = list(module.modules())
        self._sizes = [(d, len(d)) for m in modules for d in (m._parameters, m._modules)]
        self._parameters = [(m._parameters, name, p) for m in modules for name, p in m._parameters.items()]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]

    def changed(self) -> bool:
        """Whether it is so. A change of anything else may count as one too."""
        for entries, size in self._sizes:
            if len(entries) != size:
                return True
        for entries, name, parameter in self._parameters:
            if entries.get(name) is not parameter:
                return True
        return any(parameter.requires_grad for parameter in self._frozen)


class GradientReducer:
    """Keeps gradients, and the module's buffers, equal over the members of a session.

    Args:
        session: The worker's session.
        module: Its parameters are reduced; one that begins to require a gradient later is taken in then.
        weights: Weight of each member of a view, asked for at the start of each reduction and after a loss.
    """

    def __init__(self, session: Session, module: Module, *, weights: Weights) -> None:
        self._session = session
        self._module = module
        self._weights = weights
        self._layout: Layout | None = None
        self._handles: list[Any] = []
        self._reduction: Reduction | None = None
        self._inventory: Inventory | None = None

    def attach(self, names: Sequence[str] | None = None) -> None:
        """Hook into the parameters that require a gradient, or into those named; the same in every member."""
        if names is None:
            self._rebuild(p for p in self._module.parameters() if p.requires_grad)
        elif list(names) != self.names():
            chosen = set(names)
            self._rebuild(p for name, p in self._module.named_parameters() if name in chosen)

    def names(self) -> list[str]:
        """Names of the parameters whose gradients are reduced."""
        known = set() if self._layout is None else self._layout.place_of.keys()
        return [name for name, p in self._module.named_parameters() if id(p) in known]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._reduction = None

    def _rebuild(self, parameters: Iterable[Parameter]) -> None:
        self.detach()
        self._inventory = None
        chosen = list(parameters)
        if not chosen:
            self._layout = None
            return
        self._layout = Layout(chosen, list(self._module.buffers()))
        self._handles = [_hook(p, self._gradient_ready) for p in self._layout.hooked()]

    def _gradient_ready(self, parameter: Tensor) -> None:
        if self._reduction is not None:
            self._reduction.gradient_ready(parameter)

    def before_backward(self) -> None:
        """Call before a backward pass whose gradients are to be reduced."""
        self._take_in_new()
        if self._layout is None:
            return
        if not self._layout.double_buffered:
            self._layout.own_gradients()
        self._reduction = Reduction(self._layout, self._session, self._weights)
        if self._session.world_size > 1:
            self._reduction.start()

    def after_backward(self) -> View | None:
        """Call after it. Gradients are then the weighted mean over the members.

        Returns:
            The view whose members contributed; None if there was nothing to reduce.

        Raises:
            UsageError: In all members, if some but not all of them have skipped the step.
        """
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return None
        contributors = self._session.run(reduction)
        confirmation = Confirmation()
        is_lent = contributors.world_size > 1 and not reduction.layout.double_buffered
        if is_lent:
            confirmation.start(self._session.group)
        self._session.agree(reduction.read_flags())
        if 0 < reduction.num_skipped < contributors.world_size:
            raise UsageError(
                "some workers had a backward pass in this step and others had none, so they would not make the "
                "same update. Skip a batch in all workers or in none; a loss of zero has no effect. "
                f"Received: {reduction.num_skipped:g} of {contributors.world_size} workers without"
            )
        if contributors.world_size > 1:
            if is_lent:
                self._session.run(confirmation)  # everybody has the result: the buckets may be changed
            reduction.apply()
        return contributors

    def skip(self) -> View | None:
        """Take part in the reduction of a step without a backward pass, instead of the two calls around it."""
        self.before_backward()
        if self._reduction is not None:
            self._reduction.skipped = True
        return self.after_backward()

    def _take_in_new(self) -> None:
        if self._inventory is not None and not self._inventory.changed():
            return
        known = set() if self._layout is None else self._layout.place_of
        fresh = [p for p in self._module.parameters() if p.requires_grad and id(p) not in known]
        if not fresh:
            self._inventory = Inventory(self._module)
            return
        if self._layout is not None:
            self._session.run(Barrier())  # the last result must not be needed any more
        taken = {id(p) for p in fresh} | set(known)
        self._rebuild(p for p in self._module.parameters() if id(p) in taken)
