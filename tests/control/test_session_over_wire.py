"""The real session over the real control plane; only its groups are played, by way of the relay."""

from __future__ import annotations

import threading
import time

import pytest

from ef_common.control.client import CoordinatorClient
from ef_common.core.view import Member
from ef_common.errors import JobFinished, Left
from ef_common.session import Session


class RelayGroup:
    """A group whose only collective goes over the coordinator."""

    def __init__(self, view, rank, bootstrap):
        self._view, self._rank, self._bootstrap, self._number = view, rank, bootstrap, 0

    def meet(self, call, tensors=None):
        self.all_gather(call.encode())
        return self

    def wait(self):
        """All have met."""

    def all_gather(self, payload, call=""):
        self._number += 1
        self._bootstrap.put(f"{self._number}/{self._rank}", payload)
        return [self._bootstrap.get(f"{self._number}/{rank}") for rank in range(self._view.world_size)]

    def send(self, tensors, target):
        """States and results are empty here."""

    def receive(self, tensors, source, target=None):
        """Likewise."""

    def abort(self):
        """The relay gives up by itself."""


class RelayGroups:
    def build(self, view, *, rank, bootstrap):
        return RelayGroup(view, rank, bootstrap)


class Step:
    """One step: everybody tells whether it knows of a pending change."""

    def __init__(self, session):
        self._session = session

    def run(self, group, view):
        self.flags = group.all_gather(b"%d" % self._session.change_pending) if view.world_size > 1 else [b"0"]

    def describe(self):
        return b"".join(self.flags)

    def result(self, header):
        if header is not None:
            self.flags = [b"%c" % flag for flag in header]
        return []


class Trainer(threading.Thread):
    """Steps until it is told to stop, to leave or to die."""

    def __init__(self, coordinator, name):
        super().__init__(daemon=True)
        member = Member(name, f"node-{name}", "")
        self.channel = CoordinatorClient(coordinator.address, member, None)
        self.session = Session(member, channel=self.channel, groups=RelayGroups())
        self.world_sizes: list[int] = []
        self.end: BaseException | str | None = None
        self.order = ""
        self.start()

    def run(self):
        try:
            if self.session.start():
                self.session.join()
            while self.order not in ("die", "end"):
                if self.order == "leave":
                    self.session.leave()
                    self.order = ""
                self.session.boundary()
                step = Step(self.session)
                self.session.run(step)
                self.session.agree(sum(map(int, step.flags)))
                self.world_sizes = [*self.world_sizes, self.session.completed_in.world_size]
            if self.order == "end":
                self.session.trainings.end()
                self.session.close()
                self.session.stop()
            self.channel.stop()
            self.end = self.order
        except (JobFinished, Left) as end:
            self.end = end
            self.session.stop()
        except Exception as error:
            self.end = error

    def wait_for_world(self, size):
        deadline = time.monotonic() + 30
        while self.world_sizes[-1:] != [size]:
            assert self.end is None, self.end
            assert time.monotonic() < deadline, self.world_sizes[-5:]
            time.sleep(0.005)

    def finish(self, order):
        self.order = order
        self.join(30)
        return self.end


@pytest.fixture
def trainers(serve):
    coordinator = serve(1)
    started: list[Trainer] = []

    def start(name):
        started.append(Trainer(coordinator, name))
        return started[-1]

    yield start
    for trainer in started:
        trainer.finish("die")


def test_session_over_wire_survives_loss_join_and_leave(trainers):
    a, b = trainers("a"), trainers("b")
    a.wait_for_world(2)
    assert b.finish("die") == "die"
    a.wait_for_world(1)
    c = trainers("c")
    c.wait_for_world(2)
    a.wait_for_world(2)
    d = trainers("d")
    d.wait_for_world(3)
    a.order = "leave"
    a.join(30)
    assert isinstance(a.end, Left)
    d.wait_for_world(2)
    c.order = "leave"
    c.join(30)
    assert isinstance(c.end, Left)
    d.wait_for_world(1)
    assert d.finish("end") == "end"
    late = trainers("late")
    late.join(30)
    assert isinstance(late.end, JobFinished)
