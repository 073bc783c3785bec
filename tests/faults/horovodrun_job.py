"""A job of horovodrun on this machine, with localhost and 127.0.0.1 as its two hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from ef_common.launch import environment
from ef_common.testing.harness_run import GUARD_S, HarnessError, Run
from tests.faults.horovodrun_worker import GO_ON
from tests.faults.hosts import ENOUGH, Host

HERE = Path(__file__).parent
LAUNCHER = (sys.executable, str(HERE / "horovodrun_launcher.py"))
WITHOUT_SSH = (sys.executable, str(HERE / "horovodrun_without_ssh.py"))
COMMAND = (str(Path(sys.executable).with_name("horovodrun")),)
A, B = "localhost", "127.0.0.1"


class HorovodrunJob(Run):
    """Whatever happens in its block, no process outlives it.

    Args:
        directory: Run directory.
        host: Who trains.
    """

    def __init__(self, directory: Path, host: Host) -> None:
        super().__init__(directory, guard_s=GUARD_S)
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._discovery = self.directory / "discover.sh"
        self._hosts = self.directory / "hosts"

    def __enter__(self) -> HorovodrunJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        if kind is not None and not issubclass(kind, HarnessError):
            sys.stderr.write(self.tails())

    # ------------------------------------------------------------ hosts

    def set_hosts(self, *hosts: str) -> None:
        """What the discovery script tells from now on, such as ``localhost:2``."""
        new = self._hosts.with_suffix(".new")
        new.write_text("".join(f"{host}\n" for host in hosts))
        new.rename(self._hosts)

    def discovered(self) -> tuple[str, ...]:
        """Options that have horovodrun ask the script."""
        self._discovery.write_text(f"#!/bin/sh\ncat {self._hosts}\n")
        self._discovery.chmod(0o755)
        # Without a named interface horovodrun wants two hosts at the start, to see which one they share.
        return ("--host-discovery-script", str(self._discovery), "--network-interfaces", "lo")

    # ------------------------------------------------------------ processes

    def start(
        self,
        *options: str,
        train: Mapping[str, Any] | None = None,
        faults: Mapping[int, Mapping[str, Any]] | None = None,
        script: Sequence[str] = (str(HERE / "horovodrun_worker.py"),),
        launcher: Sequence[str] = LAUNCHER,
        rank_that_waits: str = "",
        gone_s: float | None = None,
    ) -> None:
        """Start it.

        Args:
            options: Of horovodrun.
            train: Options of the training; by default it ends when it is told to.
            faults: Of the first workers, by the ranks that horovodrun gives them.
            script: What it runs, with its arguments.
            launcher: How horovodrun is started.
            rank_that_waits: Of the first worker that waits for `end_waiting` after the training.
            gone_s: For how long it must refuse connections, to count as gone.
        """
        spec = {
            "host": self._host.name,
            "options": {"epochs": 1000, "stop": ENOUGH, "step_sleep_s": 0.05, **(train or {})},
            "faults": faults or {},
            "rank_that_waits": rank_that_waits,
            "gone_s": gone_s,
        }
        (self.directory / "spec.json").write_text(json.dumps(spec))
        dropped = ("PET_", "ELASTICFLOW_", "HOROVOD_", "LOCAL_")
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith(dropped)},
            environment.RUN_DIR: str(self.directory),
            environment.AUDIT: "1",
            "HOME": str(self.directory),  # horovodrun keeps a cache there
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        with (self.outputs / "horovodrun.txt").open("wb") as output:
            self._process = subprocess.Popen(
                [*launcher, *options, sys.executable, *script],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> int:
        """Wait until it ends; its exit status.

        Raises:
            HarnessError: It did not end in time; with the tails of all outputs.
        """
        assert self._process is not None
        try:
            return self._process.wait(self.guard_s)
        except subprocess.TimeoutExpired:
            self.dump_stacks()
            raise HarnessError(f"horovodrun does not end\n{self.tails()}") from None

    def kill(self) -> None:
        """Kill horovodrun itself. The job goes on, as far as its workers do."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def enough(self) -> int:
        """Have the training end, and wait until the job does."""
        self.finish_training()
        return self.wait()

    def finish_training(self) -> None:
        """Have the training end."""
        (self.directory / ENOUGH).touch()

    def end_waiting(self) -> None:
        """Have the worker that waits after the training go on to its end."""
        (self.directory / GO_ON).touch()

    def check(self) -> None:
        """Nothing can come of a job that has ended."""
        ended_before, self._ended = self._ended, self._process is not None and self._process.poll() is not None
        if self._ended and ended_before:  # so the events have been read once more after the end
            raise HarnessError(f"horovodrun has ended\n{self.tails()}")

    def dump_stacks(self) -> None:
        """Have the workers write the stacks of their threads."""
        for pid in {event["pid"] for event in self.events("start")}:
            if psutil.pid_exists(pid):
                psutil.Process(pid).send_signal(signal.SIGUSR2)
        time.sleep(0.5)

    def end(self) -> None:
        """Kill whatever belongs to the job: horovodrun's own processes, the workers, the coordinator."""
        deadline = time.monotonic() + GUARD_S
        while (processes := self.processes()) and time.monotonic() < deadline:
            for process in processes:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(processes, timeout=5)
        if self._process is not None:
            self._process.wait(GUARD_S)

    def processes(self) -> list[psutil.Process]:
        """All processes with this run directory in their environment."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(environment.RUN_DIR) == str(self.directory)
        except psutil.Error:
            return False

    # ------------------------------------------------------------ what has come of it

    @property
    def output(self) -> str:
        """What horovodrun and its workers have written."""
        return (self.outputs / "horovodrun.txt").read_text(errors="replace")

    def results_by_pid(self) -> dict[int, dict[str, Any]]:
        """What the workers that have come to the end tell."""
        return {int(path.stem): json.loads(path.read_text()) for path in self.results.glob("*.json")}

    def pids_of(self, members: Sequence[str]) -> set[int]:
        """Process ids of these members."""
        return {self.wait_for("start", worker=member)[0]["pid"] for member in members}

    def on(self, host: str) -> list[int]:
        """Process ids of the workers of a host, in the order in which they came."""
        return [event["pid"] for event in self.events("start") if event["worker"].startswith(f"{host}-")]

    def view(self, world_size: int, *, after: int = 0) -> dict[str, Any]:
        """Wait until all members of a view of this size, newer than a generation, are in it."""

        def complete(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
            newest = {event["worker"]: event for event in events if event["kind"] == "view"}
            for view in newest.values():
                settled = [newest.get(m, {}).get("generation") == view["generation"] for m in view["members"]]
                if view["generation"] > after and view["world_size"] == world_size and all(settled):
                    return view
            return None

        found = self.wait_until(complete, f"a view of {world_size} after generation {after}")
        assert found is not None
        return found

    def view_sizes(self) -> list[int]:
        """World sizes of the views, in their order."""
        return [size for _, size in sorted({(e["generation"], e["world_size"]) for e in self.events("view")})]
