"""The coordinator in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from ef_common.control.client import CoordinatorClient
from ef_common.control.coordinator import Coordinator
from ef_common.core.membership import Settings
from ef_common.core.view import Member
from ef_common.errors import AuthenticationError
from ef_common.launch.child import SAFE_PATH
from ef_common.launch.coordinator_process import CoordinatorOrder, serve, start_coordinator
from ef_common.protocol.auth import Token

TOKEN = Token("secret")


@pytest.mark.processes
def test_coordinator_is_nobodys_child_and_serves_who_knows_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    if SAFE_PATH:  # not before Python 3.11
        (tmp_path / "secrets.py").write_text("API_KEY = 'the user has such files'\n")
    limits = {"heartbeat_timeout_s": 7.0, "hang_timeout_s": None}
    address, pid = start_coordinator("127.0.0.1", TOKEN, Settings(last_call_s=0.0), **limits, log=tmp_path / "log")
    (process,) = [p for p in psutil.process_iter() if listens(p, address[1])]
    try:
        assert process.pid == pid
        assert process.ppid() != os.getpid()
        assert TOKEN.secret not in " ".join(process.cmdline())
        assert os.getsid(process.pid) != os.getsid(0)
        client = CoordinatorClient(address, Member("w", "n", ""), TOKEN)
        assert not client.start(lambda generation: None)
        assert client.next_view(0).ids == ("w",)
        assert client._protocol._heartbeats._timeout_s == 7.0  # what the coordinator has told
        client.stop()
        with pytest.raises(AuthenticationError):
            CoordinatorClient(address, Member("x", "n", ""), Token("other")).start(lambda generation: None)
    finally:
        process.kill()
        process.wait(30)
    assert "listens" in (tmp_path / "log").read_text()


def test_order_comes_to_the_process_with_all_settings() -> None:
    settings = Settings(2, 9, 0.5, 3, on_minority="continue")
    order = CoordinatorOrder("", "secret", asdict(settings), 7.0, 0.0)
    coordinator = CoordinatorOrder(**json.loads(json.dumps(asdict(order)))).carry_out()
    assert coordinator._settings == replace(settings, loss_notice_s=7.0 * 1.5)
    assert (coordinator._heartbeat_timeout_s, coordinator._limits.hang_timeout_s) == (7.0, 0.0)
    assert coordinator._token == TOKEN


def test_coordinator_ends_when_nobody_has_been_connected_for_a_while() -> None:
    coordinator = Coordinator(("127.0.0.1", 0), token=TOKEN, settings=Settings(last_call_s=0.0))
    coordinator.start()
    server = threading.Thread(
        target=serve, args=(coordinator,), kwargs={"start_s": 60.0, "linger_s": 0.0, "restart_s": 0.5}
    )
    server.start()
    client = CoordinatorClient(coordinator.address, Member("w", "n", ""), TOKEN)
    client.start(lambda generation: None)
    server.join(1.0)
    assert server.is_alive()
    client.stop()
    server.join(30.0)
    assert not server.is_alive()


@pytest.mark.processes
def test_coordinator_waits_for_workers_as_long_as_the_launcher_that_ends_it_lives() -> None:
    coordinator = Coordinator(("127.0.0.1", 0), token=TOKEN, settings=Settings(last_call_s=0.0))
    coordinator.start()
    launcher = subprocess.Popen(["sleep", "1000"])
    times = {"start_s": 0.5, "linger_s": 0.0, "restart_s": 0.0, "launcher": psutil.Process(launcher.pid)}
    server = threading.Thread(target=serve, args=(coordinator,), kwargs=times, daemon=True)
    try:
        server.start()
        server.join(1.5)
        assert server.is_alive()
    finally:
        launcher.kill()  # nobody takes note of its end yet
    server.join(30.0)
    assert not server.is_alive()
    launcher.wait()


@pytest.mark.parametrize("ends", ["close", "bye"])
def test_coordinator_waits_for_a_worker_that_is_started_again_unless_the_job_has_ended(ends: str) -> None:
    coordinator = Coordinator(("127.0.0.1", 0), token=TOKEN, settings=Settings(last_call_s=0.0))
    coordinator.start()
    times = {"start_s": 60.0, "linger_s": 0.0, "restart_s": 60.0}
    server = threading.Thread(target=serve, args=(coordinator,), kwargs=times, daemon=True)
    server.start()
    client = CoordinatorClient(coordinator.address, Member("w", "n", ""), TOKEN)
    client.start(lambda generation: None)
    client.send(ends)
    client.stop()
    server.join(30.0 if ends == "close" else 1.0)
    assert server.is_alive() == (ends == "bye")
    coordinator.stop()


def listens(process: psutil.Process, port: int) -> bool:
    try:
        if "ef_common.launch.coordinator_process" not in process.cmdline():
            return False
        return any(c.laddr and c.laddr.port == port and c.status == "LISTEN" for c in process.net_connections("tcp"))
    except psutil.Error:
        return False
