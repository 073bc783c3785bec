"""The calls to an API server, as far as no real one is needed."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
import yaml

pytest.importorskip("lightkube")

import httpx2

from ef_common.errors import (
    ClusterAway,
    ClusterConflict,
    ClusterExists,
    ClusterExpired,
    ClusterFailed,
    ClusterNotFound,
    ClusterRefused,
)
from ef_common.kubernetes import api as apis
from ef_common.kubernetes.api import Api, _error_of
from ef_common.kubernetes.kinds import NODES, PODS
from ef_common.kubernetes.watching import Copy
from ef_common.testing.ports import free_ports

GONE = json.dumps({"message": "The provided continue parameter is too old"}).encode()
NOTHING = json.dumps({"items": [], "metadata": {"resourceVersion": "1"}}).encode()


@pytest.fixture
def asked() -> list[str]:
    return []


@pytest.fixture
def answers() -> dict[str, bytes]:
    """What the server answers, if the path has this in it."""
    return {"watch=true": b""}


def connect(port: int, folder: Path) -> Api:
    context = {"cluster": "c", "user": "u", "namespace": "here"}
    config = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": context}],
        "current-context": "x",
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(config))
    return Api(str(folder / "kubeconfig"))


@contextlib.contextmanager
def served(handler: type[BaseHTTPRequestHandler], folder: Path) -> Iterator[Api]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        with contextlib.closing(connect(server.server_port, folder)) as connected:
            yield connected
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def api(asked: list[str], answers: dict[str, bytes], tmp_path: Path) -> Iterator[Api]:
    class Empty(BaseHTTPRequestHandler):
        """An API server that has nothing."""

        def do_GET(self) -> None:
            asked.append(self.path.partition("?")[0])
            answer = next((answer for part, answer in answers.items() if part in self.path), NOTHING)
            self.send_response(410 if answer == GONE else 200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with served(Empty, tmp_path) as connected:
        yield connected


def test_things_of_all_namespaces_are_listed_and_watched(api: Api, asked: list[str]) -> None:
    api.list(PODS)
    assert not list(api.watch(PODS, "1", limit_s=1))
    assert asked == ["/api/v1/pods"] * 2
    assert api.namespace == "here"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, ClusterRefused),
        (404, ClusterNotFound),
        (409, ClusterConflict),
        (410, ClusterExpired),
        (403, ClusterRefused),
        (422, ClusterRefused),
        (429, ClusterAway),
        (503, ClusterAway),
        (504, ClusterAway),
        (500, ClusterFailed),
    ],
)
def test_answer_says_what_has_failed(status: int, kind: type[ClusterFailed]) -> None:
    error = _error_of(httpx2.Response(status, json={"message": "failed calling webhook"}))
    assert (type(error), str(error)) == (kind, "failed calling webhook")


@pytest.mark.parametrize(("reason", "kind"), [("AlreadyExists", ClusterExists), ("Conflict", ClusterConflict)])
def test_name_that_is_taken_is_told_apart_from_a_quota_that_others_change(
    reason: str, kind: type[ClusterFailed]
) -> None:
    assert type(_error_of(httpx2.Response(409, json={"message": "no", "reason": reason}))) is kind


def test_limit_to_a_namespace_holds_for_what_is_in_namespaces(api: Api, asked: list[str]) -> None:
    api.limit_to("team")
    api.list(PODS)
    assert not list(api.watch(PODS, "1", limit_s=1))
    api.list(NODES)
    assert not list(api.watch(NODES, "1", limit_s=1))
    api.list(PODS, "other")
    team, nodes = "/api/v1/namespaces/team/pods", "/api/v1/nodes"
    assert asked == [team, team, nodes, nodes, "/api/v1/namespaces/other/pods"]


def page(*names: str, token: str = "") -> bytes:
    meta = {"resourceVersion": "7", **({"continue": token} if token else {})}
    return json.dumps({"items": [{"metadata": {"name": name}} for name in names], "metadata": meta}).encode()


def test_list_is_read_in_pages(api: Api, answers: dict[str, bytes], asked: list[str]) -> None:
    answers.clear()
    answers |= {
        "continue=one%26more": page("c", token="two"),
        "continue=two": page("d"),
        "labelSelector=x%3Dy&limit=500": page("a", "b", token="one&more"),
    }
    found, version = api.list(PODS, labels="x=y", keep=lambda thing: {"is": thing["metadata"]["name"]})
    assert (found, version) == ([{"is": name} for name in "abcd"], "7")
    assert len(asked) == 3


def test_list_whose_pages_are_gone_is_read_anew_at_once(api: Api, answers: dict[str, bytes], asked: list[str]) -> None:
    answers.clear()
    answers |= {
        "continue=two": GONE,
        "continue=one": page("b", token="two"),
        "limit=500": page("a", token="one"),
        "/pods": page("a", "b", "c"),
    }
    found, _ = api.list(PODS)
    assert [one["metadata"]["name"] for one in found] == ["a", "b", "c"]
    assert len(asked) == 4
    answers["/pods"] = answers["limit=500"] = GONE
    with pytest.raises(ClusterExpired):
        api.list(PODS)


def test_whoever_observes_is_told_of_each_call_and_watch(api: Api, answers: dict[str, bytes]) -> None:
    told = list[tuple[str, int]]()
    durations = list[float | None]()

    def observe(verb: str, status: int, duration_s: float | None) -> None:
        told.append((verb, status))
        durations.append(duration_s)

    api.observe(observe)
    api.list(PODS)
    list(api.watch(PODS, "1", limit_s=1))
    answers["/pods"] = GONE
    with pytest.raises(ClusterExpired):
        api.get(PODS, "here", "a")
    with pytest.raises(ClusterFailed):
        api.delete(PODS, "here", "a")  # which this server does not know
    assert told == [("GET", 200), ("WATCH", 200), ("GET", 410), ("DELETE", 501)]
    assert [duration is None for duration in durations] == [False, True, False, False]


@pytest.mark.parametrize("answer", ["<html>", "[]", "{}", '{"metadata": 1}', '{"metadata": {}}', "\udcff"])
def test_list_that_is_malformed_is_a_failure_of_the_cluster(api: Api, answers: dict[str, bytes], answer: str) -> None:
    answers.clear()
    answers["/pods"] = answer.encode(errors="surrogateescape")
    with pytest.raises(ClusterFailed, match="the API server"):
        api.list(PODS)


@pytest.mark.parametrize(
    "line", ["<html>", "[]", '{"type": "ADDED"}', '{"type": "ADDED", "object": 1}', '{"object": {}}']
)
def test_watch_that_is_malformed_is_a_failure_of_the_cluster(api: Api, answers: dict[str, bytes], line: str) -> None:
    good = '{"type": "BOOKMARK", "object": {}}'
    answers["watch=true"] = f"{good}\n{line}\n".encode()
    watch = api.watch(PODS, "1", limit_s=1)
    assert next(watch) == ("BOOKMARK", {})
    with pytest.raises(ClusterFailed, match="the API server"):
        next(watch)


def test_watch_that_sends_nothing_is_begun_again_from_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection may be dead without a word: where the host of an API server has crashed, nobody closes it."""
    monkeypatch.setattr(apis, "_WATCH_SILENCE_S", 1.0)
    asked, again, over = list[dict[str, str]](), threading.Event(), threading.Event()
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "7"}}}

    class Silent(BaseHTTPRequestHandler):
        """It tells of one version in a watch, and leaves it open."""

        def do_GET(self) -> None:
            asked.append(dict(parse_qsl(urlsplit(self.path).query)))
            is_watch = "watch" in asked[-1]
            answer = json.dumps(bookmark).encode() + b"\n" if is_watch else NOTHING
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer) + is_watch))
            self.end_headers()
            self.wfile.write(answer)
            if len(asked) == 3:
                again.set()
            if is_watch:
                over.wait()

        def log_message(self, *_: object) -> None:
            pass

    with served(Silent, tmp_path) as api:
        copy = Copy(api, PODS, on_change=lambda: None)
        copy.start()
        try:
            assert again.wait(10.0)
        finally:
            copy.stop()
            over.set()
    assert [one.get("resourceVersion") for one in asked[:3]] == [None, "1", "7"]


