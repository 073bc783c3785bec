"""The far side of `elasticflow run --hosts`, with a training that is a shell script: no ssh, no torch."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ef_common import __version__, threads
from ef_common.launch.hosts import far_side, lines
from ef_common.launch.hosts.far_side import FarSide
from ef_common.launch.hosts.folder import HostFolder
from ef_common.launch.hosts.lines import Data, NodeEnded, NodeOrder, NodeRefused, Runs
from tests.waiting import poll_until

GUARD_S = 60.0
TRAINING = """
import os, signal, sys, time
def end(number, frame):
    print("told to go", flush=True)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # while it ends, it heeds no further signal
    time.sleep(1.5)
    sys.exit(75)
signal.signal(signal.SIGUSR1, end)
print("begun with", sys.argv[1:], flush=True)
log = os.path.join(next(a for a in sys.argv if a.startswith("--run-dir="))[10:], "events")
os.makedirs(log)
open(os.path.join(log, "w.jsonl"), "w").write("{}\\n")
while not os.path.exists("enough"):
    time.sleep(0.02)
print("over", flush=True)
"""


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ef_common.launch.run` of the child is that training; the rest is ours."""
    package = tmp_path / "stand-in"
    package.mkdir()
    (package / "sitecustomize.py").write_text(
        "import sys, types\n"
        "fake = types.ModuleType('ef_common.launch.run')\n"
        f"fake.main = lambda argv: exec(compile({TRAINING!r}, 'training', 'exec'), {{'__name__': 'x'}}) or 0\n"
        "if 'ef_common.launch.child' in ' '.join(sys.orig_argv):\n"
        "    sys.modules['ef_common.launch.run'] = fake\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), *filter(None, sys.path)]))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("SSH_CONNECTION", raising=False)


@pytest.fixture
def order(tmp_path: Path) -> NodeOrder:
    return NodeOrder(
        version=__version__,
        job="job",
        host="node1",
        starts=True,
        endpoint="",
        port=29401,
        launcher="",
        elsewhere="10.0.0.9",
        arguments=["train.py"],
        environ={"ELASTICFLOW_TOKEN": "not for others"},
        directory=str(tmp_path),
        orphan_s=0.0,
    )


class Connection:
    """One connection to the far side."""

    def __init__(self, order: NodeOrder) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ef_common.launch.hosts.far_side"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._write(lines.order_line(order))

    def _write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def tell(self, what: str) -> None:
        self._write(lines.beat_line(what))

    def until(self, kind: type, text: bytes = b"") -> list[Any]:
        """All answers until one of this kind, or until this was printed."""
        found: list[Any] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = lines.read_answer(line.decode())
            found.append(answer)
            if isinstance(answer, kind) and (not text or text in printed(found)):
                return found
        raise AssertionError(f"the connection has ended after {found}")

    def cut(self) -> None:
        """End it without a word."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(GUARD_S)
        self.process.stdout.close()


def printed(answers: list[Any]) -> bytes:
    return b"".join(one.content for one in answers if isinstance(one, Data) and one.file == "output")


@pytest.fixture
def connect(order: NodeOrder, tmp_path: Path) -> Iterator[Any]:
    made: list[Connection] = []

    def call(given: NodeOrder = order) -> Connection:
        made.append(Connection(given))
        return made[-1]

    yield call
    for one in made:
        one.cut()
    (tmp_path / "enough").touch()
    for folder in map(HostFolder, folders(tmp_path)):  # as a launcher that has heard of the end
        poll_until(lambda folder=folder: folder.status is not None, guard_s=GUARD_S)
        folder.remove()


def folders(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "tmp").glob("elasticflow-*/*"))


def test_node_outlives_its_connection_and_nothing_is_lost_or_repeated(
    connect: Any, order: NodeOrder, tmp_path: Path
) -> None:
    first = connect()
    answers = first.until(Data, b"begun with")
    life = next(one.life for one in answers if isinstance(one, Runs))
    keeper = json.loads((folders(tmp_path)[0] / "keeper").read_text())["pid"]
    assert os.getsid(keeper) == keeper  # so what ends the session of the connection does not reach it
    assert "--rdzv-endpoint=10.0.0.9:29401" in printed(answers).decode()
    if not any(isinstance(one, Data) and one.file == "w.jsonl" for one in answers):
        answers += first.until(Data)
    first.cut()
    assert not any("not for others" in file.read_text() for file in folders(tmp_path)[0].iterdir() if file.is_file())
    known = {"output": len(printed(answers)), "w.jsonl": 3}
    second = connect(replace(order, life=life, known=known))
    assert second.until(Runs)[-1].life == life
    (tmp_path / "enough").touch()
    answers = second.until(NodeEnded)
    assert (answers[-1], printed(answers)) == (NodeEnded(0), b"over\n")
    assert [one.file for one in answers if isinstance(one, Data)] == ["output"]
    second.tell("known")
    second.close()
    poll_until(lambda: not folders(tmp_path), guard_s=GUARD_S)


@pytest.mark.thorough
def test_status_is_kept_until_the_launcher_knows_it(connect: Any, tmp_path: Path) -> None:
    first = connect()
    first.until(Data, b"begun with")
    (tmp_path / "enough").touch()
    first.until(NodeEnded)
    first.cut()
    second = connect()
    assert second.until(NodeEnded)[-1] == NodeEnded(0)
    second.tell("known")
    second.close()
    assert connect().until(Data, b"begun with")  # in a new life


@pytest.mark.parametrize("connected", [True, False])
def test_node_leaves_when_it_is_told_to_or_its_launcher_is_lost(
    connect: Any, order: NodeOrder, tmp_path: Path, connected: bool
) -> None:
    connection = connect(replace(order, orphan_s=0.0 if connected else 1.0))

    def has_begun() -> bool:
        connection.tell("")  # a busy machine takes longer than that to start a program
        return any(b"begun with" in file.read_bytes() for file in (tmp_path / "tmp").glob("*/*/output"))

    poll_until(has_begun, guard_s=GUARD_S)
    answers = connection.until(Data, b"begun with")
    if connected:
        connection.tell("leave")
    answers += connection.until(NodeEnded)
    assert answers[-1] == NodeEnded(75)
    assert printed(answers).endswith(b"told to go\n")
    assert (b"no sign of life of the launcher for 1 s" in printed(answers)) != connected


@pytest.mark.thorough
def test_node_that_is_not_there_has_left_if_it_is_not_to_be_started(
    connect: Any, order: NodeOrder, tmp_path: Path
) -> None:
    assert connect(replace(order, starts=False)).until(NodeEnded) == [NodeEnded(75)]
    assert not folders(tmp_path)


@pytest.mark.thorough
def test_keeper_that_is_killed_is_a_node_that_was_killed(connect: Any, tmp_path: Path) -> None:
    connection = connect()
    connection.until(Data, b"begun with")
    (folder,) = folders(tmp_path)
    os.kill(json.loads((folder / "keeper").read_text())["pid"], 9)
    assert connection.until(NodeEnded)[-1] == NodeEnded(137)


@pytest.mark.thorough
def test_what_cannot_be_is_one_answer(connect: Any, order: NodeOrder, tmp_path: Path) -> None:
    (said,) = connect(replace(order, version="0.1")).until(NodeRefused)
    assert "0.1 where the job was started" in said.why
    answers = connect(replace(order, directory="/missing")).until(NodeEnded)
    assert answers[-1] == NodeEnded(2)
    assert b"/missing is not on this host" in printed(answers)
    (tmp_path / "tmp" / f"elasticflow-{os.getuid()}").chmod(0o755)
    (said,) = connect(replace(order, job="other")).until(NodeRefused)
    assert "this user alone must have access" in said.why


def test_far_side_that_can_no_longer_hear_ends_the_connection(
    order: NodeOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher makes another one then."""
    side = FarSide(order)
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"beat": ""}\n'))
    monkeypatch.setattr(lines, "read_beat", lambda line: 1 / 0)
    start, started = threads.start, list[threading.Thread]()

    def noted(*args: Any, **kwargs: Any) -> threading.Thread:
        started.append(start(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(threads, "start", noted)
    monkeypatch.setattr(HostFolder, "life", "life")
    monkeypatch.setattr(FarSide, "_say", lambda self, answer: None)
    monkeypatch.setattr(far_side, "SILENT_S", 1e9)
    side.run()
    started[0].join(GUARD_S)
    assert side._closed
