"""A default process group that follows the view, for code that calls `torch.distributed`.

`rank()` and `size()` are those of the members that count. A collective is one of the session's (see `peers`): if a
worker is lost, the survivors carry it to its end. It is complete when it returns, even with `async_op=True`. Tensors
may be on any device; they travel through the host, from each member to each, so a gather of `b` bytes costs each member
`n·b`. That is meant for features, statistics and decisions, and not for whole models.

A training step in which a worker is lost is repeated, so nobody sees what became of its collectives. Anywhere else:

* Ranks and size stay as they were: the caller, and torch between the two collectives of `gather_object`, goes on with
  the ranks that it has asked for. The peers say when there are new ones.
* In a gather, the values of a lost rank are those of the first rank that is left. Where lengths are gathered before
  bytes, as torch does with objects, the length of a lost rank becomes that rank's too.
* What a lost rank was to receive, nobody receives.
* What a lost rank was to send, nobody has: the tensors of the others may be memory that was never written to. All
  raise.

There is no group except that of all members, and there are no point-to-point messages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ef_common.errors import UnsupportedError, UsageError

BACKEND = "elasticflow"
_CALL = "torch.distributed."
_ProcessGroup: Any = dist.ProcessGroup  # torch's stub knows its methods as those of one release


class Peers(Protocol):
    """What the group needs from the other members.

    Ranks and size do not change between two calls of these methods if nobody else exchanges anything in between, even
    if members are lost: several calls may be one to their caller.
    """

    @property
    def rank(self) -> int:
        """Rank of this member."""

    @property
    def size(self) -> int:
        """Number of ranks; some of them may be lost."""

    def gather(self, value: Any, call: str) -> Mapping[int, Any]:
        """The value (a plain tree with tensors) of each rank that is not lost. The text says what it is for."""

    def add(self, tensor: Tensor, call: str) -> Tensor:
        """Sum over the members, in a new tensor."""


def install(peers: Peers) -> DefaultGroup | None:
    """Make a group of these peers this process's default group.

    Returns:
        The group; None if there is a default group already, which is left as it is.
    """
    if not dist.is_available() or dist.is_initialized():
        return None
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    hook = sys.excepthook  # torch would write the rank of now before each line of a traceback
    try:
        options: Any = peers
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(BACKEND, store=store, rank=0, world_size=1, pg_options=options)
    finally:
        sys.excepthook = hook
    world = dist.group.WORLD
    return world if isinstance(world, DefaultGroup) else None


def remove(group: DefaultGroup) -> None:
    """Remove the default group, if it is still this one."""
    if dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()


def _create(given: Any, peers: Any) -> DefaultGroup:
    world = dist.group.WORLD
    if peers is None and isinstance(world, DefaultGroup) and given.group_size == world.size():
        peers = world.peers
    if peers is None:
        raise UnsupportedError(
            "torch.distributed.new_group of some of the workers is not possible, as workers come and go. Use the "
            f"default group. Received: a group of {given.group_size}"
        )
    return DefaultGroup(peers, name=str(given.group_id))


class DefaultGroup(_ProcessGroup):  # type: ignore[misc]
    """The group of all members; the module describes it.

    The methods that torch calls have its names, which differ from release to release, and its signatures.
    """

    def __init__(self, peers: Peers, *, name: str) -> None:
        super().__init__(0, 1)
        self.peers = peers
        self._name = name
        self._lengths: Sequence[Tensor] = ()

    @property
    def group_name(self) -> str:
        """The name under which torch finds the group."""
        return self._name

    def rank(self) -> int:
        """Rank of this member."""
        return self.peers.rank

    def size(self) -> int:
        """Number of ranks."""
        return self.peers.size

    def getBackendName(self) -> str:  # noqa: N802
        """The name that torch asks for."""
        return BACKEND

    _get_backend_name = name = getBackendName

    def shutdown(self) -> None:
        """Do nothing: the session lives on."""

    abort = shutdown

    # ------------------------------------------------------------ reductions

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce in place."""
        for tensor in tensors:
            tensor.detach().copy_(self._reduced(tensor, opts, "all_reduce"))
        return _done(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce to one rank; the tensors of the others do not change."""
        reduced = [self._reduced(tensor, opts, "reduce") for tensor in tensors]
        if opts.rootRank == self.rank():
            for tensor, value in zip(tensors, reduced, strict=True):
                tensor.detach().copy_(value)
        return _done(tensors)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """Give each rank its part of a reduction."""
        for output, parts in zip(outputs, inputs, strict=True):
            rank = self.rank()
            reduced = self._reduced(torch.stack(list(parts)), opts, "reduce_scatter")
            output.detach().copy_(reduced[rank])
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """Do the same with one tensor."""
        return self.reduce_scatter([output], [list(source.view(-1, *output.shape).unbind())], opts)

    _reduce_scatter_base = reduce_scatter_single

    def _reduced(self, tensor: Tensor, opts: Any, name: str) -> Tensor:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if op == dist.ReduceOp.SUM:
            return self.peers.add(tensor, f"{_CALL}{name}")
        found = self.peers.gather(tensor, f"{_CALL}{name}")
        each = {id(value): value for value in found.values()}  # a lone worker's stands for all
        values = torch.stack([value.to(tensor.device) for value in each.values()])
        for known, reduce in _REDUCTIONS:
            if op == known:
                return reduce(values)
        raise UnsupportedError(f"unknown reduction. Expected SUM, AVG, MIN, MAX or PRODUCT. Received: {op}")

    # ------------------------------------------------------------ gathers

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Gather the tensors of all members."""
        for places, tensor in zip(outputs, inputs, strict=True):
            self._fill_gathered(places, tensor, self.peers.gather(tensor, f"{_CALL}all_gather"))
        return _done(outputs)

    allgather_coalesced = allgather

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """Do the same, into one tensor."""
        return self.allgather([list(output.view(-1, *source.shape).unbind())], [source])

    _allgather_base = all_gather_single

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Gather the tensors of all members in one rank."""
        for index, tensor in enumerate(inputs):
            values = self.peers.gather(tensor, f"{_CALL}gather")
            if outputs:
                self._fill_gathered(outputs[index], tensor, values)
        return _done(outputs)

    def _fill_gathered(self, places: Sequence[Tensor], tensor: Tensor, values: Mapping[int, Tensor]) -> None:
        _fill(places, values)
        lengths, self._lengths = self._lengths, ()
        if tensor.dtype == torch.uint8 and lengths and tensor.numel() == max(map(int, lengths)):
            _fill_lost(lengths, values)  # whose lengths were still gathered
        if tensor.dtype == torch.int64 and tensor.numel() == 1:
            self._lengths = places

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Send one rank's tensors to all members.

        Raises:
            UnsupportedError: In all members, if there is no such rank any more.
        """
        values = self.peers.gather(list(tensors), f"{_CALL}broadcast")
        sent = values.get(opts.rootRank)
        if sent is None:
            raise _sender_lost("broadcast", opts.rootRank)
        for tensor, value in zip(tensors, sent, strict=True):
            tensor.detach().copy_(value)
        return _done(tensors)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """Give each rank its part of the tensors of one rank.

        Raises:
            UnsupportedError: In all members, if there is no such rank any more.
        """
        rank, root = self.rank(), opts.rootRank
        parts = [list(some) for some in inputs] if rank == root else None
        found = self.peers.gather(parts, f"{_CALL}scatter")
        sent = found.get(root)
        if sent is None:
            raise _sender_lost("scatter", root)
        for output, some in zip(outputs, sent, strict=True):
            output.detach().copy_(some[rank])
        return _done(outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Gather what every member has for this rank."""
        rank = self.rank()
        found = self.peers.gather(list(inputs), f"{_CALL}all_to_all")
        _fill(outputs, {other: parts[rank] for other, parts in found.items()})
        return _done(outputs)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> Any:
        """Do the same with one tensor."""
        return self.alltoall(
            list(torch.split(output, list(output_sizes) or len(output) // self.size())),
            list(torch.split(source, list(input_sizes) or len(source) // self.size())),
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        """Wait for everybody."""
        self.peers.gather(None, f"{_CALL}barrier")
        return _done([])

    # ------------------------------------------------------------ what there is not

    def send(self, *args: Any) -> Any:
        """Point-to-point messages are refused."""
        raise UnsupportedError(
            "torch.distributed.send and recv between two workers are not possible, as workers come and go. Use a "
            "collective, such as all_gather or broadcast"
        )

    recv = recv_anysource = send


_REDUCTIONS: tuple[tuple[Any, Callable[[Tensor], Tensor]], ...] = (
    (dist.ReduceOp.AVG, lambda values: values.sum(0) / len(values)),
    (dist.ReduceOp.MIN, lambda values: values.amin(0)),
    (dist.ReduceOp.MAX, lambda values: values.amax(0)),
    (dist.ReduceOp.PRODUCT, lambda values: values.prod(0)),
)


def _fill(places: Sequence[Tensor], values: Mapping[int, Tensor]) -> None:
    if max(values) >= len(places):
        raise UsageError(f"expected a tensor for each worker. Received: {len(places)} for {max(values) + 1} workers")
    for rank, value in values.items():
        places[rank].detach().copy_(value)
    _fill_lost(places, values)


def _fill_lost(places: Sequence[Tensor], values: Mapping[int, Tensor]) -> None:
    first = places[min(values)]
    for rank, place in enumerate(places):
        if rank not in values:
            place.detach().copy_(first)


def _sender_lost(name: str, rank: int) -> UnsupportedError:
    return UnsupportedError(
        f"the tensors that torch.distributed.{name} was to send are lost, as the worker of their rank is. All workers "
        "that are left raise this. Use trainer.strategy.broadcast, to which each worker brings a value, or compute in "
        f"all workers what this one has computed. Received: rank {rank}"
    )


def _done(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    create: Any = getattr(torch._C, "_distributed_c10d")._create_work_from_future  # noqa: B009
    return create(future)
