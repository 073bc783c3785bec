"""The event logs of pods, gathered in one place: whole ones, missing ones, and those of pods that lie."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ef_common.cli import main
from ef_common.errors import ClusterFailed, ClusterNotFound
from ef_common.kubernetes import gathering
from ef_common.kubernetes.gathering import Gathered, gather, run_dir_in
from ef_common.kubernetes.kinds import JOBS, PODS
from ef_common.kubernetes.resource import JOB_LABEL
from tests.kubernetes.memory_api import MemoryApi
from tests.kubernetes.objects import job
from tests.report.generated import Generated


class Logged(MemoryApi):
    """Pods that have these logs; one without a log cannot be asked.

    Attributes:
        logs: What each pod sends.
        asked: The commands.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, bytes] = {}
        self.asked: list[tuple[str, list[str]]] = []

    def add(self, pod: str, log: bytes | None, *, phase: str = "Running") -> None:
        meta = {"name": pod, "namespace": "here", "labels": {JOB_LABEL: "a"}}
        self.create(PODS, {"metadata": meta, "spec": {}, "status": {"phase": phase}})
        if log is not None:
            self.logs[pod] = log

    def run(self, namespace: str, pod: str, container: str, command: Sequence[str]) -> Iterator[bytes]:
        assert (namespace, container) == ("here", "worker")
        self.asked.append((pod, list(command)))
        if pod not in self.logs:
            yield b'{"worker": "half'
            raise ClusterFailed("the connection to the pod is lost")
        for start in range(0, len(self.logs[pod]), 1000):
            yield self.logs[pod][start : start + 1000]

    def close(self) -> None:
        pass


@pytest.fixture
def api() -> Logged:
    api = Logged()
    api.create(JOBS, job())
    return api


@pytest.fixture
def run(tmp_path: Path) -> dict[str, bytes]:
    """Logs of two workers, and of one that has joined them."""
    made = Generated(tmp_path / "run")
    first = made.start(2)
    made.view(first, "2 of 2 workers")
    made.begin()
    made.train(5)
    (third,) = made.start()
    made.join([third])
    made.train(5)
    made.write()
    return {path.stem: path.read_bytes() for path in sorted((tmp_path / "run" / "events").iterdir())}


def line(worker: str, kind: str = "notice", **fields: Any) -> bytes:
    fields = fields or {"what": "SIGTERM"}
    return json.dumps({"v": 1, "time": 1.0, "worker": worker, "kind": kind, **fields}).encode() + b"\n"


def gathered(api: Logged, place: Path, **options: str) -> Gathered:
    return gather(api, "here", "a", place, **options)  # type: ignore[arg-type]


def kept(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (place / "events").iterdir()}


def report(monkeypatch: pytest.MonkeyPatch, api: Logged, *arguments: str) -> Result:
    monkeypatch.setattr("ef_common.kubernetes.api.Api", lambda _: api)
    return CliRunner().invoke(main, ["kubernetes", "report", "a", *arguments])


def test_logs_of_all_pods_are_those_of_one_run(api: Logged, run: dict[str, bytes], tmp_path: Path) -> None:
    one, two, three = run
    mixed = b"".join(a + b for a, b in zip(run[one].splitlines(True), run[two].splitlines(True), strict=False))
    rest = (
        run[one].splitlines(True)[len(run[two].splitlines()) :],
        run[two].splitlines(True)[len(run[one].splitlines()) :],
    )
    api.add("a-0", mixed + b"".join([*rest[0], *rest[1]]))
    api.add("a-1", run[three])
    api.add("a-2", None, phase="Pending")
    api.add("a-3", None, phase="Failed")
    found = gathered(api, tmp_path / "place")
    assert (found.unread, found.missing, list(found.lines())) == ({}, [], [])
    assert kept(tmp_path / "place") == {f"{worker}.jsonl": log for worker, log in run.items()}
    assert sorted(api.asked) == [(pod, ["elasticflow", "logs", "--json"]) for pod in ("a-0", "a-1")]


def test_worker_whose_pod_is_gone_is_missing(api: Logged, run: dict[str, bytes], tmp_path: Path) -> None:
    one, two, three = run
    api.add("a-0", run[three])
    found = gathered(api, tmp_path / "place")
    assert found.missing == [one, two]
    assert list(found.lines()) == [
        f"The event logs of these workers are missing, as no pod that runs has them: {one}, {two}"
    ]


