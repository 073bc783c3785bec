"""The launcher of `elasticflow run --hosts`, while the job runs: calls hosts, hears what they say, and tells them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue
from typing import Protocol

from ef_common.core.hosts import FAILED, REFUSED, Host, HostState, HostStates, HostsVerdict
from ef_common.errors import UsageError
from ef_common.launch import environment, run_directory
from ef_common.launch.hosts.lines import (
    BEAT_S,
    KILL,
    KNOWN,
    LEAVE,
    OUTPUT,
    WISHES,
    Answer,
    Data,
    NodeEnded,
    NodeRefused,
    Runs,
    Wants,
)
from ef_common.launch.hosts.link import HostLink
from ef_common.launch.hosts.list import HostList
from ef_common.launch.hosts.output import Output
from ef_common.launch.hosts.records import Records
from ef_common.launch.launcher_file import LauncherFile
from ef_common.launch.signals import GENTLE

_LOOK_S = 0.05
_MOST_NEWS = 256
"""Answers of hosts that have not been looked at; with what they have written, each has 256 KiB at most."""


class Calls(Protocol):
    """How hosts are called."""

    def __call__(
        self, host: Host, records: Records, *, starts: bool, on_answer: Callable[[Answer | None], object]
    ) -> HostLink:
        """Make a connection to a host, which is not started."""


class HostsLauncher:
    """Runs a job on a list of hosts.

    Args:
        hosts: The list.
        call: Makes a connection to a host.
        run_dir: Directory of the run.
        command: The script and its arguments.
        signals: Signals that this process has received.
        failure: Why the job has failed, as its coordinator knows; "" if it has not.
        patience_s: The job is given up if no host can be had for this long.
    """

    def __init__(
        self,
        hosts: HostList,
        call: Calls,
        run_dir: Path,
        command: list[str],
        *,
        signals: list[int],
        failure: Callable[[], str],
        patience_s: float,
    ) -> None:
        self._list, self._call, self._run_dir = hosts, call, run_dir
        self._signals, self._failure = signals, failure
        self._hosts = HostStates(patience_s=patience_s, now=time.monotonic())
        self._launcher = run_directory.this_launcher(command, max_workers=0, local=True)
        self._file = LauncherFile(run_dir)
        self._output = Output()
        self._links: dict[str, HostLink] = {}
        self._records: dict[str, Records] = {}
        self._news: Queue[tuple[str, HostLink, Answer | None]] = Queue(_MOST_NEWS)
        self._problems: dict[str, str] = {}  # of hosts, as they were said
        self._beat_at = 0.0
        self._kills = False
        self._names: frozenset[str] = frozenset()

    def limit(self, num_workers: int) -> None:
        """Begin with no more workers than these."""
        self._hosts.limit(num_workers)

    def run(self) -> HostsVerdict:
        """Run the job to its end; how that was."""
        self._output.start()
        self._output.say(f"the event log is in {self._run_dir}", event="run_directory", run_dir=str(self._run_dir))
        outcome = "failed"
        try:
            while (verdict := self._hosts.verdict(time.monotonic())) is None:
                self._look()
                time.sleep(_LOOK_S)
            outcome = self._outcome(verdict)
            return verdict
        finally:
            for link in self._links.values():
                link.close()
            self._tell(state="ended", outcome=outcome)
            self._output.close(lambda: self._is_killed)

    def _outcome(self, verdict: HostsVerdict) -> str:
        why = self._failure()
        return {HostsVerdict.FAILED: f"failed: {why}" if why else "failed", HostsVerdict.REFUSED: "failed"}.get(
            verdict, "killed" if self._is_killed else verdict.value
        )

    @property
    def _is_killed(self) -> bool:
        return len([number for number in self._signals if number not in GENTLE]) > 1

    # ------------------------------------------------------------ one look

    def _look(self) -> None:
        self._hear()
        self._follow_signals()
        self._follow_list()
        self._follow_order()
        now = time.monotonic()
        if self._failure():
            self._hosts.close(HostsVerdict.FAILED, now)
        for host in self._hosts.decide(now):
            self._connect(host)
        self._drop_silent()
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            for name, link in self._links.items():
                link.tell(self._told(name))
        self._tell()

    def _follow_signals(self) -> None:
        if self._signals and self._launcher.state == "running":
            self._tell(state="stopping")
            what = "saving a checkpoint and stopping" if os.environ.get(environment.CHECKPOINT) else "stopping"
            self._output.say(f"{what}. Press Ctrl-C again to kill the workers.", color="yellow", event="stopping")
            self._hosts.close(HostsVerdict.STOPPED, time.monotonic())
            self._beat_at = 0.0
        if self._is_killed and not self._kills:
            self._kills = True
            self._output.say("killing the workers", event="killing")
            self._output.wait_no_more()  # or the end of a node would stay unheard behind what it prints
            self._beat_at = 0.0

    def _follow_list(self) -> None:
        hosts = self._list.hosts
        names = frozenset(host.name for host in hosts)
        if names != self._names:
            for what, changed in (("added to", names - self._names), ("removed from", self._names - names)):
                if self._names and changed:
                    self._output.say(
                        f"{what} the list of hosts: {', '.join(sorted(changed))}", event="hosts", hosts=sorted(names)
                    )
            self._names = names
            self._beat_at = 0.0
        self._hosts.want(hosts)

    def _follow_order(self) -> None:
        order = self._file.order()
        if order is not None and order.number > self._launcher.order:
            self._hosts.limit(order.num_workers)
            self._tell(order=order.number)
            self._beat_at = 0.0

    def _told(self, name: str) -> str:
        return KILL if self._is_killed else LEAVE if self._hosts.leaves(name) else ""

    def _tell(self, **changes: object) -> None:
        numbers = {"num_workers": self._hosts.num_workers, "max_workers": self._hosts.num_slots}
        now = replace(self._launcher, **numbers, **changes)  # type: ignore[arg-type]
        if now != self._launcher:
            self._launcher = now
            self._file.write(now)

    # ------------------------------------------------------------ connections

    def _connect(self, host: Host) -> None:
        name = host.name
        records = self._records.setdefault(name, Records(name, self._run_dir, self._output))
        leaves = self._hosts.leaves(name)
        try:
            self._links[name] = link = self._call(
                host, records, starts=not leaves, on_answer=lambda answer: self._note(name, link, answer)
            )
            link.start()
        except OSError as error:
            self._say_problem(name, f"cannot be called: {error}")
            self._links.pop(name, None)
            self._hosts.lost(name, time.monotonic())

    def _note(self, name: str, link: HostLink, answer: Answer | None) -> None:
        """Note what a host says, in the thread that listens to it. It waits there while too little of that is read."""
        if isinstance(answer, Data) and answer.file == OUTPUT:
            self._output.wait_for_room()
        self._news.put((name, link, answer))

    def _drop_silent(self) -> None:
        for name, link in list(self._links.items()):
            if link.is_silent:
                self._lose(name, link)

    def _lose(self, name: str, link: HostLink) -> None:
        del self._links[name]
        why = link.why
        link.close()
        known = self._hosts.state_of(name) in (HostState.RUNNING, HostState.RECALLED)
        trains = "the connection is lost, and its node trains on" if known else "cannot be reached"
        self._say_problem(name, f"{trains}{f' ({why})' if why else ''}. It is called again")
        self._hosts.lost(name, time.monotonic())

    def _hear(self) -> None:
        while True:
            try:
                name, link, answer = self._news.get_nowait()
            except Empty:
                return
            if self._links.get(name) is link:  # else it was closed
                self._take(name, link, answer)

    def _take(self, name: str, link: HostLink, answer: Answer | None) -> None:
        match answer:
            case None:
                self._lose(name, link)
            case Data():
                self._records[name].keep(answer)
            case Runs(life):
                self._records[name].begin(life)
                if self._hosts.state_of(name) is not HostState.RUNNING:
                    self._hosts.runs(name, time.monotonic())
                    link.tell(self._told(name))
                    if self._problems.pop(name, None):
                        self._output.say(f"host {name} is reached", event="host_reached", host=name)
            case Wants(number, nodes):
                self._records[name].known[WISHES] = number
                self._order_nodes(nodes)
            case NodeEnded(status):
                link.tell(KNOWN)
                self._end(name, link, status)
            case NodeRefused(why):
                self._say_problem(name, f"cannot have a node: {why}")
                self._end(name, link, REFUSED)

    def _order_nodes(self, nodes: int) -> None:
        """Order the workers of the first hosts of the list; more hosts than there are cannot be had."""
        slots = [host.slots for host in self._list.hosts]
        if self._launcher.state != "running":
            return
        num_workers = sum(slots[: max(1, nodes)])
        try:
            run_directory.order(self._run_dir, num_workers)
        except UsageError:  # the directory is lost, or does not say yet how long the list has become
            self._hosts.limit(num_workers)
            self._beat_at = 0.0

    def _end(self, name: str, link: HostLink, status: int) -> None:
        del self._links[name]
        self._records[name].end()
        if not self._hosts.leaves(name) and status > FAILED:
            self._problems.setdefault(name, f"status {status}")
            what = "has left" if status == os.EX_TEMPFAIL else f"has ended with status {status}"
            if status != REFUSED:
                self._output.say(
                    f"the node of host {name} {what}", color="yellow", event="node_ended", host=name, status=status
                )
        self._hosts.ended(name, status, time.monotonic())
        link.finish()

    def _say_problem(self, name: str, what: str) -> None:
        if self._problems.get(name) != what:
            self._problems[name] = what
            self._output.say(f"host {name}: {what}", color="yellow", event="host_problem", host=name, reason=what)
