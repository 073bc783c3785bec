from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time

import pytest

from ef_common.control.coordinator import Coordinator
from ef_common.control.serving import ServerLoop
from ef_common.control.sockets import listen
from ef_common.core import membership
from ef_common.core.membership import Settings
from ef_common.core.progress import Limits
from ef_common.core.watermark import Watermark
from ef_common.errors import AuthenticationError, Evicted, JobFinished, Left, UsageError
from ef_common.protocol import wire
from ef_common.protocol.auth import Token
from ef_common.protocol.server import CoordinatorServer
from ef_common.protocol.view_patch import Span
from tests.control.conftest import in_loop

TOKEN = Token("hunter2")


@pytest.mark.parametrize(
    ("host", "token", "lacks"), [("", None, True), ("127.0.0.1", None, False), ("", Token("hunter2"), False)]
)
def test_coordinator_says_that_it_lacks_a_token_where_others_would_reach_it_and_it_listens(host, token, lacks, caplog):
    one = Coordinator((host, 0), token=token)
    one.start()
    try:
        assert sum("There is no job token" in message for message in caplog.messages) == lacks
        other = Coordinator((host, one.address[1]), token=token)
        with pytest.raises(OSError, match="in use"):
            other.start()
        assert sum("There is no job token" in message for message in caplog.messages) == lacks
    finally:
        one.stop()


# ---------------------------------------------------------------- views


def test_coordinator_first_view_is_the_same_for_all(form):
    _, workers = form(3)
    views = [worker.client.next_view(0) for worker in workers]
    assert views[0] == views[1] == views[2]
    assert views[0].generation == 1
    assert [member.address for member in views[0].members] == ["127.0.0.1"] * 3
    assert [worker.views_noticed for worker in workers] == [[1]] * 3


def test_coordinator_lost_connection_makes_a_view_of_the_survivors(form):
    _, workers = form(3)
    workers[1].client.stop()
    views = [workers[rank].client.next_view(1) for rank in (0, 2)]
    assert views[0] == views[1]
    assert views[0].ids == (workers[0].client.member.id, workers[2].client.member.id)
    assert workers[0].views_noticed == [1, 2]


def test_coordinator_silent_worker_is_evicted(serve, join, dial):
    coordinator = serve(2, heartbeat_timeout_s=0.4)
    silent = dial(coordinator)
    assert isinstance(silent.introduce("silent"), wire.Welcome)
    worker = join(coordinator, "lively").started()
    assert worker.client.next_view(0).world_size == 2
    assert worker.client.next_view(1).ids == ("lively",)
    kinds = [type(message) for message in silent.hear_all()]
    assert kinds == [wire.NewView, wire.Eviction]


def test_coordinator_that_was_stopped_itself_evicts_nobody(form):
    coordinator, workers = form(2, heartbeat_timeout_s=0.4)
    asleep = threading.Event()

    def sleep() -> None:
        asleep.set()
        time.sleep(1.5)

    coordinator._loop.call_soon_threadsafe(sleep)
    assert asleep.wait(10)
    workers[0].client.send("leave")  # answered once it is awake
    while not workers[0].client.change_pending:
        time.sleep(0.01)
    time.sleep(0.5)
    assert workers[0].views_noticed == [1]


def test_coordinator_newcomer_is_admitted_at_the_boundary(form, join):
    coordinator, workers = form(2)
    newcomer = join(coordinator, "late").started()
    assert newcomer.warm_up is True
    newcomer.client.send("ready")
    for worker in workers:
        while not worker.client.change_pending:
            time.sleep(0.01)
        worker.client.send("at_boundary", 1)
    view = newcomer.client.next_view(0)
    assert view == workers[0].client.next_view(1) == workers[1].client.next_view(1)
    assert view.ids[2] == "late"
    assert view.admitted_at == 2
    assert not workers[0].client.change_pending


def test_coordinator_more_nodes_than_wanted_wait_as_spares(serve, join):
    coordinator = serve(1, max_nodes=1)
    first = join(coordinator, "first", node="a").started()
    assert first.warm_up is False
    assert join(coordinator, "spare", node="b").started().warm_up is True


def test_coordinator_early_spare_is_told_to_warm_up(serve, join):
    coordinator = serve(1, max_nodes=1)
    first = join(coordinator, "a0", node="a", local_world_size=2)
    while coordinator._population < 1:
        time.sleep(0.01)
    spare = join(coordinator, "b0", node="b")
    while coordinator._population < 2:
        time.sleep(0.01)
    assert spare.warm_up is None  # node a is not complete, so nobody starts
    second = join(coordinator, "a1", node="a", local_world_size=2)
    assert [worker.started().warm_up for worker in (first, spare, second)] == [False, True, False]