def test_log_that_has_come_in_part_is_not_used(api: Logged, run: dict[str, bytes], tmp_path: Path) -> None:
    one, two, three = run
    api.add("a-0", run[one] + run[two])
    api.add("a-1", None)
    found = gathered(api, tmp_path / "place")
    assert found.missing == [three]
    assert next(found.lines()) == "The event log of a-1 is not in the report: the connection to the pod is lost"
    assert set(kept(tmp_path / "place")) == {f"{one}.jsonl", f"{two}.jsonl"}


def test_error_while_one_of_several_pods_is_asked_ends_the_command(
    api: Logged, run: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, _ = run
    api.add("a-0", run[one])
    api.add("a-1", run[two])
    ask = api.run

    def fail(namespace: str, pod: str, container: str, command: Sequence[str]) -> Iterator[bytes]:
        if pod == "a-1":
            raise RuntimeError("nobody has expected this")
        return ask(namespace, pod, container, command)

    monkeypatch.setattr(api, "run", fail)
    with pytest.raises(RuntimeError, match="nobody has expected this"):
        gathered(api, tmp_path / "place")


def test_pods_that_share_a_directory_are_asked_and_their_logs_are_kept_once(
    api: Logged, run: dict[str, bytes], tmp_path: Path
) -> None:
    one, two, three = run
    api.add("a-0", run[one] + run[two])
    api.add("a-1", run[one] + line(one) + run[three] + run[two])
    assert gathered(api, tmp_path / "place").missing == []
    assert kept(tmp_path / "place") == {f"{worker}.jsonl": log for worker, log in run.items()}


def test_many_missing_workers_are_told_in_short() -> None:
    (told,) = Gathered(missing=[f"a-{number}\x1b" for number in range(11)]).lines()
    assert told.endswith("a-0, a-1, a-2, a-3, a-4, a-5, a-6, a-7 and 3 more")


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (b"Traceback\n", "what is no event log: b'Traceback"),
        (b"[1]\n", "what is no event log"),
        (b'{"worker": 1}\n', "what is no event log"),
        (line(""), "what is no event log"),
        (b'{"worker": "\\ud800"}\n', "what is no event log"),
        (b"[" * 100_000 + b"\n", "what is no event log"),
        (line("w" * 300), "a very long name"),
        (line("\0" * 100), "a very long name"),
        (line("w", "view", members=1), "events/w.jsonl:1: a 'view' event needs the field"),
        (b"x" * ((1 << 20) + 1), "a line of more than"),
        (b"".join(line(f"w{number}") for number in range(40)), "more than 30 workers"),
        (line("w") * 5000, "larger than 0 MiB"),
    ],
    ids=lambda value: value if isinstance(value, str) else "log",
)
def test_pod_that_lies_spoils_only_its_own_log(
    api: Logged, run: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: bytes, why: str
) -> None:
    monkeypatch.setattr(gathering, "MAX_POD_WORKERS", 30)
    if "MiB" in why:
        monkeypatch.setattr(gathering, "MAX_POD_BYTES", 100_000)
    api.add("a-0", log)
    api.add("a-1", b"".join(run.values()))
    found = gathered(api, tmp_path / "place")
    assert why in found.unread["a-0"]
    assert str(tmp_path) not in found.unread["a-0"]
    assert found.missing == []
    assert kept(tmp_path / "place") == {f"{worker}.jsonl": log for worker, log in run.items()}


@pytest.mark.parametrize("worker", ["../../escaped", "/etc/escaped", "..", ".", "a/b", "a\0b", ".jsonl", "é"])
def test_worker_cannot_be_named_so_that_its_log_is_elsewhere(api: Logged, tmp_path: Path, worker: str) -> None:
    view = {"generation": 1, "rank": 0, "world_size": 1, "reason": "", "pause_s": None}
    api.add("a-0", line(worker, "view", members=[worker], **view))
    place = tmp_path / "in" / "place"
    assert gathered(api, place).missing == []
    assert [path.is_file() for path in (place / "events").iterdir()] == [True]
    assert {path.name for path in tmp_path.iterdir()} == {"in"}
    assert {path.name for path in place.iterdir()} == {"events", "pods"}


