"""The ports: what the session needs from its environment, and what a plugin provides.

Each has a real adapter, and an in-memory one for the simulator:

================  ====================================  ================================
`ControlChannel`  `ef_common.control.client`            the control connection
`GroupFactory`    `ef_common.collectives.torch_group`   the data plane
`Operation`       `ef_common.collectives`               one collective that can be run again
`State`           the plugin of a framework             what a newcomer receives
================  ====================================  ================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ef_common.core.room import Room
from ef_common.core.view import View
from ef_common.core.watermark import Watermark

GetClaim = Callable[[str, tuple[str, ...]], tuple[str, ...]]
"""Creates a claim in a store: (its name, ids of those for whom it is) → ids of those whom it names."""


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Block until it is complete; the result is then in the tensor.

        Raises:
            GroupBroken: A member is gone, or the group was aborted.
        """


class Meeting(Protocol):
    """Members tell each other which call they are in."""

    def wait(self) -> None:
        """Block until all members have told their calls.

        Raises:
            CallMismatch: The members are in different calls.
            GroupBroken: A member is gone, or the group was aborted.
        """


class Group(Protocol):
    """The process group of one view.

    Every member must call the same collectives in the same order. A `call` says in a few words what a collective is
    for. Where members meet with different calls, or with sums of different sizes, all raise `CallMismatch`, at the
    first such collective. Each raises `GroupBroken`, and nothing else, when communication fails. After either, the
    group is good for nothing but `abort`, and all else raises again. A tensor is whatever the adapter's framework calls
    one, or a C-contiguous NumPy array; it must be contiguous. `send` and `receive` take bytearrays, too.
    """

    def meet(self, call: str, tensors: Sequence[Any] | None = None) -> Meeting:
        """Start to compare the calls of the members.

        Args:
            call: Call of this member.
            tensors: What it is about to sum in it, if that is all that it does. Small sums tell the call themselves,
                so nothing is sent if all are small. Large ones begin only when all are known to be in one call;
                whoever meets in time need not wait for that.
        """

    def all_reduce(self, tensor: Any, call: str = "", meeting: Meeting | None = None) -> Pending:
        """Start to sum `tensor` over the members, in place; bit for bit equal in all of them.

        Args:
            tensor: The tensor to sum.
            call: Purpose of the sum.
            meeting: Meeting of this call. Without one, a large sum has its own, and earlier ones may have to
                begin first, which waits for the others.
        """

    def all_gather(self, payload: bytes, call: str = "") -> list[bytes]:
        """Exchange small payloads; returns those of all members, in rank order. Completes only if all enter."""

    def send(self, tensors: Sequence[Any], target: int) -> None:
        """Send tensors to one rank."""

    def receive(self, tensors: Sequence[Any], source: int, target: int | None = None) -> None:
        """Receive tensors of the same shapes and types from one rank, in place.

        Args:
            tensors: Where they are received.
            source: The rank that sends them.
            target: A rank to which they are passed on as they arrive, and which receives them in the same way.
        """

    def abort(self) -> None:
        """End the group, from any thread: operations in flight raise `GroupBroken` at once. May be repeated."""


class Bootstrap(Protocol):
    """Small values (usually addresses) that members of one view exchange to find each other."""

    def put(self, key: str, value: bytes) -> None:
        """Publish a value to the members of the view."""

    def get(self, key: str) -> bytes:
        """Wait for a value that a member publishes.

        Raises:
            GroupBroken: The view has been replaced meanwhile.
        """

    def replaced(self) -> bool:
        """Whether a newer view is known or none can come any more, so that building this group is useless."""


class GroupFactory(Protocol):
    """Builds the group of a view."""

    def build(self, view: View, *, rank: int, bootstrap: Bootstrap) -> Group:
        """Connect to the other members.

        Raises:
            GroupBroken: A member could not be reached, or the view has been replaced meanwhile.
        """


