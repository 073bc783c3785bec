"""The launcher of a job on a list of hosts, without hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ef_common.core.hosts import Host, HostsVerdict
from ef_common.launch import run_directory
from ef_common.launch.hosts import launcher as module
from ef_common.launch.hosts.launcher import HostsLauncher
from ef_common.launch.hosts.lines import KILL, OUTPUT, Answer, Data, NodeEnded, Runs
from ef_common.launch.hosts.list import HostList
from tests.waiting import poll_until

LINE = b"x" * 16383 + b"\n"


@pytest.fixture
def hosts() -> HostList:
    found = HostList(lambda: "", slots=1, source="hosts.txt", say=lambda text: None)
    found.hosts = (Host("a", 1), Host("b", 2))
    return found


@pytest.fixture
def launcher(hosts: HostList, tmp_path: Path) -> HostsLauncher:
    nobody: Any = None
    settings: dict[str, Any] = {"signals": [], "failure": lambda: "", "patience_s": 60.0}
    made = HostsLauncher(hosts, nobody, run_directory.create("x.py", tmp_path / "run"), ["x.py"], **settings)
    made._follow_list()
    made._tell()
    return made


def test_wish_for_a_host_that_has_just_been_added_ends_no_job(launcher: HostsLauncher, hosts: HostList) -> None:
    hosts.hosts = (*hosts.hosts, Host("c", 4))  # which the directory does not say yet
    launcher._order_nodes(3)
    assert launcher._hosts._most == 7


def test_job_is_scaled_by_itself_without_its_directory(launcher: HostsLauncher, tmp_path: Path) -> None:
    launcher._order_nodes(2)
    launcher._follow_order()
    assert launcher._hosts._most == 3
    shutil.rmtree(tmp_path / "run")
    launcher._order_nodes(1)
    launcher._follow_order()
    launcher._tell(state="stopping")
    assert launcher._hosts._most == 1


class PrintingNode:
    """A connection to a node that prints a line again and again until it is killed or has nothing more to say.

    Args:
        on_answer: As of a `HostLink`.
        num_lines: How much it has to say.
    """

    why, is_silent = "", False

    def __init__(self, on_answer: Callable[[Answer | None], object], num_lines: int) -> None:
        self._on_answer, self._num_lines = on_answer, num_lines
        self._thread = threading.Thread(target=self._print, daemon=True)
        self._told = ""
        self.num_printed = 0
        self.at_beats: list[int] = []  # how much it has printed at each sign of life of the launcher

    def _print(self) -> None:
        self._on_answer(Runs("life"))
        while self._told != KILL and self.num_printed < self._num_lines:
            self._on_answer(Data(OUTPUT, self.num_printed * len(LINE), LINE))
            self.num_printed += 1
        self._on_answer(NodeEnded(137 if self._told else 0))

    def start(self) -> None:
        self._thread.start()

    def tell(self, what: str) -> None:
        self._told = what
        self.at_beats.append(self.num_printed)

    def close(self) -> None:
        pass

    finish = close

    @property
    def is_held(self) -> bool:
        """Whether it is not asked for more, while signs of life come."""
        return len(self.at_beats) > 5 and self.at_beats[-5] == self.num_printed


class Watched:
    """A launcher of one such node, whose standard output is a pipe that nobody has read yet."""

    def __init__(self, run_dir: Path, num_lines: int) -> None:
        found = HostList(lambda: "", slots=1, source="hosts.txt", say=lambda text: None)
        found.hosts = (Host("a", 1),)
        self.signals: list[int] = []
        self.nodes: list[PrintingNode] = []
        self.verdicts: list[HostsVerdict] = []
        settings: dict[str, Any] = {"signals": self.signals, "failure": lambda: "", "patience_s": 600.0}

        def call(host: Host, records: object, *, starts: bool, on_answer: Any) -> Any:
            self.nodes.append(PrintingNode(on_answer, num_lines))
            return self.nodes[-1]

        launcher = HostsLauncher(found, call, run_directory.create("x.py", run_dir), ["x.py"], **settings)
        self._thread = threading.Thread(target=lambda: self.verdicts.append(launcher.run()), daemon=True)
        self._thread.start()


@contextlib.contextmanager
def unread() -> Iterator[int]:
    """The end for reading of what is standard output meanwhile."""
    reader, writer = os.pipe()
    before = os.dup(1)
    os.dup2(writer, 1)
    os.close(writer)
    try:
        yield reader
    finally:
        os.close(reader)
        poll_until(lambda: not any(thread.name == "elasticflow-show" for thread in threading.enumerate()))
        os.dup2(before, 1)
        os.close(before)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.01)


@pytest.mark.usefixtures("quick")
def test_output_that_nobody_reads_holds_up_neither_signs_of_life_nor_signals(tmp_path: Path) -> None:
    with unread():
        watched = Watched(tmp_path / "run", num_lines=10_000)
        poll_until(lambda: watched.nodes and watched.nodes[0].is_held)
        assert watched.nodes[0].num_printed * len(LINE) > 1 << 20  # as much as is kept
        watched.signals += [signal.SIGINT, signal.SIGINT]
        poll_until(lambda: watched.verdicts)
    assert watched.verdicts == [HostsVerdict.STOPPED]


@pytest.mark.usefixtures("quick")
def test_output_is_shown_when_it_is_read_at_last(tmp_path: Path) -> None:
    with unread() as reader:
        watched = Watched(tmp_path / "run", num_lines=1000)
        poll_until(lambda: watched.nodes and watched.nodes[0].is_held)
        assert watched.nodes[0].num_printed < 1000
        num_bytes = 0
        while num_bytes < 1000 * (len(LINE) + len("a: ")):
            num_bytes += len(os.read(reader, 1 << 20))
        poll_until(lambda: watched.verdicts)
    assert watched.verdicts == [HostsVerdict.FINISHED]
