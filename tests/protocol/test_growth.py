"""What a coordinator does for a change grows with the number of workers, and not with its square.

Counted are function calls, lines and members, and never time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from ef_common.core import membership
from ef_common.core.membership import Idle, Phase, Returned, Serving, Settings, takeover
from ef_common.core.progress import Limits
from ef_common.core.view import Member, View
from ef_common.protocol import wire
from ef_common.protocol.auth import worker_proof
from ef_common.protocol.known_standbys import KnownStandbys
from ef_common.protocol.peer import End, Peer
from ef_common.protocol.returns import Returns
from ef_common.protocol.server import CoordinatorServer
from ef_common.protocol.server_outputs import Write, WriteOrReset
from ef_common.protocol.view_patch import ViewName
from tests.calls import calls_of

FEW, MANY = 64, 512
ROOM = 1.3 * MANY / FEW
"""Many may cost so many times what few cost."""
NONCE, KEY = "0f" * 16, "1e" * 16


def member(index: int) -> Member:
    return Member(f"w{index:04}", f"n{index:04}", f"10.0.{index >> 8}.{index & 255}", standby=1000, liveness_port=2)


class Job:
    """A coordinator and its connections; counts the lines and bytes that it sends."""

    def __init__(self, size: int) -> None:
        settings = Settings(start_nodes=size)
        self.server = CoordinatorServer(
            0.0, token=None, settings=settings, heartbeat_timeout_s=1000.0, limits=Limits(None)
        )
        self.size = size
        self.peers: list[Peer] = []
        self.now = 0.0
        self.num_lines = self.num_bytes = 0

    def drain(self) -> None:
        outputs = self.server.outputs
        while outputs:
            if isinstance(output := outputs.popleft(), (Write, WriteOrReset)):
                self.num_lines += 1
                self.num_bytes += len(output.data)

    def come(self) -> None:
        """One more worker, a tenth of a millisecond after the one before; the alarm rings whenever it should."""
        self.now += 1e-4
        self.ring()
        newcomer = member(len(self.peers))
        peer = self.server.connect(newcomer.address, self.now)
        proof = worker_proof(None, server_nonce=peer.nonce, client_nonce=NONCE, key=KEY, member=newcomer)
        self.server.receive(peer, wire.encode(wire.Hello(newcomer, NONCE, KEY, proof, returning=False)), self.now)
        self.peers.append(peer)
        self.drain()

    def ring(self) -> None:
        if self.server.deadline <= self.now:
            self.server.tick(self.now)
        self.drain()

    def start(self) -> None:
        for _ in range(self.size):
            self.come()
        self.now += 1.0
        self.ring()

    def settle(self) -> None:
        for peer in self.peers:
            event = membership.Settled("", self.server.state.generation)
            self.server.receive(peer, wire.encode(event), self.now)
        self.now += 1.0
        self.ring()  # what the others are told of the number of nodes
        self.num_lines = self.num_bytes = 0

    def lose(self, number: int) -> None:
        """So many connections end at once."""
        for peer in self.peers[-number:]:
            self.server.end(peer, End.CLOSED, self.now)
            self.drain()
        del self.peers[-number:]
        self.now += 0.5
        self.ring()


def started(size: int) -> Job:
    job = Job(size)
    job.start()
    job.settle()
    return job


def test_start_costs_work_in_the_number_of_workers() -> None:
    few, many = Job(FEW), Job(MANY)
    costs = [calls_of(job.start) for job in (few, many)]
    for job in (few, many):
        assert job.server.state.view is not None
        assert job.server.state.view.world_size == job.size
    assert costs[1] <= ROOM * costs[0]


def test_many_losses_at_once_cost_two_lines_for_each_worker_and_work_in_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = []
    note = KnownStandbys.note

    def counting(self: KnownStandbys, members: Iterable[Member], *rest: Any) -> None:
        members = list(members)
        noted.append(len(members))
        note(self, members, *rest)

    monkeypatch.setattr(KnownStandbys, "note", counting)
    few, many, costs = started(FEW), started(MANY), []
    for job in (few, many):
        noted.clear()
        costs.append(calls_of(lambda job=job: job.lose(job.size // 8)))  # type: ignore[misc]
        assert job.server.state.view is not None
        assert job.server.state.view.world_size == job.size - job.size // 8
        assert job.server.state.generation == 3
        assert sum(noted) <= 2 * job.size
        assert job.num_lines <= 2 * job.size + 2  # and what rank 0 is told of the number of nodes
    assert costs[1] <= ROOM * costs[0]


def test_bytes_of_some_losses_at_once_grow_with_the_number_of_workers() -> None:
    few, many = started(FEW), started(MANY)
    for job in (few, many):
        job.lose(8)
    assert many.num_bytes <= ROOM * few.num_bytes


def test_suspended_workers_are_not_told_that_they_are_out_before_a_view_without_them_is_issued() -> None:
    """Silences are decided at once, and so are the losses that were gathered before."""
    job = started(FEW)
    last = job.peers[-1]
    for peer in job.peers[-3:-1]:
        job.server.end(peer, End.CLOSED, job.now)
    assert isinstance(job.server.state, Serving)
    assert job.server.state.due < inf
    job.drain()
    job.server._suspend([last], "silent")
    out = [output for output in job.server.outputs if isinstance(output, WriteOrReset)]
    assert [output.peer for output in out] == [last]
    assert job.server.state.view is not None
    assert job.server.state.view.world_size == FEW - 3


class Digest(str):
    """Counts with how many others it is compared."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Digest.num_compared += 1
        return str.__eq__(self, other)  # type: ignore[arg-type]

    __hash__ = str.__hash__


def test_views_that_workers_name_are_not_compared_with_all_that_others_were_asked_for() -> None:
    returns = Returns()
    num_writes = 0
    for index in range(FEW):
        peer, who = Peer("10.0.0.1", 0.0), member(index)
        names = tuple(ViewName(generation, Digest(f"{generation:032x}"), False, False) for generation in range(1, 51))
        report = wire.Return(Returned(who, Phase.MEMBER, promised=50, settled=1), names)
        num_writes += len(returns.hear(peer, report, Idle()))
    assert num_writes == 3
    assert Digest.num_compared <= 5 * FEW * 50


def test_standby_combines_what_members_know_only_when_all_may_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if their views name, each anew, all who are gone."""
    num_lost, merges = 16, []
    members = tuple(map(member, range(FEW)))
    views = [
        View(1 + lost, members[: FEW - lost], 1, gone=tuple(one.id for one in members[FEW - lost :]), base=1)
        for lost in range(num_lost + 1)
    ]
    merge = takeover.merge
    monkeypatch.setattr(takeover, "merge", lambda chains: merges.append(1) or merge(chains))
    links = tuple(membership.takeover.ChainLink(view) for view in views)  # type: ignore[attr-defined]
    state: membership.Membership = Idle()
    for one in members[: FEW - num_lost]:
        event = Returned(one, Phase.MEMBER, promised=views[-1].generation, settled=1, received=links, store="")
        state, _, _ = membership.decide(state, replace(event), 0.0, Settings())
    assert isinstance(state, Serving)
    assert len(merges) <= num_lost + 1
