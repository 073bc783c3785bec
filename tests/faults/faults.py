"""Faults that a worker does to itself: where, when, and to whom.

They come in by the ports (the group factory, the control channel) and by Lightning's own hooks. A
`fault` event is logged just before one strikes, so that a test can tell that it struck where it was meant to.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ef_common.core.view import View
from ef_common.data.checkpointer import Checkpointer
from ef_common.errors import GroupBroken
from ef_common.launch import process
from ef_common.session.ports import Bootstrap, Group, Meeting, Pending
from tests.faults.harms import HARMS

MARKS = "TEST_MARKS"
"""Variable that names a directory, in which workers note the steps that they have begun."""
HANG = 0
_PATIENCE_S = 60.0


@dataclass
class Fault:
    """One fault.

    Args:
        where: "forward", "backward", "reduction", "optimizer", "validation", "validation_end", "validate", "test",
            "predict" and "evaluate" (outside of a training), "boundary", "before_join", "build", "transfer", "exchange"
            (a transfer of a step), "plan" (of a checkpoint that all write), "start" (of the training, in the user's
            code), "checkpoint" (one may be due), "data" (a sample is read).
        step: Updates made before it (batches, in a validation); it does not count outside of steps.
        epoch: In a validation: which epoch's.
        rank: Only the worker with this rank is struck; None for the worker that was given the fault.
        generation: Only in the view of this generation; None for any.
        index: Which forward pass or all-reduce of the step; which send or receive of a transfer; at which
            value that is exchanged when a group is built after the start.
        moment: In an exchange: "send" or "receive". In a reduction: "issue" (the others wait for this worker), "wait"
            (it may be complete), or
            "lose" (the others complete it, but this worker's part of the network fails, and it lives on).
        after: In a step: it waits until so many other workers have begun this step (those which have `MARKS` in their
            environments, as this one has).
        signal: What it does to itself. `HANG`: its main thread does nothing more.
        harm: The same, by its name in :data:`tests.faults.harms.HARMS`, instead of a signal.
    """

    where: str
    step: int = 0
    epoch: int = 0
    rank: int | None = None
    generation: int | None = None
    index: int = 0
    moment: str = "issue"
    after: int = 0
    signal: int = signal.SIGKILL
    harm: str = ""


class Striker:
    """Lets the fault of this process strike when it comes to its place."""

    def __init__(self, fault: Fault | None) -> None:
        self.fault = fault
        self.step = -1
        self.num_forwards = 0
        self.num_reduces = 0  # of the newest backward pass
        self.num_transfers = 0
        self.num_exchanges = {"send": 0, "receive": 0}  # since the newest backward pass

    @property
    def worker(self) -> Any:
        """The worker that this process is, once it has its first view or knows that it joins."""
        return process._this

    def at(self, where: str, **place: Any) -> None:
        """This process comes to a place."""
        if self.strikes(where, **place):
            assert self.fault is not None
            fault, self.fault = self.fault, None
            while fault.signal == HANG:
                time.sleep(3600)
            if fault.harm:
                HARMS[fault.harm]()
            else:
                os.kill(os.getpid(), fault.signal)

    def strikes(self, where: str, **place: Any) -> bool:
        """Whether the fault strikes here; then it has been logged."""
        fault = self.fault
        if fault is None or self.worker is None or fault.where != where:
            return False
        if any(getattr(fault, name) != value for name, value in place.items()):
            return False
        session = self.worker.session
        if fault.rank not in (None, session.rank) or fault.generation not in (None, session.view.generation):
            return False
        if fault.after:
            self._wait_for_others(fault.after)
        self.worker.log.write(
            "fault",
            what=f"injected:{where}",
            step=self.step,
            rank=session.rank,
            generation=session.view.generation,
        )
        return True

    def _wait_for_others(self, number: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while len(list(Path(os.environ[MARKS]).glob(f"{self.step}-*"))) <= number:
            assert time.monotonic() < deadline, f"the others have not begun step {self.step}"
            time.sleep(0.002)

    def begin_forward(self, step: int) -> None:
        """A forward pass begins, after so many updates."""
        if MARKS in os.environ:
            Path(os.environ[MARKS], f"{step}-{os.getpid()}").touch()
        self.num_forwards = self.num_forwards + 1 if step == self.step else 0
        self.step = step
        self.num_reduces = -1_000_000  # those in the forward pass are not meant

    def begin_backward(self) -> None:
        """The gradients' all-reduces begin."""
        self.num_reduces = 0
        self.num_exchanges = {"send": 0, "receive": 0}


class FaultyPending:
    def __init__(self, pending: Pending, group: FaultyGroup, index: int, tensor: Any) -> None:
        self._pending, self._group, self._index, self._tensor = pending, group, index, tensor

    def wait(self) -> None:
        self._group.check()
        striker = self._group.striker
        striker.at("reduction", step=striker.step, index=self._index, moment="wait")
        self._pending.wait()
        if striker.strikes("reduction", step=striker.step, index=self._index, moment="lose"):
            striker.fault = None
            self._group.broken = True
            self._tensor[...] = 77  # what a failed collective leaves behind is anybody's guess
            raise GroupBroken("the others have it, this worker has not")


class FaultyGroup:
    """A group that passes the places in communication."""

    def __init__(self, group: Group, striker: Striker) -> None:
        self._group, self.striker = group, striker
        self.broken = False

    def check(self) -> None:
        if self.broken:
            raise GroupBroken("it broke before")

    def meet(self, call: str, tensors: Sequence[Any] | None = None) -> Meeting:
        self.check()
        return self._group.meet(call, tensors)

    def all_reduce(self, tensor: Any, call: str = "", meeting: Meeting | None = None) -> FaultyPending:
        self.check()
        striker = self.striker
        index = striker.num_reduces
        striker.num_reduces += 1
        striker.at("reduction", step=striker.step, index=index, moment="issue")
        return FaultyPending(self._group.all_reduce(tensor, call, meeting), self, index, tensor)

    def all_gather(self, payload: bytes, call: str = "") -> list[bytes]:
        self.check()
        plans = b"offer" in payload and b"busy" in payload
        if plans:
            self.striker.at("plan", moment="issue")
        found = self._group.all_gather(payload, call)
        if plans:
            self.striker.at("plan", moment="wait")
        return found

    def send(self, tensors: Sequence[Any], target: int) -> None:
        self._transfer("send")
        self._group.send(tensors, target)

    def receive(self, tensors: Sequence[Any], source: int, target: int | None = None) -> None:
        self._transfer("receive")
        self._group.receive(tensors, source, target)

    def _transfer(self, moment: str) -> None:
        self.check()
        striker = self.striker
        if striker.worker is not None:
            striker.at("transfer", index=striker.num_transfers)
            striker.num_transfers += 1
            striker.at("exchange", step=striker.step, index=striker.num_exchanges[moment], moment=moment)
            striker.num_exchanges[moment] += 1

    def abort(self) -> None:
        self._group.abort()


class FaultyBootstrap:
    def __init__(self, bootstrap: Bootstrap, striker: Striker) -> None:
        self._bootstrap, self._striker = bootstrap, striker
        self._num_values = 0

    def put(self, key: str, value: bytes) -> None:
        self._striker.at("build", index=self._num_values)
        self._num_values += 1
        self._bootstrap.put(key, value)

    def get(self, key: str) -> bytes:
        return self._bootstrap.get(key)

    def replaced(self) -> bool:
        return self._bootstrap.replaced()


class FaultyGroups:
    """A group factory that passes the places in communication."""

    def __init__(self, groups: Any, striker: Striker) -> None:
        self._groups, self._striker = groups, striker

    def build(self, view: View, *, rank: int, bootstrap: Bootstrap) -> Group:
        bootstrap = FaultyBootstrap(bootstrap, self._striker)
        return FaultyGroup(self._groups.build(view, rank=rank, bootstrap=bootstrap), self._striker)


class FaultyChannel:
    """A control channel that passes the places in membership."""

    def __init__(self, channel: Any, striker: Striker) -> None:
        self._channel, self._striker = channel, striker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def send(self, kind: str, generation: int = 0) -> None:
        if kind == "ready":
            self._striker.at("before_join")
        self._channel.send(kind, generation)
        if kind == "at_boundary":
            self._striker.at("boundary")


def use_faulty_ports(striker: Striker) -> None:
    """Give this process ports that can fail, before anything in it becomes a worker."""
    groups_of, client = process.groups_of, process.CoordinatorClient
    process.groups_of = lambda engine, **kwargs: FaultyGroups(groups_of(engine, **kwargs), striker)
    process.CoordinatorClient = lambda *args, **kwargs: FaultyChannel(client(*args, **kwargs), striker)
    turn = Checkpointer._turn

    def pass_it(self: Checkpointer, step: int) -> Any:
        found = turn(self, step)
        striker.at("checkpoint", step=step)
        return found

    Checkpointer._turn = pass_it  # type: ignore[method-assign]