def test_coordinator_leaver_is_told_that_it_left(form):
    _, workers = form(2, min_nodes=1, max_nodes=2, last_call_s=3600)
    workers[0].client.send("leave")
    for worker in workers:
        while not worker.client.change_pending:
            time.sleep(0.01)
        worker.client.send("at_boundary", 1)
    assert workers[1].client.next_view(1).world_size == 1
    with pytest.raises(Left):
        workers[0].client.next_view(1)


def test_coordinator_last_leaver_is_told_that_it_left(form):
    _, (worker,) = form(1)
    worker.client.send("leave")
    worker.client.send("at_boundary", 1)
    with pytest.raises(Left):
        worker.client.next_view(1)


def test_coordinator_closed_job_tells_newcomers(form, join):
    coordinator, workers = form(1)
    warming = join(coordinator, "warming").started()
    workers[0].client.send("close")
    with pytest.raises(JobFinished):
        warming.client.next_view(0)
    with pytest.raises(JobFinished):
        join(coordinator, "late").started()


def test_coordinator_logs_the_reason_of_each_view(form, caplog):
    caplog.set_level(logging.INFO)
    _, workers = form(2)
    workers[0].client.send("bye")
    workers[1].client.next_view(1)
    reasons: list[str] = []
    while len(reasons) < 2:  # the view is sent first, and logged then
        reasons = [record.getMessage() for record in caplog.records if "view" in record.getMessage()]
    assert reasons[0] == "view 1, 2 members: 2 workers start"
    assert reasons[1].endswith("gone (it said goodbye)")


# ---------------------------------------------------------------- places


def members(serve, dial, *names):
    """Raw peers in a view."""
    coordinator = serve(len(names))
    peers = [dial(coordinator) for _ in names]
    for peer, name in zip(peers, names, strict=True):
        assert isinstance(peer.introduce(name), wire.Welcome)
    for peer in peers:
        assert isinstance(peer.hear(), wire.NewView)
    return coordinator, peers


def in_order(peer, other):
    """All that the peer has said so far has been heard: what it relays now has come to the other one."""
    peer.say(wire.Relay(1, "said", b""))
    while not isinstance(other.hear(), wire.Relayed):
        pass


def test_coordinator_tells_a_newcomer_the_newest_place_at_once_and_with_each_heartbeat(serve, dial):
    coordinator, (a, b) = members(serve, dial, "a", "b")
    a.say(wire.Heartbeat(Watermark(0, 40)))
    b.say(wire.Heartbeat(Watermark(1, 7, (3,))))
    in_order(a, b)
    in_order(b, a)
    newcomer = dial(coordinator)
    assert isinstance(newcomer.introduce("late"), wire.Welcome)
    assert newcomer.hear() == wire.JobWatermark(Watermark(1, 7, (3,)))
    a.say(wire.Heartbeat(Watermark(1, 9, (3,))))
    a.say(wire.Heartbeat(None))
    in_order(a, b)
    newcomer.say(wire.Heartbeat(Watermark(9, 9)))  # nobody's place but its own
    assert newcomer.hear() == wire.JobWatermark(Watermark(1, 9, (3,)))


def test_coordinator_forgets_the_place_of_a_member_that_is_gone(serve, dial):
    coordinator, (a, b) = members(serve, dial, "a", "b")
    a.say(wire.Heartbeat(Watermark(5, 5)))
    b.say(wire.Heartbeat(Watermark(2, 2)))
    a.say(wire.Bye())
    b.say(membership.Suspected("", 1))
    view = b.hear()
    assert isinstance(view, wire.NewView)
    assert view.patch.members == (Span(1, 2),)
    newcomer = dial(coordinator)
    assert isinstance(newcomer.introduce("late"), wire.Welcome)
    assert newcomer.hear() == wire.JobWatermark(Watermark(2, 2))


def test_coordinator_that_knows_of_no_place_tells_none(serve, dial):
    coordinator, (a,) = members(serve, dial, "a")
    newcomer = dial(coordinator)
    assert isinstance(newcomer.introduce("late"), wire.Welcome)
    newcomer.say(wire.Heartbeat(None))
    a.say(membership.Closed(""))
    assert isinstance(newcomer.hear(), wire.Finished)


def test_coordinator_hears_the_heartbeat_of_one_who_has_left(serve, dial):
    coordinator, (a, b) = members(serve, dial, "a", "b")
    a.say(membership.Leaving(""))
    for peer in (a, b):
        assert isinstance(peer.hear(), membership.Announce)
        peer.say(membership.AtBoundary("", 1))
    assert isinstance(a.hear(), wire.NewView)
    a.say(wire.Heartbeat(Watermark(8, 8)))
    a.say(wire.Bye())
    assert a.hear() is None
    newcomer = dial(coordinator)
    assert isinstance(newcomer.introduce("late"), wire.Welcome)
    b.say(membership.Closed(""))
    assert isinstance(newcomer.hear(), wire.Finished)


