from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ef_common.launch import notice_sources
from ef_common.launch.notice_sources import AgentEnd, FileSource, UrlSource, source_for, this_agent
from tests.waiting import poll_until


class Server(ThreadingHTTPServer):
    status = 200
    body = b""
    waits = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/notice"
        self.released = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.server.waits:
            self.server.released.wait(30)
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body if self.headers["Metadata-Flavor"] == "Google" else b"")

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.released.set()
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "notice"),
    [
        (200, b"TRUE", "TRUE"),
        (200, b'{"action": "terminate",\n "time": "2031-01-01T00:00:00Z"}', '{"action": "terminate",'),
        (200, b"\xff\xfe", "\N{REPLACEMENT CHARACTER}"),
        (200, b"NONE", None),
        (200, b"false\n", None),
        (200, b"", None),
        (404, b"TRUE", None),
        (500, b"TRUE", None),
        (204, b"", None),
    ],
)
def test_url_with_status_and_body_is_a_notice_or_not(
    server: Server, status: int, body: bytes, notice: str | None
) -> None:
    server.status, server.body = status, body
    found = source_for(server.url, what="x").ask()
    assert bool(found) == (notice is not None)
    assert (notice or "") in found
    assert "\n" not in found


def test_url_that_does_not_answer_is_no_notice(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice_sources, "TIMEOUT_S", 0.05)
    server.waits, server.body = True, b"TRUE"
    assert UrlSource(server.url).ask() == ""


def test_url_where_nobody_listens_is_no_notice(server: Server) -> None:
    server.shutdown()
    server.server_close()
    assert UrlSource(server.url).ask() == ""


def test_file_that_appears_is_a_notice(tmp_path: Path) -> None:
    source = source_for((tmp_path / "go").as_uri(), what="x")
    assert source == FileSource(tmp_path / "go")
    assert source.ask() == ""
    (tmp_path / "go").touch()
    assert source.ask() == f"there is a file {tmp_path / 'go'}"


@pytest.fixture
def agent() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_end_of_the_agent_is_a_notice_also_before_anybody_has_heard_of_it(agent: subprocess.Popen[bytes]) -> None:
    source = AgentEnd(this_agent(agent.pid))
    assert source.ask() == ""
    agent.kill()
    poll_until(lambda: source.ask() == "the agent of this worker has ended")


def test_agent_that_has_ended_before_the_worker_asks_first_is_noticed(agent: subprocess.Popen[bytes]) -> None:
    agent.kill()
    agent.wait()
    source = AgentEnd(this_agent(agent.pid))
    assert source.ask() == source.ask() == "the agent of this worker has ended"


def test_agent_in_another_namespace_is_never_noticed(agent: subprocess.Popen[bytes]) -> None:
    agent.kill()
    agent.wait()
    assert AgentEnd(f"{agent.pid}@1").ask() == ""
