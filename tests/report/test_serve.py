"""The live server: what it shows, to whom, and that it dies of nothing that a client or a log does."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ef_common.errors import UsageError
from ef_common.launch import run_directory
from ef_common.protocol.auth import Token, page_key
from ef_common.testing.ports import free_ports
from tests.report.generated import BEGAN, small

pytest.importorskip("prometheus_client", reason="needs the extra `live`")
pytest.importorskip("starlette", reason="needs the extra `live`")
pytest.importorskip("uvicorn", reason="needs the extra `live`")

from ef_common.report import live as live_module
from ef_common.report import waiting
from ef_common.report.live import Live
from ef_common.report.serve import Server

SECRET = "a secret of the job"
KEY = page_key(Token(SECRET))
GUARD_S = 60.0


@contextmanager
def serving(run_dir: Path, *, token: Token | None = None) -> Iterator[Server]:
    server, started = Server(run_dir, ("127.0.0.1", 0), token=token), threading.Event()
    thread = threading.Thread(target=server.run, kwargs={"on_start": started.set})
    thread.start()
    try:
        assert started.wait(GUARD_S)
        yield server
    finally:
        server.stop()
        thread.join(GUARD_S)
        assert not thread.is_alive()


def get(server: Server, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(*server.address, timeout=GUARD_S)
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


class Subscriber:
    """Reads the server-sent events."""

    def __init__(self, server: Server) -> None:
        self.connection = http.client.HTTPConnection(*server.address, timeout=GUARD_S)
        self.connection.request("GET", "/events")
        self.answer = self.connection.getresponse()

    def next(self, accept: Callable[[dict], bool] = lambda state: True) -> dict:
        while True:
            line = self.answer.readline().decode()
            assert line, "the server has ended the stream"
            if line.startswith("data: ") and accept(state := json.loads(line[6:])):
                return state

    def close(self) -> None:
        self.connection.close()


def test_page_shows_the_run_and_asks_for_news(tmp_path: Path) -> None:
    small(tmp_path)
    with serving(tmp_path) as server:
        status, headers, html = get(server, "/")
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert 'data-live="yes"' in html
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert get(server, "/other")[0] == 404


def test_events_tell_what_is_logged_while_they_are_read(tmp_path: Path) -> None:
    run = small(tmp_path)
    with serving(tmp_path) as server:
        subscriber = Subscriber(server)
        assert subscriber.next(lambda state: state["figures"]["step"] > 0)["figures"]["step"] == 220
        run.train(5)
        run.lose(run.members[-1])
        run.train(1)
        run.write()
        state = subscriber.next(lambda state: state["figures"]["step"] == 226)
        assert state["changes"][-1]["tone"] == "lost"
        subscriber.close()
        assert get(server, "/")[0] == 200  # a client that is gone harms nobody


def test_audit_comes_when_the_run_has_ended(tmp_path: Path) -> None:
    run = small(tmp_path)
    launcher = run_directory.this_launcher(["train.py"], max_workers=4, local=True)
    run_directory.write_launcher(tmp_path, launcher)
    with serving(tmp_path) as server:
        subscriber = Subscriber(server)
        state = subscriber.next(lambda state: state["figures"]["step"] == 220)
        assert (state["state"], state["audit"]) == ("running", None)
        run.train(1)
        run.write()
        run_directory.write_launcher(tmp_path, replace(launcher, state="ended", outcome="finished"))
        state = subscriber.next(lambda state: state["audit"] is not None)
        assert state["verdict"] == "finished"
        assert state["figures"]["step"] == 221
        assert state["audit"]["properties"]
        run_directory.write_launcher(tmp_path, launcher)  # the same command again
        run.train(1)
        run.write()
        state = subscriber.next(lambda state: state["figures"]["step"] == 222)
        assert state["audit"] is None
        subscriber.close()


def test_clocks_that_differ_from_this_machines_change_no_speed(tmp_path: Path) -> None:
    run = small(tmp_path)
    run_directory.write_launcher(tmp_path, run_directory.this_launcher(["train.py"], max_workers=4, local=True))
    for ahead_s in (-500.0, 0.0, 500.0):
        live = Live(tmp_path, clock=lambda ahead_s=ahead_s: run.now + ahead_s)
        live.update()
        run.train(10)
        run.write()
        live.update()
        run.now += 0.5
        state = json.loads(live.state())
        assert state["figures"]["samples_per_s"] > 0
        assert state["now"] == pytest.approx(run.now - BEGAN, abs=0.01)


def test_others_are_answered_while_the_run_is_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(tmp_path)
    launcher = run_directory.this_launcher(["train.py"], max_workers=4, local=True)
    run_directory.write_launcher(tmp_path, replace(launcher, state="ended", outcome="finished"))
    begun, answered = threading.Event(), threading.Event()

    def slow_audit(run_dir: Path) -> str:
        begun.set()
        assert answered.wait(GUARD_S)
        return "slow"

    monkeypatch.setattr(live_module, "_audited", slow_audit)
    live = Live(tmp_path)
    reader = threading.Thread(target=live.update)
    reader.start()
    try:
        assert begun.wait(GUARD_S)
        assert json.loads(live.state())["audit"] is None
        assert b"elasticflow_workers" in live.metrics("")[0]
    finally:
        answered.set()
        reader.join(GUARD_S)
    assert json.loads(live.state())["audit"]["why"] == "slow"


def test_run_that_has_not_logged_yet_is_served(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert get(server, "/")[0] == 200
        assert "elasticflow_workers 0.0" in get(server, "/metrics")[2]


def test_page_of_a_run_whose_directory_is_removed_ends(tmp_path: Path) -> None:
    small(tmp_path / "run")
    live = Live(tmp_path / "run")
    live.update()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(UsageError, match="the run directory is gone"):
        live.update()


def test_malformed_log_ends_the_server_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "a.jsonl").write_text("nothing\n")
    with pytest.raises(UsageError, match=r"a\.jsonl"):
        Server(tmp_path, ("127.0.0.1", 0)).run()


# ------------------------------------------------------------------------------------------------ who may look


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8642", "127.0.0.1.evil.example", "", "[::2]"])
def test_other_names_are_refused_on_the_loopback_interface(tmp_path: Path, host: str) -> None:
    small(tmp_path)
    with serving(tmp_path) as server:
        for path in ("/", "/events", "/metrics"):
            status, _, text = get(server, path, Host=host)
            assert (status, "node0" in text) == (421, False)
        for name in ("localhost", "127.0.0.1:1", "[::1]:99", "LOCALHOST:80"):
            assert get(server, "/metrics", Host=name)[0] == 200


def test_key_is_asked_for_everywhere_and_the_token_itself_is_none(tmp_path: Path) -> None:
    small(tmp_path)
    wrong = ("", "Bearer wrong", f"Bearer {SECRET}", f"Basic {KEY}", KEY, "Bearer \xe9")
    with serving(tmp_path, token=Token(SECRET)) as server:
        for path in ("/", "/events", "/metrics", "/other"):
            for headers in (*({"Authorization": one} for one in wrong), {"Cookie": "elasticflow="}, {"Cookie": '"'}):
                status, answered, text = get(server, path, **headers)
                assert (status, answered["www-authenticate"]) == (401, "Bearer")
                assert "node0" not in text
        assert get(server, "/?key=wrong", Authorization=f"Bearer {KEY}")[0] == 401
        assert get(server, "/metrics", Authorization=f"Bearer {KEY}")[0] == 200


def test_key_of_an_address_becomes_a_cookie(tmp_path: Path) -> None:
    small(tmp_path)
    with serving(tmp_path, token=Token(SECRET)) as server:
        assert server.url == f"http://127.0.0.1:{server.address[1]}/?key={KEY}"
        status, headers, _ = get(server, f"/?key={KEY}")
        assert (status, headers["location"]) == (303, "/")
        cookie = headers["set-cookie"]
        assert re.search("httponly", cookie, re.I)
        assert re.search("samesite=strict", cookie, re.I)
        assert get(server, "/", Cookie=cookie.partition(";")[0])[0] == 200
    with serving(tmp_path, token=Token("another")) as other:
        assert get(other, "/", Cookie=cookie.partition(";")[0])[0] == 401
        both = [cookie, get(other, f"/?key={page_key(Token('another'))}")[1]["set-cookie"]]
        assert get(other, "/", Cookie="; ".join(one.partition(";")[0] for one in both))[0] == 200
        both.reverse()
        assert get(other, "/", Cookie="; ".join(one.partition(";")[0] for one in both))[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_addresses_need_a_token(tmp_path: Path, host: str) -> None:
    with pytest.raises(UsageError, match="ELASTICFLOW_TOKEN"):
        Server(tmp_path, (host, 0))


def test_address_in_use_is_said(tmp_path: Path) -> None:
    with serving(tmp_path) as server, pytest.raises(UsageError, match="cannot listen there"):
        Server(tmp_path, server.address)


# ------------------------------------------------------------------------------------------------ as a command


@pytest.mark.processes
def test_command_serves_until_ctrl_c_though_somebody_listens(tmp_path: Path) -> None:
    small(tmp_path / "run")
    output, (port,) = tmp_path / "output", free_ports(1)
    with output.open("wb") as file:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ef_common.cli",
                "status",
                str(tmp_path / "run"),
                "--serve",
                f"--address=127.0.0.1:{port}",
            ],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "ELASTICFLOW_TOKEN": SECRET},
        )
    try:
        deadline = time.monotonic() + GUARD_S
        while f"is shown at http://127.0.0.1:{port}/?key={KEY} " not in output.read_text():
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD_S)
        connection.request("GET", "/events", headers={"Authorization": f"Bearer {KEY}"})
        assert connection.getresponse().readline() == b"event: state\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(GUARD_S) == 0
        connection.close()
    finally:
        process.kill()
        process.wait()
    assert SECRET not in output.read_text()
    assert len(output.read_text().splitlines()) == 1


def test_page_is_answered_while_strangers_say_nothing_and_its_readers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "MOST", 5)
    run = small(tmp_path)
    with serving(tmp_path) as server, contextlib.ExitStack() as held:
        subscriber = Subscriber(server)
        held.callback(subscriber.close)
        subscriber.next()
        asked = http.client.HTTPConnection(*server.address, timeout=GUARD_S)
        held.callback(asked.close)
        asked.request("GET", "/other")
        assert asked.getresponse().read()  # its connection stays open for the next request
        strangers = [held.enter_context(socket.create_connection(server.address, GUARD_S)) for _ in range(20)]
        for stranger in strangers[:10]:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")  # no end
        assert get(server, "/")[0] == 200
        for stranger in (asked.sock, *strangers[:-5]):
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        strangers[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            strangers[-1].recv(1)
        run.train(1)
        run.write()
        subscriber.next(lambda state: state["figures"]["step"] == 221)