# ---------------------------------------------------------------- relay


def test_coordinator_relays_to_the_other_members_of_the_view(form):
    _, workers = form(3)
    boxes = [worker.client.bootstrap(1) for worker in workers]
    boxes[0].put("address", b"\x00tcp")
    assert [box.get("address") for box in boxes] == [b"\x00tcp"] * 3


def test_coordinator_drops_relays_of_other_views_and_of_strangers_to_the_view(form, dial):
    coordinator, workers = form(2)
    outsider = dial(coordinator)
    assert isinstance(outsider.introduce("outsider"), wire.Welcome)
    outsider.say(wire.Relay(1, "key", b"from outside"))
    workers[0].client.bootstrap(7).put("key", b"from the future")
    workers[0].client.bootstrap(1).put("key", b"right")
    assert workers[1].client.bootstrap(1).get("key") == b"right"


# ---------------------------------------------------------------- authentication


def test_coordinator_with_token_accepts_workers_that_know_it(form):
    _, workers = form(2, token=TOKEN)
    assert workers[0].client.next_view(0).world_size == 2


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(TOKEN, Token("other")), (TOKEN, None), (None, TOKEN)],
    ids=["other", "worker has none", "coordinator has none"],
)
def test_coordinator_refuses_a_worker_with_another_token(serve, join, ours, theirs, caplog):
    coordinator = serve(token=ours)
    for i in range(3):
        with pytest.raises(AuthenticationError, match="ELASTICFLOW_TOKEN"):
            join(coordinator, f"w{i}", theirs).started()
    warnings = [r.getMessage() for r in caplog.records if "wrong token" in r.getMessage()]
    assert len(warnings) == 1
    assert "hunter2" not in caplog.text


def test_coordinator_without_token_listens_on_loopback_only_and_says_so(caplog):
    coordinator = Coordinator(("0.0.0.0", 0))
    coordinator.start()
    try:
        assert coordinator.address[0] == "127.0.0.1"
    finally:
        coordinator.stop()
    assert caplog.text.count("ELASTICFLOW_TOKEN") == 1


def test_coordinator_with_token_listens_on_all_interfaces(join):
    coordinator = Coordinator(("", 0), token=TOKEN)
    coordinator.start()
    try:
        worker = join(("127.0.0.1", coordinator.address[1]), "w", TOKEN)
        assert worker.started().client.next_view(0).members[0].address == "127.0.0.1"
    finally:
        coordinator.stop()


# ---------------------------------------------------------------- life


def test_coordinator_wait_until_idle_waits_for_the_last_worker(form):
    coordinator, workers = form(2)
    assert not coordinator.wait_until_idle(0.05)
    for worker in workers:
        worker.client.send("bye")
        worker.client.stop()
    assert coordinator.wait_until_idle(10)


def test_coordinator_on_a_port_in_use_raises_os_error(serve):
    with pytest.raises(OSError, match="in use"):
        Coordinator(serve().address).start()


def test_coordinator_stop_may_be_repeated_and_frees_the_port(serve):
    coordinator = serve()
    coordinator.stop()
    coordinator.stop()
    socket.create_server(coordinator.address).close()


def test_coordinator_with_bad_heartbeat_timeout_raises_usage_error():
    with pytest.raises(UsageError, match="heartbeat_timeout=0"):
        Coordinator(("", 0), heartbeat_timeout_s=0)
    with pytest.raises(UsageError, match="before start"):
        _ = Coordinator(("", 0)).address


def test_coordinator_evicted_worker_is_told_by_its_client(form):
    coordinator, workers = form(2)
    server = coordinator._server
    victim = server.workers[workers[0].client.member.id]
    last_words = wire.encode(wire.Eviction("silent"))
    in_loop(coordinator, lambda now: server._depart(victim, "test", last_words=last_words))
    with pytest.raises(Evicted, match="silent"):
        workers[0].client.next_view(1)
    assert workers[0].client.change_pending  # a world of one has to ask


def test_connection_that_was_accepted_in_the_last_moment_is_closed() -> None:
    loop = asyncio.SelectorEventLoop()
    listener = listen(("127.0.0.1", 0))
    serves = {"settings": Settings(), "heartbeat_timeout_s": 2.0, "limits": Limits(), "standby": False, "name": "c"}
    server = CoordinatorServer(0.0, token=None, **serves)
    serving = ServerLoop(loop, listener, server, on_population=lambda number: None)
    with socket.create_connection(listener.getsockname()) as stranger:
        serving._accept()
        serving.stop()
        serving.end_all()
        serving.let_sockets_close()
        stranger.settimeout(30.0)
        assert stranger.recv(1) == b""
    loop.close()
