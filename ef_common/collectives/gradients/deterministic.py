"""Gradients and buffers of a torch module with the same bits for every number of workers.

Each piece of a global batch has its own backward pass. It starts from the buffers that the step began with, and what
comes out of it is kept apart from that of all others; see :mod:`ef_common.collectives.gradients.canonical`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ef_common.collectives.gradients.buckets import bits
from ef_common.collectives.gradients.canonical import CanonicalReduction
from ef_common.collectives.gradients.module_buffers import ModuleBuffers
from ef_common.collectives.gradients.pieces import Pieces
from ef_common.collectives.gradients.reducer import hook
from ef_common.collectives.gradients.shared import Array, SumMemory
from ef_common.collectives.gradients.sparse import sparse_parameters, sparsify
from ef_common.core.view import View
from ef_common.session import Session

_NUM_FIXED_FLAGS = 3  # change pending, wish, stop


class DeterministicReducer:
    """Sums the gradients of a module, and averages its buffers, over the pieces of global batches.

    The backward pass adds gradients where they are summed: `param.grad` is a part of the memory of the piece. Sums have
    single precision, or double if a tensor has. A buffer that no pass has changed keeps its bits, and of integers the
    mean of the changes is added, so those of large ones are exact.

    Args:
        session: The worker's session.
        module: Its parameters that require a gradient when a step begins are reduced.

    Attributes:
        wants_stop: Above 0 if this worker wants all to interrupt the training after the next reduction.
        num_stops: Sum of the members' `wants_stop` in the newest reduction.
        finds, num_finds: As in a `GradientReducer`; nobody finds anything in data whose positions are known.
        decides, decided: As in a `GradientReducer`; before the first step.
    """

    def __init__(self, session: Session, module: Module) -> None:
        self._session = session
        self._module = module
        self._parameters: list[Parameter] = []
        self._sparse: set[int] = set()
        self._places: ModuleBuffers | None = None
        self._buffers: list[Tensor] = []
        self._sizes: list[int] = []
        self._room: SumMemory | None = None
        self._parts: dict[int, list[tuple[Tensor, Tensor]]] = {}  # of arrays that live as long as the room
        self._gradients = torch.zeros(0, device="cpu")
        self._starts: list[Tensor] = []
        self._used: set[int] = set()
        self._handles: list[Any] = []
        self._array: Array | None = None
        self._reduction: CanonicalReduction | None = None
        self.wants_stop = 0.0
        self.num_stops = 0.0
        self.finds = False
        self.num_finds = 0.0
        self.decides: Callable[[], Sequence[float]] = tuple
        self.decided: list[float] = []
        self._num_decided = 0

    def begin(self, pieces: Pieces) -> None:
        """A step on this global batch begins."""
        room = self._prepare()
        self._take_back()
        self._starts = [buffer.detach().clone() for buffer in self._buffers]
        self._used = set()
        self._reduction = CanonicalReduction(room, self._session, pieces, self._flags)
        self._reduction.start()

    def before_pass(self) -> None:
        """Before the forward pass of a piece, reset the buffers to the start of the step."""
        self._take_back()
        with torch.no_grad():
            for buffer, start in zip(self._buffers, self._starts, strict=True):
                buffer.copy_(start)

    def before_backward(self) -> None:
        """Before the backward pass of a piece, whose loss is its part of the batch's."""
        if self._room is None:
            return
        self._array = self._room.take()
        self._array.fill(0)
        for source, view in self._split(self._array):
            if isinstance(source, Parameter):
                source.grad = view if _fits(source, view) else None

    def after_pass(self, piece: int, share: float) -> None:
        """After the backward pass, take the gradients of this piece, which is this part of the batch."""
        array, self._array = self._array, None
        self._take_back()
        if array is None or self._reduction is None:
            return
        starts = iter(self._starts)
        with torch.no_grad():
            for source, view in self._split(array):
                if isinstance(source, Parameter):
                    if source.grad is not None and not _fits(source, view):
                        view.copy_(source.grad)
                    continue
                start = next(starts)
                if not torch.equal(bits(source), bits(start)):
                    self._used.add(id(source))
                if _is_integer(source):
                    view.copy_(source.long() - start.long()).mul_(share)
                else:
                    torch.mul(source, share, out=view) if _fits(source, view) else view.copy_(source).mul_(share)
        self.drop()
        self._reduction.insert(piece, array)

    def _take_back(self) -> None:
        """The module's code may have put other tensors in the place of its buffers."""
        if self._places is not None:
            self._places.take_back()

    def drop(self) -> None:
        """Discard the gradients, whatever they are."""
        for parameter in self._parameters:
            parameter.grad = None

    def finish(self) -> View:
        """Reduce. Gradients are then the mean over the batch, and buffers the mean over its pieces.

        Returns:
            The view whose members contributed.
        """
        reduction = self._reduction
        if reduction is None:
            return self._session.completed_in
        contributors = self._session.run(reduction)
        self._take_back()  # of a pass that only kept step
        changes, wishes, self.num_stops, *others = reduction.flags.tolist()
        self.decided, used = others[: self._num_decided], others[self._num_decided :]
        self._session.agree(changes, wishes)
        starts = dict(zip(map(id, self._buffers), self._starts, strict=True))
        with torch.no_grad():
            # The sum must stay as it is, for one that lacks it; what is done to gradients now is the user's.
            self._gradients.copy_(torch.from_numpy(reduction.total))
            for index, (target, view) in enumerate(self._split(self._gradients)):
                if isinstance(target, Parameter):
                    if used[index]:
                        target.grad = view if _fits(target, view) else view.to(target.device, target.dtype)
                elif not used[index]:
                    target.copy_(starts[id(target)])  # a pass that only kept step may have changed it
                elif _is_integer(target):
                    target.copy_(starts[id(target)].long() + view.round().to(target.device).long())
                else:
                    target.copy_(view)
        sparsify(parameter for parameter in self._parameters if id(parameter) in self._sparse)
        reduction.finish()
        self._reduction = None
        return contributors

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _flags(self) -> Sequence[float]:
        used = [float(id(tensor) in self._used) for tensor in (*self._parameters, *self._buffers)]
        fixed = [float(self._session.change_pending), float(self._session.agreements.wish), self.wants_stop]
        is_first = self._reduction is None or self._reduction.rank == 0  # whose numbers are taken
        return [*fixed, *(self.decides() if is_first else [0.0] * self._num_decided), *used]

    def _gradient_ready(self, parameter: Tensor) -> None:
        self._used.add(id(parameter))

    def _prepare(self) -> SumMemory:
        """Examine the module, if it has changed."""
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        if self._room is None or [id(p) for p in parameters] != [id(p) for p in self._parameters]:
            self.detach()
            self._parts = {}
            self._parameters = parameters
            self._sparse = sparse_parameters(self._module)
            self._places = ModuleBuffers(self._module)
            self._buffers = self._places.tensors
            self._handles = [hook(parameter, self._gradient_ready) for parameter in parameters]
            tensors = (*self._parameters, *self._buffers)
            self._sizes = [_num_reals(tensor) for tensor in tensors]
            is_double = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in tensors)
            dtype = torch.float64 if is_double else torch.float32
            self._gradients = torch.zeros(sum(self._sizes), dtype=dtype, device="cpu")
            self._num_decided = len(self.decides())
            num_flags = _NUM_FIXED_FLAGS + self._num_decided + len(tensors)
            self._room = SumMemory(sum(self._sizes), num_flags=num_flags, dtype=self._gradients.numpy().dtype)
        return self._room

    def _split(self, flat: Tensor | Array) -> list[tuple[Tensor, Tensor]]:
        """Assign each parameter and buffer its part of a few flat arrays, which are reused."""
        found = self._parts.get(id(flat))
        if found is None:
            sources = (*self._parameters, *self._buffers)
            parts = torch.split(torch.as_tensor(flat, device="cpu"), self._sizes)
            found = [(source, _shaped(part, source)) for source, part in zip(sources, parts, strict=True)]
            self._parts[id(flat)] = found
        return found


def _num_reals(tensor: Tensor) -> int:
    """Numbers in a flat array for a tensor: an even number of them, so that a complex one may follow."""
    return 2 * (tensor.numel() if tensor.is_complex() else -(-tensor.numel() // 2))


def _shaped(part: Tensor, like: Tensor) -> Tensor:
    """A part of a flat array in the shape of its tensor."""
    if like.is_complex():
        return torch.view_as_complex(part.view(*like.shape, 2))
    return part[: like.numel()].view(like.shape)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _fits(tensor: Tensor, view: Tensor) -> bool:
    """Whether a part of the memory can hold the tensor, or its gradient."""
    return tensor.dtype == view.dtype and tensor.device == view.device
