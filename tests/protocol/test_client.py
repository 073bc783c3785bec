"""The worker's end of the control plane, without sockets, threads or clocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import pytest

from ef_common.core import membership
from ef_common.core.membership import Ended, Idle, Leaving, Membership, Phase, Settings, Wanted
from ef_common.core.progress import Limits
from ef_common.core.room import Demand, Room
from ef_common.core.view import Member, View
from ef_common.errors import AuthenticationError, CoordinatorLost, Evicted, JobFailed, ThreadFailed
from ef_common.protocol import client as module
from ef_common.protocol import server_outputs, wire
from ef_common.protocol.addresses import Address
from ef_common.protocol.auth import Token, coordinator_proof
from ef_common.protocol.client import Client, ClientState
from ef_common.protocol.client_outputs import (
    ClientOutput,
    Connect,
    CoordinatorLink,
    Disconnect,
    EndSending,
    Leave,
    Replaced,
    Send,
    TrustLeader,
)
from ef_common.protocol.peer import Peer
from ef_common.protocol.server import CoordinatorServer
from ef_common.protocol.server_outputs import Write, WriteOrReset
from ef_common.protocol.view_patch import NO_VIEW, ViewPatch
from ef_common.testing.simulation.schedule import FAMILIES
from ef_common.testing.simulation.simulation import simulate
from tests.diagrams import cases, rows, states, watch

T = TypeVar("T", bound=ClientOutput)

ENDPOINT = ("10.0.0.1", 1000)
OTHER = ("10.0.0.2", 1000)
VIEW = View(1, (Member("w", "n", "10.0.0.1", standby=1000), Member("x", "m", "10.0.0.2", standby=1000)))


def drain(client: Client, kind: type[T]) -> list[T]:
    """All that the client asks for; those of this kind."""
    outputs, client.outputs = list(client.outputs), type(client.outputs)()
    return [output for output in outputs if isinstance(output, kind)]


def make(*, standby: int = 0, address: Address = ENDPOINT, token: Token | None = None) -> Client:
    client = Client(address, Member("w", "n", "", standby=standby), token, chance=random.Random(0))
    client.start(0.0)
    return client


def serve(*, token: Token | None = None, state: Membership | None = None) -> CoordinatorServer:
    server = CoordinatorServer(0.0, token=token, settings=Settings(), heartbeat_timeout_s=4.0, limits=Limits())
    server.state = state or server.state
    return server


def introduce(client: Client, server: CoordinatorServer, now: float) -> tuple[CoordinatorLink, Peer]:
    """Let the client connect to the server, and both say what they have to say until the client is taken."""
    link = trying(client)
    peer = server.connect("10.0.0.9", now)
    client.connected(link, now)
    while server.outputs or client.outputs:
        while server.outputs:
            output = server.outputs.popleft()
            if isinstance(output, (Write, WriteOrReset)) and output.peer is peer:
                client.receive(link, output.data, now)
            elif isinstance(output, server_outputs.Close):
                client.receive(link, output.last_words, now)
        for sent in drain(client, Send):
            server.receive(peer, sent.data, now)
    return link, peer


def member(now: float = 0.0, *, standby: int = 1000) -> tuple[Client, CoordinatorLink]:
    """A client in view 1."""
    client = make(standby=standby)
    link, _ = introduce(client, serve(), now)
    client.receive(link, wire.encode(wire.NewView(0, ViewPatch.between(NO_VIEW, VIEW))), now)
    client.outputs.clear()
    return client, link


def test_client_is_taken_and_beats_four_times_in_a_timeout() -> None:
    client = make()
    link, _ = introduce(client, serve(), 1.0)
    assert client.started() is None
    beats = []
    for tenth in range(11, 60):
        client.tick(tenth / 10)
        beats += [tenth / 10 for sent in drain(client, Send) if b"heartbeat" in sent.data]
        client.receive(link, wire.encode(wire.Alive()), tenth / 10)
    assert beats == [2.0, 3.0, 4.0, 5.0]


def test_client_that_nobody_answers_says_where_it_has_looked_and_for_how_long() -> None:
    client, now, num_attempts = make(), 0.0, 0
    while client.end is None:
        for connect in drain(client, Connect):
            num_attempts += 1
            client.unreached(connect.link, "Connection refused", now)
        now = client.deadline or now
        client.tick(now)
    assert 55.0 < now < 63.0
    assert 40 < num_attempts < 150  # ever more rarely
    with pytest.raises(CoordinatorLost, match=r"at 10\.0\.0\.1:1000 within 60 s \(Connection refused\).*TOKEN"):
        client.started()
    assert client.is_over


def test_attempt_that_takes_too_long_is_given_up_and_closed_if_it_succeeds_later() -> None:
    client = make(standby=1000)
    first = drain(client, Connect)[0]
    client.tick(first.timeout_s)
    assert drain(client, Disconnect)[0].link is first.link
    client.connected(first.link, first.timeout_s + 0.1)
    assert [close.link for close in drain(client, Disconnect)] == [first.link]


def test_attempt_that_is_given_up_does_not_look_like_the_end_of_this_process() -> None:
    """The coordinator may have read who this is, and count it as gone; but it goes to another one, and trains on."""
    client = make(standby=1000)
    first = drain(client, Connect)[0]
    client.connected(first.link, 0.0)
    client.receive(first.link, wire.encode(wire.Challenge("0f" * 16)), 0.0)
    assert client.deadline is not None
    client.tick(client.deadline)
    assert [(leave.link, leave.word) for leave in drain(client, Leave)] == [(first.link, None)]


def test_client_of_an_impostor_looks_no_further_at_its_start() -> None:
    client = make(token=Token("hunter2"))
    link = drain(client, Connect)[0].link
    client.connected(link, 0.0)
    client.receive(link, wire.encode(wire.Challenge("0f" * 16)), 0.0)
    client.receive(link, wire.encode(wire.Welcome(membership.Accept("w0", False), 4.0, "0" * 64, ())), 0.0)
    with pytest.raises(AuthenticationError, match="impostor"):
        client.started()
    assert client.is_over


def test_messages_that_come_in_pieces_are_taken_when_they_are_whole() -> None:
    client, link = member()
    data = wire.encode(membership.Announce((), 1)) + wire.encode(wire.Eviction("silent"))
    for index in range(len(data) - 1):
        client.receive(link, data[index : index + 1], 1.0)
    assert client.change_pending
    assert client.end is None
    client.receive(link, data[-1:], 1.0)
    with pytest.raises(Evicted):
        client.newer_view(1)


def test_what_is_said_while_the_coordinator_is_sought_is_told_to_it() -> None:
    client = make()
    client.fail("ValueError")
    server = serve()
    introduce(client, server, 0.0)
    assert server.state.failed == "ValueError"
    with pytest.raises(JobFailed):
        client.started()


def test_client_whose_link_ends_tries_the_same_coordinator_before_it_leaves_it() -> None:
    client, old = member()
    client.ended(old, in_order=True, now=2.0)
    (connect,) = drain(client, Connect)
    assert connect.link.address == ENDPOINT
    assert client.resume_state.links[0].over
    client.unreached(connect.link, "Connection refused", 2.0)
    assert [leave.link for leave in client.outputs if isinstance(leave, Leave)] == [old]


def test_client_that_is_let_go_of_at_once_pauses_before_it_returns() -> None:
    client, old = member(now=1.0)
    client.ended(old, in_order=True, now=1.01)
    assert drain(client, Connect) == []
    assert client.deadline is not None
    assert 1.01 < client.deadline < 1.2
    client.tick(client.deadline)
    assert len(drain(client, Connect)) == 1


def test_client_tries_one_address_after_the_other_and_pauses_after_each_round() -> None:
    client, old = member()
    client.ended(old, in_order=False, now=1.0)
    client.unreached(drain(client, Connect)[0].link, "refused", 1.0)
    asked = []
    while connects := drain(client, Connect):
        asked.append(connects[0].link.address)
        client.unreached(connects[0].link, "refused", 1.0)
    assert asked == [ENDPOINT, OTHER, ("127.0.0.1", 1000)]
    client.tick(1.01)
    assert drain(client, Connect) == []
    client.tick(1.2)
    assert len(drain(client, Connect)) == 1


_FIRST_S = 1.0 + 3 * 0.002  # with three addresses
_PATIENT = [1.0, *(_FIRST_S * factor for factor in (1, 2, 4, 8)), 10.0, 10.0]
_SILENT = [1.0, *[0.2] * 3, *[0.4] * 3, *[0.8] * 3, *[_FIRST_S] * 3]


@pytest.mark.parametrize(
    ("reaches", "times_out", "expected"),
    [
        ("connected", False, _PATIENT),
        ("accepted", False, _PATIENT),  # the handshake of TLS is not over
        ("accepted", True, _PATIENT),  # and whoever makes it is the first to see that it takes too long
        ("", True, _SILENT),
        ("", False, _SILENT),
    ],
)
def test_coordinator_that_accepts_and_is_too_busy_to_answer_gets_more_time_with_each_attempt(
    reaches: str, times_out: bool, expected: list[float]
) -> None:
    client, link = member()
    now, found = 1.0, []
    client.ended(link, in_order=True, now=now)
    while len(found) < len(expected):
        for connect in drain(client, Connect):
            found.append(connect.timeout_s if reaches else connect.accept_s)
            if reaches == "connected":
                client.connected(connect.link, now)
            elif reaches:
                client.accepted(connect.link)
            now += found[-1]
            if times_out:
                client.unreached(connect.link, "timed out", now)
        now = max(now, client.deadline or 0.0)
        client.tick(now)
    assert found == pytest.approx(expected)


def test_coordinator_that_refuses_in_the_handshake_gets_no_more_time() -> None:
    client, link = member()
    client.ended(link, in_order=True, now=1.0)
    found = []
    for _ in range(3):
        (connect,) = drain(client, Connect)
        found.append(connect.timeout_s)
        client.accepted(connect.link)
        client.unreached(connect.link, "it closed the connection", 1.0)
    assert found == pytest.approx([1.0, _FIRST_S, _FIRST_S])


def test_client_that_hears_nothing_leaves_its_coordinator_unless_it_was_itself_that_slept() -> None:
    client, _ = member()
    client.tick(100.0)  # it was asleep
    assert [connect.beside for connect in drain(client, Connect)] == [True]
    for tenth in range(1000, 1055):
        client.tick(tenth / 10)
    assert drain(client, Connect) == []
    client.tick(106.1)
    assert [connect.beside for connect in drain(client, Connect)] == [False]
    assert not client.resume_state.links[0].over


def test_worker_tells_where_it_stands_before_anything_else() -> None:
    client, old = member()
    client.publish(1, "key", b"value")
    client.ended(old, in_order=False, now=2.0)
    server = serve(state=Idle())
    link = drain(client, Connect)[0].link
    peer = server.connect("10.0.0.9", 2.0)
    client.connected(link, 2.0)
    client.receive(link, server.outputs.popleft().data, 2.0)
    server.receive(peer, drain(client, Send)[0].data, 2.0)
    client.receive(link, server.outputs.popleft().data, 2.0)
    outputs = list(client.outputs)
    assert [type(output) for output in outputs] == [TrustLeader, Send, Send, Leave]
    assert b'"t":"return"' in outputs[1].data
    assert b'"t":"relay"' in outputs[2].data


def test_collectives_in_flight_have_a_moment_to_end_when_the_job_has_failed() -> None:
    client, link = member()
    client.receive(link, wire.encode(wire.Aborted(membership.Abort("", "w1 raised"), "0" * 64)), 1.0)
    assert client.change_pending
    client.tick(1.4)
    assert drain(client, Replaced) == []
    client.tick(1.5)
    assert [replaced.generation > 1 << 32 for replaced in drain(client, Replaced)] == [True]


def test_they_have_none_when_the_coordinator_ends_the_link() -> None:
    client, link = member()
    client.receive(link, wire.encode(wire.Aborted(membership.Abort("", "w1 raised"), "0" * 64)), 1.0)
    client.ended(link, in_order=True, now=1.1)
    assert len(drain(client, Replaced)) == 1
    assert client.is_over


def test_client_that_is_stopped_ends_its_link_in_order_and_goes_nowhere() -> None:
    client, link = member()
    client.send("bye")
    client.stop()
    assert [type(output) for output in client.outputs] == [Send, EndSending]
    assert not client.is_over
    client.ended(link, in_order=True, now=1.0)
    assert client.is_over
    assert drain(client, Connect) == []


# ---------------------------------------------------------------- the number of nodes


def said(client: Client) -> list[wire.FromWorker]:
    lines = [line for sent in drain(client, Send) for line in sent.data.splitlines()]
    return [wire.decode_from_worker(line, sender=client.member) for line in lines]


def test_what_is_wanted_is_said_and_numbered_in_each_view() -> None:
    client, link = member()
    client.want(0)
    client.want(3)
    client.want(3)  # the same, but anew: a replacement of a straggler begins with it
    client.want(2)
    demands = [Demand(1, 1, 0), Demand(1, 2, 3), Demand(1, 3, 3), Demand(1, 4, 2)]
    assert said(client) == [Wanted("w", demand) for demand in demands]
    newer = View(4, VIEW.members)
    client.receive(link, wire.encode(wire.NewView(1, ViewPatch.between(VIEW, newer))), 0.0)
    client.want(5)
    assert said(client) == [Wanted("w", Demand(4, 1, 5))]


def test_room_is_known_as_the_coordinator_has_told_it() -> None:
    client, link = member()
    assert client.room is None
    told = Room(Demand(1, 4, 2), nodes=3, spares=1, newcomers=2, min_nodes=1, max_nodes=8, stragglers=("x",))
    client.receive(link, wire.encode(told), 0.0)
    assert client.room == Room(Demand(1, 4, 2), 3, 1, 2, 1, 8, ("x",))
    assert client.room.wanted == 2
    client.want(1)
    assert said(client) == [Wanted("w", Demand(1, 5, 1))]  # newer than what others have wanted in this view


def test_newest_demand_is_told_to_the_next_coordinator() -> None:
    client, link = member()
    client.want(3)
    older = Room(Demand(1, 0, 0), nodes=2, spares=0, newcomers=0, min_nodes=1, max_nodes=8, stragglers=())
    client.receive(link, wire.encode(older), 0.0)
    assert client.resume_state.report(client.member).demand == Demand(1, 1, 3)
    client.outputs.clear()
    client.ended(link, in_order=False, now=5.0)
    server = serve(state=Idle())
    introduce(client, server, 5.0)
    assert server.state.returned["w"].demand == Demand(1, 1, 3)  # type: ignore[attr-defined]


def test_member_that_is_asked_to_leave_says_that_it_does() -> None:
    client, link = member()
    client.receive(link, wire.encode(membership.Resign("")), 0.0)
    assert said(client) == [Leaving("w")]


def test_member_that_was_asked_to_leave_may_be_told_to_stay() -> None:
    client, link = member()
    client.receive(link, wire.encode(membership.Resign("")) + wire.encode(membership.Stay("")), 0.0)
    assert said(client) == [Leaving("w")]
    assert (client.resume_state.leaving, client.resume_state.phase) == (False, Phase.MEMBER)


@pytest.mark.parametrize(("members_in", "phase"), [(2, Phase.READY), (3, Phase.WARMING)])
def test_newcomer_warms_up_again_if_the_members_are_past_its_training(members_in: int, phase: Phase) -> None:
    client = make(standby=1000)
    server = serve(state=membership.Serving(generation=1, view=VIEW))
    link, _ = introduce(client, server, 0.0)
    client.receive(link, wire.encode(membership.Skip("", 2)), 1.0)
    client.send("ready", 2)
    client.receive(link, wire.encode(membership.Skip("", members_in)), 1.0)  # it had not heard that yet
    assert client.resume_state.phase is phase


def test_member_that_wants_to_leave_itself_does_not_stay() -> None:
    client, link = member()
    client.receive(link, wire.encode(membership.Resign("")), 0.0)
    client.send("leave")
    client.receive(link, wire.encode(membership.Stay("")), 0.0)
    assert said(client) == [Leaving("w")] * 3
    assert (client.resume_state.leaving, client.resume_state.phase) == (True, Phase.LEAVING)


# ---------------------------------------------------------------- the diagram


def lost(**how: int) -> Client:
    """A member whose link has ended: it tries the same coordinator once more."""
    client, link = member(**how)
    client.ended(link, in_order=False, now=2.0)
    return client


def trying(client: Client) -> CoordinatorLink:
    return [connect.link for connect in drain(client, Connect) if not connect.beside][-1]


def hears(*messages: wire.FromCoordinator) -> Client:
    client, link = member()
    client.receive(link, b"".join(map(wire.encode, messages)), 1.0)
    return client


def after(client: Client, *acts: Callable[[Client], object]) -> Client:
    for act in acts:
        act(client)
    return client


def answers(state: Membership | None = None) -> Callable[[Client], object]:
    """The client is answered where it looks for a coordinator."""
    return lambda client: introduce(client, serve(state=state), 2.0)


def refuses(client: Client) -> None:
    client.unreached(trying(client), "refused", 2.0)


def ends(client: Client) -> None:
    assert client._link is not None
    client.ended(client._link, in_order=True, now=2.0)


def is_reset(client: Client) -> None:
    assert client._link is not None
    client.ended(client._link, in_order=False, now=2.0)


def breaks(client: Client) -> None:
    client.break_off(ThreadFailed("a thread"))


def waits(client: Client) -> None:
    """Nothing comes until the client does something about it."""
    before, now = client.state, 2.0
    while client.state is before:
        if client._trying is not None and now % 1.0 == 0.5:
            client.unreached(client._trying, "refused", now)
        now += 0.25
        client.tick(now)


def sends_away(client: Client) -> None:
    assert client._link is not None
    client.receive(client._link, wire.encode(wire.Redirect("", "0" * 64)), 1.0)


def stranger(client: Client) -> None:
    """Whoever answers is no coordinator."""
    link = trying(client)
    client.connected(link, 2.0)
    client.receive(link, wire.encode(wire.Welcome(membership.Accept("", False), 4.0, "0" * 64, ())), 2.0)


def unstarted() -> Client:
    return Client(ENDPOINT, Member("w", "n", ""), None)


def hears_of_failure(client: Client) -> None:
    """The coordinator does not even take the client back."""
    link = trying(client)
    client.connected(link, 2.0)
    client.receive(link, wire.encode(wire.Challenge("0f" * 16)), 2.0)
    (hello,) = said(client)
    assert isinstance(hello, wire.Hello)
    proof = coordinator_proof(None, client_nonce=hello.nonce, server_nonce="0f" * 16)
    client.receive(link, wire.encode(wire.Aborted(membership.Abort("", "w1 raised"), proof)), 2.0)


FAILED = Ended(failed="w1 raised")
STANDBY = Idle()
WITHOUT = View(2, VIEW.members[1:])
WITNESSES: dict[str, tuple[Callable[[], Client], ...]] = {
    "OUTSIDE → SEARCHING": (make,),
    "SEARCHING → SERVED": (lambda: after(make(), answers()), lambda: after(lost(), refuses, answers())),
    "SERVED → RETURNING": (lost, lambda: after(member()[0], waits)),
    "SERVED → SEARCHING": (
        lambda: after(member()[0], sends_away, ends),
        lambda: after(make(), answers(), is_reset),
    ),
    "RETURNING → SERVED": (lambda: after(lost(), answers()),),
    "RETURNING → SEARCHING": (
        lambda: after(lost(), refuses),
        lambda: after(lost(), stranger),
        lambda: after(lost(), waits),
    ),
    "SERVED → DISMISSED": (
        lambda: hears(wire.Eviction("silent")),
        lambda: hears(wire.Finished(membership.Finish(""), "0" * 64)),
        lambda: hears(wire.Aborted(membership.Abort("", "w1 raised"), "0" * 64)),
        lambda: hears(wire.Error("protocol", "it is rude")),
        lambda: hears(wire.NewView(1, ViewPatch.between(VIEW, WITHOUT))),
    ),
    "SERVED → ENDING": (lambda: after(member()[0], Client.stop),),
    "DISMISSED → ENDING": (lambda: after(hears(wire.Eviction("silent")), Client.stop),),
    "ENDING → OVER": (lambda: after(member()[0], Client.stop, ends), lambda: after(member()[0], Client.stop, breaks)),
    "DISMISSED → OVER": (
        lambda: after(hears(wire.Eviction("silent")), ends),
        lambda: after(hears(wire.Eviction("silent")), breaks),
    ),
    "SERVED → OVER": (lambda: after(make(), answers(), ends), lambda: after(member()[0], breaks)),
    "SEARCHING → OVER": (
        lambda: after(make(), waits),
        lambda: after(make(), answers(FAILED)),
        lambda: after(make(), stranger),
        lambda: after(make(), answers(STANDBY)),
        lambda: after(make(), Client.stop),
        lambda: after(make(), breaks),
    ),
    "RETURNING → OVER": (
        lambda: after(lost(), hears_of_failure),
        lambda: after(lost(), Client.stop),
        lambda: after(lost(), breaks),
    ),
    "OUTSIDE → OVER": (lambda: after(unstarted(), Client.stop),),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(module) == list(WITNESSES)
    assert states(module) == set(ClientState.__members__)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = watch(monkeypatch, Client)
    WITNESSES[row][case]()
    assert changes[-1] == row


def test_nothing_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = watch(monkeypatch, Client)
    for family in ("failover", "handovers"):
        for seed in range(10):
            assert simulate(FAMILIES[family](seed)).violation is None
    assert set(changes) <= set(WITNESSES)
    assert len(set(changes)) > 8


def test_links_that_break_again_and_again_before_the_first_view_end_the_search_for_a_coordinator() -> None:
    client, now, times = make(), 2.0, []
    while client.end is None:
        introduce(client, serve(), now)
        times.append(now)
        assert client._link is not None
        client.ended(client._link, in_order=False, now=now)
        if client.deadline is not None:
            now = client.deadline
            client.tick(now)
    assert isinstance(client.end, CoordinatorLost)
    assert "has ended" in str(client.end)
    assert 55.0 < now - 2.0 < 70.0  # as long as it looks for the first one
    assert len(times) < 30  # the pauses double, so the others' last call is not put off without an end
    assert times[1] - times[0] < 0.2


def test_coordinator_that_is_silent_before_the_first_view_is_waited_for_as_it_may_only_stand_still() -> None:
    client = make(standby=1000)
    introduce(client, serve(), 0.0)
    for quarter in range(1, 400):  # if its host is gone, the system tells
        client.tick(quarter / 4)
    assert (client.state, client.end) == (ClientState.SERVED, None)


def test_worker_that_begins_anew_says_that_it_moves_as_an_end_in_order_would_prove_its_death() -> None:
    client = make()
    link, _ = introduce(client, serve(), 0.0)
    client.ended(link, in_order=False, now=1.0)
    (leave,) = drain(client, Leave)
    assert leave == Leave(link, wire.encode(wire.Moved()))


def test_message_that_is_not_allowed_before_the_first_view_ends_the_worker() -> None:
    client = after(make(), answers())
    assert client._link is not None
    client.receive(client._link, b'{"this is": "no message"}\n', 2.0)
    with pytest.raises(CoordinatorLost, match="sent what the protocol does not allow"):
        client.started()
