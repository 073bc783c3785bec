"""A peer that knows the token, and lies: it can leave, and have the job end, but it can do nothing in others' names."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ef_common.core import membership
from ef_common.core.progress import Progress
from ef_common.core.quorum import ChainLink
from ef_common.core.view import Member, View
from ef_common.errors import JobFailed
from ef_common.protocol import fields, known_standbys, sessions, wire
from ef_common.protocol.auth import Token, new_nonce
from ef_common.protocol.server import CoordinatorServer
from tests.control.lies import ABSURD, calls
from tests.protocol.returning import returning
from tests.waiting import poll_until

GUARD_S = 30.0

TOKEN = Token("hunter2")
HONEST = ("w0", "w1")
NAMES = (*HONEST, "liar", "ghost")


# Or an honest worker comes to a boundary.
SCRIPTS = st.lists(calls(NAMES) | calls(NAMES) | st.sampled_from(HONEST), min_size=1, max_size=6)


class Faults(logging.Handler):
    """Faults of the coordinator's own code."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@pytest.fixture
def faults() -> Iterator[list[str]]:
    handler, logger = Faults(), logging.getLogger("ef_common")
    logger.addHandler(handler)
    yield handler.found
    logger.removeHandler(handler)


@pytest.mark.timeout(300)
@settings(
    max_examples=150,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(founder=st.booleans(), script=SCRIPTS)
def test_others_go_on_whatever_a_peer_with_the_token_says(serve, join, dial, faults, founder, script):
    """The liar is a member from the start, or comes then; the honest ones stay connected, and get on without it."""
    coordinator = serve(3 if founder else 2, token=TOKEN)
    server = coordinator._server
    key, peers = new_nonce(), []
    if founder:
        peers.append(dial(coordinator))
        assert isinstance(peers[0].introduce("liar", TOKEN, key=key), wire.Welcome)
    workers = [join(coordinator, name, TOKEN) for name in HONEST]
    for worker in workers:
        assert worker.started().warm_up is False
    for call in script:
        if isinstance(call, str):
            client = workers[HONEST.index(call)].client
            client.send("at_boundary", client.next_view(0).generation)
            continue
        name, comes_back, said = call
        peers.append(dial(coordinator))
        peers[-1].introduce(name, TOKEN, key=key if name == "liar" else "", returning=comes_back)
        with contextlib.suppress(OSError):
            for message in said:
                peers[-1].say(message)
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.socket.shutdown(socket.SHUT_WR)
            peer.hear_all()  # all that it has said has been heard
        peer.close()
    poll_until(lambda: set(server.workers) <= set(HONEST))
    assert set(server.workers) == set(HONEST)  # nobody has taken their connections
    assert server.state.generation < ABSURD // 2
    clients = [worker.client for worker in workers]
    newest = max(client.next_view(0).generation for client in clients)
    told = set()

    def are_together() -> bool:
        views = [client.next_view(0) for client in clients]
        for client, view in zip(clients, views, strict=True):
            if view.generation <= newest and (client, view.generation) not in told:
                told.add((client, view.generation))
                client.send("suspect", view.generation)
        return views[0] == views[1] and views[0].generation > newest and set(views[0].ids) == set(HONEST)

    poll_until(are_together)
    for worker in workers:
        worker.stop()
    coordinator.stop()
    assert faults == []


# ---------------------------------------------------------------- single lies


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def last_word(peer) -> wire.FromCoordinator | None:
    return peer.hear_all()[-1]


@pytest.fixture
def liar_and_worker(serve, join, dial):
    """Both are members of view 1."""
    coordinator, key = serve(2, token=TOKEN), new_nonce()
    liar = dial(coordinator)
    assert isinstance(liar.introduce("liar", TOKEN, key=key), wire.Welcome)
    worker = join(coordinator, "w0", TOKEN).started()
    assert isinstance(liar.hear(), wire.NewView)
    return coordinator, liar, key, worker


A_VIEW = View(1, (Member("liar", "n", "127.0.0.1"), Member("w0", "n", "127.0.0.1")), 1)
COMES_BACK = returning([ChainLink(A_VIEW)])


@pytest.mark.parametrize("message", [COMES_BACK[0], wire.Follow(1, leads=True)], ids=lambda one: type(one).__name__)
def test_member_that_comes_back_without_having_been_away_is_refused(liar_and_worker, caplog, message):
    _, liar, _, worker = liar_and_worker
    liar.say(message)
    assert "is not expected now" in last_word(liar).reason
    assert worker.client.next_view(1).ids == ("w0",)
    assert len(refusals(caplog)) == 1


@pytest.mark.parametrize(
    "messages", [(membership.AtBoundary("", 1),), (*COMES_BACK, *COMES_BACK)], ids=["before", "twice"]
)
def test_member_that_comes_back_and_does_not_tell_where_it_stands_once_is_refused(
    liar_and_worker, dial, caplog, faults, messages
):
    coordinator, _, key, worker = liar_and_worker
    worker.client.send("at_boundary", 1)
    again = dial(coordinator)
    assert isinstance(again.introduce("liar", TOKEN, key=key, returning=True), wire.Welcome)
    again.say(*messages)
    assert "is not expected now" in last_word(again).reason
    assert worker.client.next_view(1).ids == ("w0",)
    assert len(refusals(caplog)) == 1
    assert faults == []


@pytest.mark.parametrize("returning", [False, True])
def test_process_that_ends_before_it_has_told_where_it_stands_is_not_taken_for_gone(liar_and_worker, dial, returning):
    """It may have been in a view of another coordinator."""
    coordinator, liar, key, worker = liar_and_worker
    if returning:
        liar = dial(coordinator)
        assert isinstance(liar.introduce("liar", TOKEN, key=key, returning=True), wire.Welcome)
    liar.end()
    assert worker.client.next_view(1).ids == ("w0",)
    assert coordinator._server.state.gone == (frozenset() if returning else {"liar"})


def test_member_that_is_refused_is_not_taken_for_gone(liar_and_worker):
    """It may not read why, and go on with another coordinator."""
    coordinator, liar, _, worker = liar_and_worker
    liar.say(COMES_BACK[0])
    assert worker.client.next_view(1).ids == ("w0",)
    assert coordinator._server.state.gone == frozenset()


def test_worker_that_is_no_member_and_knows_of_newer_views_that_do_not_matter_hears_that_it_is_out(
    liar_and_worker, dial
):
    coordinator, *_ = liar_and_worker
    alone = (Member("x", "n", "127.0.0.1"),)
    links = (ChainLink(View(1, alone, 1)), ChainLink(View(3, alone, 1)))
    superseded = dial(coordinator)
    assert isinstance(superseded.introduce("x", TOKEN, returning=True), wire.Welcome)
    superseded.say(*returning(links))
    assert "away for too long" in next(m.reason for m in superseded.hear_all() if isinstance(m, wire.Eviction))
    assert coordinator._server.state.generation == 1


def test_stranger_that_has_settled_in_another_view_of_the_same_generation_deposes_nobody(liar_and_worker, dial, caplog):
    coordinator, liar, _, worker = liar_and_worker
    liar.close()
    ours = worker.client.next_view(1)
    assert (ours.generation, ours.ids) == (2, ("w0",))
    others = View(2, (Member("w0", "n", "127.0.0.1"), Member("ghost", "n", "127.0.0.1")), 1, base=1)
    ghost = dial(coordinator)
    assert isinstance(ghost.introduce("ghost", TOKEN, returning=True), wire.Welcome)
    ghost.say(*returning([ChainLink(A_VIEW), ChainLink(others)], settled=2))
    ghost.hear_all()
    assert coordinator._server.state.view == ours
    assert not worker.client._protocol.end
    assert refusals(caplog) == ["worker ghost names views that nobody can have issued"]


def test_member_that_makes_up_a_promise_raises_no_generation(serve, join, dial):
    """It names no view that would be news, and the others, who are most, have seen none."""
    coordinator, key = serve(3, token=TOKEN), new_nonce()
    liar, workers = dial(coordinator), [join(coordinator, name, TOKEN) for name in HONEST]
    liar.introduce("liar", TOKEN, key=key)
    for worker in workers:
        worker.started()
    again = dial(coordinator)
    again.introduce("liar", TOKEN, key=key, returning=True)
    again.say(*returning([ChainLink(coordinator._server.state.view)], promised=ABSURD))
    assert sorted(workers[0].client.next_view(1).ids) == sorted(HONEST)
    assert coordinator._server.state.generation == 2


@pytest.mark.parametrize("returning", [False, True])
def test_peer_with_the_name_of_another_is_refused_also_while_its_line_is_broken(
    liar_and_worker, dial, caplog, returning
):
    coordinator, _, _, worker = liar_and_worker
    assert last_word_of_an_impostor(coordinator, dial, returning).reason == "worker w0 is somebody else"
    before = coordinator._server.workers["w0"]
    coordinator._loop.call_soon_threadsafe(lambda: coordinator._server._forget(before))
    poll_until(lambda: "w0" not in coordinator._server.workers)
    assert last_word_of_an_impostor(coordinator, dial, returning).reason == "worker w0 is somebody else"
    assert len(refusals(caplog)) == 1
    assert worker.views_noticed == [1]


def last_word_of_an_impostor(coordinator, dial, returning):
    impostor = dial(coordinator)
    answer = impostor.introduce("w0", TOKEN, returning=returning)
    assert impostor.hear() is None
    return answer


def test_keys_of_workers_that_are_gone_are_forgotten(serve, dial):
    coordinator = serve(1, token=TOKEN)
    for index in range(20):
        peer = dial(coordinator)
        peer.introduce(f"n{index}", TOKEN, returning=True)
        peer.close()
    poll_until(lambda: not coordinator._server.workers)
    assert coordinator._server._admission.known == set()


def test_what_a_worker_has_said_is_refused_from_another_connection(liar_and_worker, dial, monkeypatch, join, caplog):
    """Also by one that knows the token: it is another challenge."""
    coordinator, _, _, worker = liar_and_worker
    heard = []
    take = CoordinatorServer._take
    monkeypatch.setattr(CoordinatorServer, "_take", lambda self, *args: (heard.append(args[1]), take(self, *args)))
    newcomer = join(coordinator, "new", TOKEN).started()
    newcomer.client.send("ready")
    poll_until(lambda: len(heard) >= 2)
    newcomer.stop()
    poll_until(lambda: "new" not in coordinator._server.workers)
    replay = dial(coordinator)
    replay.say(b"\n".join(heard) + b"\n")
    assert last_word(replay).code == "authentication"
    assert "new" not in coordinator._server.workers
    assert worker.views_noticed == [1]


def test_liar_that_ends_the_job_ends_it_for_all(liar_and_worker):
    """It may: whoever is a member may fail."""
    _, liar, _, worker = liar_and_worker
    liar.say(membership.Failed("", "because", fatal=True))
    with pytest.raises(JobFailed, match="because"):
        worker.client.next_view(1)


def test_progress_in_a_view_that_does_not_exist_is_refused(liar_and_worker):
    _, liar, _, worker = liar_and_worker
    liar.say(wire.Heartbeat(None, Progress(2, 0, True, "step", 1.0)))
    assert "view 2, which does not exist" in last_word(liar).reason
    assert worker.client.next_view(1).ids == ("w0",)


def test_fault_in_the_watch_does_not_end_it(serve, join, dial, monkeypatch):
    """Whoever falls silent is still noticed."""
    coordinator = serve(2, token=TOKEN, heartbeat_timeout_s=0.4)
    monkeypatch.setattr(CoordinatorServer, "_look_for_hung", lambda self, now: 1 / 0)
    silent = dial(coordinator)
    assert isinstance(silent.introduce("silent", TOKEN), wire.Welcome)
    worker = join(coordinator, "w0", TOKEN).started()
    assert worker.client.next_view(1).ids == ("w0",)


def test_addresses_of_standbys_are_bounded(serve, dial, monkeypatch):
    monkeypatch.setattr(known_standbys, "MAX_STANDBYS", 4)
    coordinator = serve(1, token=TOKEN)
    for index in range(9):
        assert isinstance(dial(coordinator).introduce(f"n{index}", TOKEN, standby=1 + index), wire.Welcome)
    assert len(coordinator._server.standbys.addresses) <= 4


def test_workers_are_bounded_and_one_that_comes_back_is_none_more(serve, join, dial, monkeypatch, caplog):
    monkeypatch.setattr(sessions, "MAX_WORKERS", 2)
    coordinator, key = serve(1, token=TOKEN), new_nonce()
    worker = join(coordinator, "w0", TOKEN).started()
    peers = [dial(coordinator) for _ in range(3)]
    assert isinstance(peers[0].introduce("a", TOKEN, key=key), wire.Welcome)
    assert peers[1].introduce("b", TOKEN).reason == "2 are connected"
    assert isinstance(peers[2].introduce("a", TOKEN, key=key, returning=True), wire.Welcome)
    assert worker.views_noticed == [1]
    assert len(refusals(caplog)) == 1


def test_worker_with_which_a_view_would_not_fit_into_a_message_is_refused(serve, join, dial, monkeypatch):
    size = fields.size_of(Member("w0", "node-w0", "127.0.0.1"))
    monkeypatch.setattr(wire, "MAX_MEMBERS_BYTES", 2 * size + 10)
    coordinator = serve(1, token=TOKEN)
    worker = join(coordinator, "w0", TOKEN).started()
    peers = [dial(coordinator) for _ in range(3)]
    assert isinstance(peers[0].introduce("w1", TOKEN), wire.Welcome)
    assert peers[1].introduce("w2", TOKEN).reason == "2 are connected, all that fit in a view"
    worker.stop()
    poll_until(lambda: len(coordinator._server.workers) == 1)
    assert isinstance(peers[2].introduce("w3", TOKEN), wire.Welcome)