def test_members_with_names_that_no_file_has_are_missing(api: Logged, tmp_path: Path) -> None:
    view = {"generation": 1, "rank": 0, "world_size": 2, "reason": "", "pause_s": None}
    api.add("a-0", line("w", "view", members=["w", "\ud800", "v" * 5000], **view))
    assert len(gathered(api, tmp_path / "place").missing) == 2


def test_long_log_is_written_in_parts(
    api: Logged, run: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "_HELD_BYTES", 500)
    api.add("a-0", b"".join(run.values()))
    gathered(api, tmp_path / "place")
    assert kept(tmp_path / "place") == {f"{worker}.jsonl": log for worker, log in run.items()}


def test_job_without_logs_is_an_error_that_says_what_to_do(api: Logged, tmp_path: Path) -> None:
    with pytest.raises(ClusterNotFound):
        gather(api, "here", "b", tmp_path / "0")  # type: ignore[arg-type]
    with pytest.raises(ClusterFailed, match=r"no pod of a runs.* use `elasticflow report DIR`"):
        gathered(api, tmp_path / "1")
    api.add("a-0", b"")
    with pytest.raises(ClusterFailed, match=r"none of the 1 pods of a that run has an event log that can be read$"):
        gathered(api, tmp_path / "2")
    api.add("a-1", None)
    with pytest.raises(ClusterFailed, match="can be read: the connection to the pod is lost"):
        gathered(api, tmp_path / "3")


@pytest.mark.parametrize(
    ("container", "where"),
    [
        ({"command": ["elasticflow", "run", "--run-dir=/a", "train.py", "--run-dir=/b"]}, "/a"),
        ({"command": ["elasticflow", "run"], "args": ["--run-dir", "/a", "train.py"]}, "/a"),
        ({"args": ["--run_dir=/a"], "env": [{"name": "ELASTICFLOW_RUN_DIR", "value": "/b"}]}, "/a"),
        ({"args": ["--run-dir"]}, ""),
        ({"env": [{"name": "A"}, {"name": "ELASTICFLOW_RUN_DIR", "value": "/b"}]}, "/b"),
        ({}, ""),
    ],
)
def test_job_says_where_its_pods_log(container: dict[str, Any], where: str) -> None:
    assert run_dir_in(container) == where


def test_run_directory_may_be_named(api: Logged, run: dict[str, bytes], tmp_path: Path) -> None:
    api.add("a-0", b"".join(run.values()))
    gathered(api, tmp_path / "place", run_dir="/there")
    assert api.asked == [("a-0", ["elasticflow", "logs", "--json", "/there"])]


def test_report_is_one_page_and_is_audited_if_nothing_is_missing(
    api: Logged, run: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightkube")
    monkeypatch.chdir(tmp_path)
    *others, last = run.values()
    api.add("a-0", b"".join(others))
    api.add("a-1", last)
    result = report(monkeypatch, api)
    assert (result.exit_code, result.output) == (0, "The report is in a-report.html\n")
    page = (tmp_path / "a-report.html").read_text()
    assert "here/a" in page
    found = json.loads(report(monkeypatch, api, "--json").stdout)
    assert (found["audit"]["ok"], found["figures"]["world_size"], found["run"]) == (True, 3, "here/a")
    unaudited = json.loads(report(monkeypatch, api, "--json", "--no-audit", "--run-dir=/there").stdout)
    assert (unaudited["audit"]["ok"], unaudited["audit"]["why"]) == (None, "The audit was left out (--no-audit).")
    assert api.asked[-1][1] == ["elasticflow", "logs", "--json", "/there"]


def test_report_without_some_logs_says_so_and_is_no_violation(
    api: Logged, run: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightkube")
    *_, last = run.values()
    api.add("a-0", last)
    result = report(monkeypatch, api, f"--output={tmp_path}/it.html")
    assert result.exit_code == 0
    assert result.stderr.startswith("The event logs of these workers are missing")
    found = json.loads(report(monkeypatch, api, "--json").stdout)
    assert found["audit"]["ok"] is None
    assert found["audit"]["why"] == "The job is not audited, as the event logs of some workers are missing."
    result = report(monkeypatch, api, f"--output={tmp_path}/none/it.html")
    assert (result.exit_code, result.stderr.splitlines()[-1].partition(": ")[0]) == (2, "elasticflow kubernetes report")


def test_report_of_a_job_that_is_not_there_is_refused_in_one_line(api: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightkube")
    result = report(monkeypatch, api)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