def test_error_that_is_malformed_is_one_all_the_same(api: Api, asked: list[str]) -> None:
    with pytest.raises(ClusterFailed):
        api.delete(PODS, "here", "a")  # which this server does not know
    assert str(_error_of(httpx2.Response(502, text="<html>"))) == "<html>"
    assert str(_error_of(httpx2.Response(502, text=""))) == "Bad Gateway"


def test_api_server_that_does_not_answer_is_away(tmp_path: Path) -> None:
    api = connect(free_ports(1)[0], tmp_path)
    with pytest.raises(ClusterAway):
        api.list(PODS)
    with pytest.raises(ClusterAway):
        next(api.watch(PODS, "1", limit_s=1))
    with pytest.raises(ClusterAway):
        next(api.log("here", "a", "worker"))
    api.close()


def test_lines_of_a_pod_are_those_of_a_container(api: Api, answers: dict[str, bytes]) -> None:
    answers["/pods/a/log?container=worker"] = b"begins\nends\n"
    assert list(api.log("here", "a", "worker")) == ["begins", "ends"]


def test_lines_that_are_followed_are_those_behind_a_time(api: Api, answers: dict[str, bytes]) -> None:
    times = [f"2026-01-01T00:00:00.00000000{number}Z" for number in range(3)]
    lines = [" 9 %", "10 %\r11 %", "2026-01-01T00:00:00Z is said"]
    answers["timestamps=true"] = "".join(f"{at} {line}\n" for at, line in zip(times, lines, strict=True)).encode()
    told = [(times[0], " 9 %"), (times[1], "10 %"), (times[1], "11 %"), (times[2], "2026-01-01T00:00:00Z is said")]
    assert list(api.follow_log("here", "a", "worker")) == told
    answers["sinceTime=2026-01-01T00%3A00%3A00.000000001Z"] = answers.pop("timestamps=true")
    assert list(api.follow_log("here", "a", "worker", since=times[1])) == told[3:]


def test_log_that_is_followed_and_silent_may_have_lost_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apis, "_LOG_SILENCE_S", 1.0)
    over = threading.Event()

    class Silent(BaseHTTPRequestHandler):
        """It says nothing more."""

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"2026-01-01T00:00:00Z begins\n")
            over.wait()

        def log_message(self, *_: object) -> None:
            pass

    with served(Silent, tmp_path) as api:
        told = api.follow_log("here", "a", "worker")
        try:
            assert next(told) == ("2026-01-01T00:00:00Z", "begins")
            with pytest.raises(ClusterAway):
                next(told)
        finally:
            over.set()
