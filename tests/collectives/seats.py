"""Two ways to run a script of members of one view: real processes over an engine, and the simulator's processes.

A script is a function `script(seat)`, called once in each member; what it returns must be JSON. This module imports
no framework: a worker has those that its engine needs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from ef_common.control.client import CoordinatorClient
from ef_common.core.view import Member, View
from ef_common.errors import GroupBroken
from ef_common.launch.engines import groups_of
from ef_common.launch.environment import read_environment
from ef_common.session.ports import Group
from ef_common.testing.harness import Job
from ef_common.testing.simulation.cuts import Cuts
from ef_common.testing.simulation.network import Factory, Network
from ef_common.testing.simulation.scheduler import Process, Scheduler
from tests import warm
from tests.gpu import GPU_MARKS, seem_to_have_a_gpu
from tests.horovod_built import needs_horovod

SETTLED_S = 0.5
"""After this time all members in memory have built the group."""


class Seat(Protocol):
    """What a script sees of its member."""

    rank: int
    world_size: int

    def build(self) -> Group: ...

    def meet(self, what: str) -> None: ...

    def tensor(self, values: Sequence[float]) -> Any: ...

    def values(self, tensor: Any) -> list[float]: ...

    def sleep(self, duration_s: float) -> None: ...

    def later(self, delay_s: float, act: Callable[[], None]) -> None: ...

    def die(self) -> None: ...


Script = Callable[[Any], Any]


# ---------------------------------------------------------------- in memory


class MemorySeat:
    def __init__(self, scheduler: Scheduler, network: Network, view: View, rank: int) -> None:
        self.rank, self.world_size = rank, view.world_size
        self.process: Any = None
        self.factory: Any = None
        self._scheduler, self._network, self._view = scheduler, network, view

    def build(self) -> Any:
        self.factory = Factory(self._network, self.process, lambda place: None)
        return self.factory.build(self._view, rank=self.rank, bootstrap=None)

    def meet(self, what: str) -> None:
        self.process.sleep(SETTLED_S)

    def tensor(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def values(self, tensor: list[float]) -> list[float]:
        return list(tensor)

    def sleep(self, duration_s: float) -> None:
        self.process.sleep(duration_s)

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        self._scheduler.after(delay_s, act)

    def die(self) -> None:
        self.factory.die()
        self.process.kill()


def run_in_memory(script: Script, world_size: int, *, seed: int = 0) -> list[Any]:
    """Results in rank order; None for those that died."""
    scheduler = Scheduler(seed)
    network, view = Network(scheduler, Cuts()), view_of(world_size)
    results: list[Any] = [None] * world_size

    def live(seat: MemorySeat) -> None:
        results[seat.rank] = script(seat)

    seats = [MemorySeat(scheduler, network, view, rank) for rank in range(world_size)]
    for seat in seats:
        seat.process = Process(scheduler, f"w{seat.rank}", lambda seat=seat: live(seat))
    for seat in seats:
        seat.process.start()
    while scheduler.advance():
        continue
    assert not any(seat.process.alive for seat in seats), "a member waits for ever"
    return results


def view_of(world_size: int) -> View:
    return View(1, tuple(Member(f"w{rank}", f"n{rank}", "127.0.0.1") for rank in range(world_size)))


# ---------------------------------------------------------------- real processes


class RealSeat:
    """Follows the membership as a session does, without carrying anything over.

    Args:
        engine: Its data plane.
        kind: What scripts hand to it: "arrays" of NumPy, "tensors on a GPU", which the members share, or tensors.
    """

    def __init__(self, engine: str, *, kind: str) -> None:
        self._groups = groups_of(engine)
        self.arrays = kind == "arrays"
        self.device = "cuda:0" if kind == "tensors on a GPU" else "cpu"
        environment = read_environment()
        assert environment.coordinator is not None
        member = environment.member()
        self.id = member.id
        self.client = CoordinatorClient(environment.coordinator, member, environment.token)
        self.group: Group | None = None
        self.client.start(self._replaced)
        self.view = View(0, ())
        self.next_view()

    def next_view(self) -> View:
        self.view = self.client.next_view(self.view.generation)
        self.rank, self.world_size = self.view.rank_of(self.id) or 0, self.view.world_size
        return self.view

    def _replaced(self, generation: int) -> None:
        if self.group is not None:
            self.group.abort()

    def build(self) -> Group:
        bootstrap = self.client.bootstrap(self.view.generation)
        self.group = self._groups.build(self.view, rank=self.rank, bootstrap=bootstrap)
        return self.group

    def tensor(self, values: Sequence[float]) -> Any:
        return self.of(np.array(values))

    def of(self, array: np.ndarray) -> Any:
        """The array, or a tensor of the same memory; on a GPU, with the same values."""
        if self.arrays:
            return array
        import torch

        return torch.from_numpy(array).to(self.device)

    def values(self, tensor: Any) -> list[float]:
        return list(tensor.tolist())

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        timer = threading.Timer(delay_s, act)
        timer.daemon = True
        timer.start()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def tell(self, what: str) -> None:
        """Tell the others, past the group, that this member has come so far in its view."""
        self.client.bootstrap(self.view.generation).put(f"{what}/{self.rank}", b"")

    def meet(self, what: str) -> None:
        """Wait until all members have come so far, or one is gone: then the group is broken, too."""
        bootstrap = self.client.bootstrap(self.view.generation)
        with contextlib.suppress(GroupBroken):
            self.tell(what)
            for other in range(self.world_size):
                bootstrap.get(f"{what}/{other}")

    def leave_together(self) -> None:
        """Nobody's end may disturb another's last operation."""
        self.meet("done")


def _engine(name: str, framework: str = "", marks: Sequence[Any] = ()) -> Any:
    marks = [pytest.mark.processes, pytest.mark.timeout(300), *marks]
    if framework:
        marks += needs_horovod(framework)
    return pytest.param(name, marks=marks)


ENGINES = [
    _engine("gloo"),
    _engine("gloo with arrays"),
    _engine("gloo with tensors on a GPU", marks=GPU_MARKS),
    _engine("nccl with tensors on a GPU", marks=GPU_MARKS),
    _engine("horovod", "torch"),
    _engine("horovod with arrays", "torch"),
    _engine("horovod-tensorflow with arrays", "tensorflow"),
]
"""Each data plane, with the kinds of tensors that it takes."""


def preload(engine: str) -> tuple[str, ...]:
    return warm.KERAS["tensorflow"] if engine.startswith("horovod-tensorflow") else warm.TORCH


def sit(script: Script, engine: str = "gloo") -> Any:
    """Body of a real worker."""
    name, _, kind = engine.partition(" with ")
    if name == "nccl":
        seem_to_have_a_gpu()
    seat = RealSeat(name, kind=kind)
    rank = seat.rank
    try:
        result = script(seat)
        seat.leave_together()
    finally:
        seat.client.send("bye")
        seat.client.stop()
    return {"rank": rank, "result": result}


def run_in_processes(
    script: Script,
    world_size: int,
    directory: Path,
    *,
    lost: Sequence[int] = (),
    engine: str = "gloo",
    modules: Sequence[str] | None = None,
) -> list[Any]:
    """Results in the rank order of the first view; None for those that were to be lost.

    Args:
        script: What each member does.
        world_size: How many there are.
        directory: Of the run.
        lost: Ranks that die.
        engine: Their data plane.
        modules: What they have imported at the start; by default what makes them start fast.
    """
    with Job(directory, preload=preload(engine) if modules is None else modules) as job:
        workers = job.start_world(world_size, sit, script, engine)
        results: list[Any] = [None] * world_size
        statuses = [worker.wait() for worker in workers]
        for worker, status in zip(workers, statuses, strict=True):
            if status == 0:
                found = worker.result()
                results[found["rank"]] = found["result"]
        assert sorted(statuses) == [-signal.SIGKILL] * len(lost) + [0] * (world_size - len(lost)), job.tails()
        return results