class ControlChannel(Protocol):
    """A worker's connection to the coordinator. Sends never raise: `next_view` reports a lost connection."""

    @property
    def change_pending(self) -> bool:
        """Whether the members are about to change, or this worker is out: ask at the next boundary."""

    @property
    def room(self) -> Room | None:
        """In rank 0: what the coordinator knows of the number of nodes, about a second old; None before it has told."""

    def start(self, on_view: Callable[[int], None]) -> bool:
        """Connect and introduce this worker.

        `on_view(generation)` is called as soon as a newer view is known, and with a generation above all when
        this worker is evicted: a world of one has no peer whose loss would tell it.

        Returns:
            True if the job runs already: warm up, then call `ready`. False if the first view is to come.
        """

    def send(self, kind: str, generation: int = 0) -> None:
        """Tell the coordinator: `ready`, `begin`, `at_boundary`, `suspect`, `settled`, `leave`, `close`, `bye`.

        With `ready` and `begin`, the number is that of a training.
        """

    def next_view(self, after: int) -> View:
        """Wait for the newest view with a generation above `after`.

        Raises:
            CoordinatorLost, Evicted, JobFailed, JobFinished, Left: As their names say.
            ThreadFailed: A thread of the control connection has failed.
            TrainingOver: In a newcomer that is ready for a training: the members have come to a later one.
        """

    def fail(self, why: str) -> bool:
        """Report an exception of the user's code, which ends the job. Waits, but not for long.

        Returns:
            Whether all others have been told.
        """

    def bootstrap(self, generation: int) -> Bootstrap:
        """Exchange of values among the members of one view, relayed by the coordinator."""

    def tell_watermark(self, watermark: Watermark) -> None:
        """Report this member's watermark, which newcomers learn soon. Called in each step, so it never waits."""

    def job_watermark(self) -> Watermark | None:
        """In a newcomer: the watermark of the members; None if nobody has reported it. Never waits.

        Raises:
            CoordinatorLost, Evicted, JobFinished: As their names say.
        """

    def job_training(self) -> int:
        """In a newcomer: the training that the members are in, as far as is known. Never waits.

        Raises:
            CoordinatorLost, Evicted, JobFinished: As their names say.
        """

    def want(self, num_nodes: int) -> None:
        """In rank 0: tell how many nodes the members want, or 0 for as many as come. Never waits."""

    def use_store(self, store: str, claim: GetClaim | None = None) -> None:
        """Report the store that all members have agreed on. The first call counts.

        Args:
            store: A digest of a marker in it; "" for none.
            claim: Creates a claim there. Called from another thread. Raises StorageError if the store has not said.
        """

    def stop(self) -> None:
        """Close the connection."""


class Operation(Protocol):
    """One logical collective, which can be run again and whose result can be handed on."""

    def run(self, group: Group, view: View) -> None:
        """Run it from the start with these members. Its inputs must have been kept.

        Raises:
            GroupBroken: A member is gone.
        """

    def describe(self) -> bytes:
        """Header of the result, for a member that lacks it."""

    def result(self, header: bytes | None) -> Sequence[Any]:
        """Tensors that hold the result; with a header, room for the result that it describes."""


class State(Protocol):
    """Everything that a newcomer needs, collected by the plugin of the host framework."""

    def prepare(self) -> None:
        """In a newcomer, before the others wait for it: do what is possible without knowing their state."""

    def describe(self) -> bytes:
        """Header of the state of this worker."""

    def tensors(self, header: bytes | None) -> Sequence[Any]:
        """Tensors of this worker's state; with a header, room for the state that it describes."""

    def adopt(self, header: bytes) -> None:
        """Make the received state in the tensors of `header` this worker's own."""

    def restore(self) -> bool:
        """All who held a state are lost: make the newest saved state this worker's own, and log that.

        Returns:
            False if there is none, so that the training starts from the beginning.
        """
