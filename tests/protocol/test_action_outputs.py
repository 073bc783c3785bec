"""What workers are told of a decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ef_common.core import membership
from ef_common.core.membership import Phase, Serving
from ef_common.core.membership.phase import WorkerPhase
from ef_common.core.view import Member, View
from ef_common.core.watermark import Watermark
from ef_common.protocol import wire
from ef_common.protocol.action_outputs import answer_heartbeat, outputs_of
from ef_common.protocol.server_outputs import Write, WriteOrReset
from ef_common.protocol.sessions import Sessions
from tests.control.test_wire import FROM_COORDINATOR

MEMBERS = tuple(Member(name, f"n{name}", "h", standby=1) for name in "abcd")
BEFORE, VIEW = View(3, MEMBERS[:3]), View(4, MEMBERS[:2])
STATE = Serving(generation=3, view=VIEW, workers={"d": WorkerPhase(MEMBERS[3], Phase.WARMING)})
DECIDED = [kind for kind in wire.LAYOUTS if issubclass(kind, membership.Action)]


class Job:
    """Members a, b and c, and a newcomer d."""

    def __init__(self) -> None:
        self.sessions = Sessions()
        self.peers = {member.id: self.sessions.connect("h", 0.0) for member in MEMBERS}
        for member in MEMBERS:
            self.sessions.adopt(self.peers[member.id], member, proof="0f" * 32, returning=False)
            self.peers[member.id].view = BEFORE

    def do(self, action: membership.Action) -> list[tuple[str, type, wire.FromCoordinator]]:
        """Who is told what, and how."""
        told = []
        for output in outputs_of(action, STATE, self.sessions, timeout_s=2.0):
            assert isinstance(output, (Write, WriteOrReset))
            told.append((str(output.peer.worker), type(output), wire.decode_from_coordinator(output.data)))
        return told


def test_view_is_told_first_to_those_that_must_not_go_on_without_knowing_it() -> None:
    job = Job()
    silent = job.peers["d"]
    job.sessions.forget(silent)
    job.sessions.suspend(silent, "silent")
    told = job.do(membership.Install(VIEW, dropped=("c",)))
    assert [(worker, how) for worker, how, _ in told] == [
        ("d", WriteOrReset),
        ("c", WriteOrReset),
        ("a", Write),
        ("b", Write),
    ]
    assert told[0][2] == wire.Eviction("silent")
    assert all(isinstance(new, wire.NewView) and new.before == 3 for _, _, new in told[1:])
    assert [job.peers[worker].view for worker in "abc"] == [VIEW] * 3


@pytest.mark.parametrize("kind", DECIDED, ids=lambda kind: kind.__name__)
def test_decision_is_told_to_those_that_it_names_and_says_nothing_of_them(kind: type) -> None:
    (message,) = (one for one in FROM_COORDINATOR if isinstance(one, kind))
    addressees = {"workers": ("a", "c")} if hasattr(message, "workers") else {"worker": "c"}
    told = Job().do(replace(message, **addressees))
    assert told == [(worker, Write, message) for worker in ("ac" if "workers" in addressees else "c")]


def test_each_action_is_told_or_ends_connections_or_installs_a_view() -> None:
    parts = [part.kind for layout in wire.LAYOUTS.values() for part in layout.parts.values()]
    told = {kind.__name__ for kind in (*DECIDED, *parts)}
    actions = {kind.__name__ for kind in membership.Action.__subclasses__()}
    assert actions - told == {"Install", "Dismiss", "SendAway", "StepDown"}


def test_newcomer_that_warms_up_is_told_the_newest_watermark_of_the_members() -> None:
    job = Job()
    marks: Mapping[str, Watermark] = {"a": Watermark(1, 2), "b": Watermark(2, 1), "c": Watermark(9, 9)}
    for worker, mark in marks.items():
        job.peers[worker].watermark = mark  # c is no member any more
    welcome, mark = (message for _, _, message in job.do(membership.Accept("d", warm_up=True)))
    assert isinstance(welcome, wire.Welcome)
    assert (welcome.heartbeat_timeout_s, welcome.standbys) == (2.0, (("h", 1),))
    newest = wire.JobWatermark(max(marks["a"], marks["b"]))
    assert mark == newest
    assert len(job.do(membership.Accept("d", warm_up=False))) == 1
    line = wire.encode(newest)
    assert list(answer_heartbeat("d", STATE, job.sessions)) == [Write(job.peers["d"], line, can_wait=True)]
    assert list(answer_heartbeat("a", STATE, job.sessions)) == []


def test_worker_that_is_gone_is_told_nothing() -> None:
    job = Job()
    job.sessions.forget(job.peers["a"])
    for action in (membership.Abort("a", "why"), membership.Finish("a"), membership.Resign("a")):
        assert job.do(action) == []
    assert [worker for worker, _, _ in job.do(membership.Announce(VIEW.ids, 4))] == ["b"]
