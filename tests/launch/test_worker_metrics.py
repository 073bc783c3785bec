"""What a worker tells of the training."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from http.server import HTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import pytest

from ef_common.core.room import NO_DEMAND, Demand, Room
from ef_common.core.view import Member, View
from ef_common.launch import port_page
from ef_common.launch.environment import read_environment
from ef_common.launch.worker_metrics import MetricsPage, metrics_page
from ef_common.session.stats import Stats
from tests.waiting import poll_until

WORKER = Member("a", "node", "")
OTHER = Member("b", "node", "")
VIEW = View(7, (WORKER, OTHER))


def session(**changes: Any) -> Any:
    facts = {"worker": WORKER, "view": VIEW, "newcomer": False, "job": SimpleNamespace(room=changes.pop("room", None))}
    figures = {name: changes.pop(name) for name in ("replaces", "checkpoint_step") if name in changes}
    stats = Stats(num_samples_trained=96.0, step=12, paused_s=0.25, **figures)
    return SimpleNamespace(**{**facts, "stats": stats, **changes})


def told(one: Any) -> dict[str, float]:
    lines = MetricsPage(0, one, clock=lambda: 0.0).text().splitlines()
    return {
        name.removeprefix("elasticflow_"): float(value) for name, _, value in (line.partition(" ") for line in lines)
    }


def test_member_tells_of_its_view_and_of_the_training() -> None:
    found = told(session())
    assert (found["workers"], found["nodes"], found["view_generation"], found["step"]) == (2, 1, 7, 12)
    assert (found["samples_total"], found["pause_seconds_total"], found["nodes_wanted"]) == (96, 0.25, 0)


def test_what_the_members_want_is_told() -> None:
    assert told(session(room=Room(Demand(7, 1, 3), 2, 0, 0, 1, 4)))["nodes_wanted"] == 3


def test_node_more_is_wanted_as_long_as_the_one_is_there_that_it_replaces() -> None:
    room = Room(Demand(7, 1, 2), 2, 0, 0, 1, 4)
    assert told(session(room=room, replaces="b"))["nodes_wanted"] == 3
    assert told(session(room=room, replaces="gone"))["nodes_wanted"] == 2
    assert told(session(replaces="b"))["nodes_wanted"] == 0


def test_stragglers_are_told_by_their_addresses() -> None:
    members = tuple(Member(name, name, address) for name, address in (("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "")))
    room = replace(Room(NO_DEMAND, 3, 0, 0, 1, 4), stragglers=("b", "c", "gone"))
    found = told(session(view=View(7, members), room=room))
    assert [name for name in found if "straggler" in name] == ['straggler{address="10.0.0.2"}']


def test_newest_checkpoint_is_told_by_those_who_know_of_it_and_where_rank_0_is_by_all_members() -> None:
    first = replace(WORKER, address="10.0.0.1")
    view = View(7, (first, OTHER))
    assert not {"checkpoint_step", "rank_zero"} & set(told(session()))
    assert told(session(view=view, checkpoint_step=10))["checkpoint_step"] == 10
    assert told(session(view=view, worker=OTHER))['rank_zero{address="10.0.0.1"}'] == 1
    assert not any("rank_zero" in name for name in told(session(view=view, newcomer=True)))


@pytest.mark.parametrize(
    "change", [{"newcomer": True}, {"view": View(0, (WORKER,))}, {"view": View(8, (OTHER,))}], ids=str
)
def test_worker_that_is_no_member_tells_of_no_workers(change: dict[str, Any]) -> None:
    assert told(session(**change))["workers"] == 0


@pytest.fixture
def page() -> Iterator[MetricsPage]:
    page = MetricsPage(0, session())
    page.start()
    assert page.wait_until_open(10.0)
    yield page
    page.stop()


def ask(page: MetricsPage, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{page.port}{path}", timeout=10.0) as answer:
        return str(answer.read().decode())


def test_page_answers_whatever_others_send(page: MetricsPage) -> None:
    assert "elasticflow_workers 2\n" in ask(page)
    with pytest.raises(HTTPError, match="404"):
        ask(page, "/else")
    with (
        socket.create_connection(("127.0.0.1", page.port)) as silent,
        socket.create_connection(("127.0.0.1", page.port)) as rude,
    ):
        rude.sendall(b"\0" * 100 + b"\r\n\r\n")
        assert "elasticflow_workers 2\n" in ask(page)
        silent.close()


def test_page_answers_under_both_versions_of_ip_and_asks_no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_name_server(*_: object) -> str:
        raise AssertionError("it is asked")

    monkeypatch.setattr(socket, "getfqdn", ask_name_server)
    page = MetricsPage(0, session())
    page.start()
    assert page.wait_until_open(10.0)
    hosts = ["127.0.0.1", *(["[::1]"] if socket.has_dualstack_ipv6() else [])]
    for host in hosts:
        with urllib.request.urlopen(f"http://{host}:{page.port}/metrics", timeout=10.0) as answer:
            assert b"elasticflow_nodes 1\n" in answer.read()
    page.stop()


def test_page_waits_for_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_page, "_AGAIN_S", 0.01)
    with socket.create_server(("", 0)) as other:
        page = MetricsPage(other.getsockname()[1], session())
        page.start()
        assert not page.wait_until_open(0.1)
    assert page.wait_until_open(10.0)
    page.stop()


def test_first_worker_of_a_node_has_the_page_if_the_environment_names_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[MetricsPage] = []
    monkeypatch.setattr(MetricsPage, "start", lambda page: started.append(page))
    for text, rank in (("0", "0"), ("29401", "1"), ("29401", "0")):
        environ = {"ELASTICFLOW_METRICS_PORT": text, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
        metrics_page(session(), read_environment(environ))
    assert [page.port for page in started] == [29401]


def test_page_whose_thread_has_failed_refuses_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HTTPServer, "handle_request", lambda server: 1 / 0)
    page = MetricsPage(0, session())
    page.start()
    assert page.wait_until_open(10.0)
    poll_until(lambda: "the thread that answers with metrics has failed: ZeroDivisionError" in caplog.text)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", page.port), timeout=10.0)
    page.stop()
