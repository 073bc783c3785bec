"""One cell of the grid with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ef_common.core.membership import Settings
from ef_common.testing.harness import WorkerProcess
from tests.chaos import cells
from tests.chaos.cells import Cell
from tests.faults import harms
from tests.faults.conftest import TrainingJob, check_run
from tests.faults.hosts import HOSTS

HEARTBEAT_TIMEOUT_S = 3.0
NUM_STEPS_AFTER = 6
OPTIONS: dict[str, Any] = {"length": 144, "batch_size": 8, "global_batch": 48, "step_sleep_s": 0.02}
_DISK = "size=4m"
Weights = dict[int, str]
"""Hashes of the weights after each update."""


def undisturbed(host: str, directory: Path, num_steps: int = 120) -> Weights:
    """Hashes of one worker's weights that nothing has disturbed."""
    with TrainingJob(directory, HOSTS[host]) as job:
        (worker,) = job.start_world(1, job.train, _options(Cell(host, "", "", "", deterministic=True), job, None))
        job.wait_for_step(num_steps)
        check_run(job, [worker])
        return weights(job)


def weights(job: TrainingJob) -> Weights:
    """What the workers have logged, which the audit has found equal."""
    return {event["step"]: event["hash"] for event in job.events("weights")}


def run(cell: Cell, directory: Path, expected: Weights | None) -> None:
    """Carry it out, and check what is promised.

    Raises:
        HarnessError, AssertionError: A promise is broken.
    """
    patience_s = 1.5 if cell.moment == "start-up" else 30.0  # a busy machine starts them one after the other
    settings = Settings(last_call_s=patience_s, start_nodes=3 + (cell.moment == "recovery"))
    with (
        _small_disk(directory / "disk", cell.fault == "full disk") as disk,
        TrainingJob(
            directory / "run", HOSTS[cell.host], settings=settings, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S
        ) as job,
    ):
        trial = _Trial(cell, job, disk)
        trial.start()
        trial.let_it_strike()
        trial.end()
        if expected is not None:
            found = weights(job)
            common = found.keys() & expected.keys()
            if cell.fate is not cells.ENDS_THE_JOB:
                assert len(common) > cells.STEP, f"too few updates to compare: {sorted(common)}"
            wrong = [step for step in sorted(common) if found[step] != expected[step]]
            assert not wrong, f"other weights than in an undisturbed run from update {wrong[0]} on"


def _options(cell: Cell, job: TrainingJob, disk: Path | None) -> dict[str, Any]:
    options = {**OPTIONS, "deterministic": cell.deterministic, **job.patient}
    if not cell.deterministic:
        del options["global_batch"]
    if cell.moment == "checkpoint" or disk is not None:
        options |= {"checkpoint": str(disk or job.directory.parent / "store"), "checkpoint_steps": 2}
    if cell.moment == "validation":
        options |= {"val_length": 24}
        if cell.host.startswith("lightning"):
            options["limits"] = {"num_sanity_val_steps": 0}
    if cell.fault == "data exception":
        options["num_workers"] = 1
    if cell.host.startswith("keras") and cell.moment == "data loading":
        options["data"] = "mapped"
    return options


class _Trial:
    def __init__(self, cell: Cell, job: TrainingJob, disk: Path | None) -> None:
        self._cell, self._job, self._disk = cell, job, disk
        self._options = _options(cell, job, disk)
        self._workers: list[WorkerProcess] = []
        self._victim: WorkerProcess | None = None
        self._killed: list[WorkerProcess] = []

    def start(self) -> None:
        """Start the workers. All bear the fault, and one of them is struck; in a start-up there are no ranks yet."""
        cell, job = self._cell, self._job
        rank = cells.VICTIMS[cell.victim]
        fault: dict[str, Any] = {**cells.MOMENTS[cell.moment], "harm": cell.fault}
        if cell.fault == "data exception":
            fault["step"] = -1  # the data worker knows of no step
        environ = {} if self._disk is None else {harms.FILL: str(self._disk)}
        early = cell.moment == "start-up"
        number = 4 if cell.moment == "recovery" else 3
        for index in range(number):
            mine = [fault] if early and index == rank else [] if early else [{"generation": 1, **fault, "rank": rank}]
            self._workers.append(job.start(job.train, self._options, *mine, environ=environ))
        if early:
            self._victim = self._workers[rank]
        else:
            members = job.founders(number)
            self._victim = members[rank]
            if cell.moment == "recovery":
                job.wait_for_step(cells.STEP)
                members[3].kill()
                self._killed.append(members[3])
        if cell.moment in ("boundary", "admission"):
            job.wait_for_step(cells.STEP)
            self._workers.append(job.start(job.train, self._options, environ=environ))

    def let_it_strike(self) -> None:
        """Wait until it has, and has become of the victim what must."""
        job, fate = self._job, self._cell.fate
        job.wait_until(lambda _: self._struck(), "the fault")
        if self._cell.fault == "SIGSTOP":
            self._wait_for_a_view_without_it()
            self.victim.kill(signal.SIGCONT)
        if fate is cells.GOES_ON:
            if self._cell.moment != "start-up":  # a run that cannot be noted down in the store is not begun
                self._train_on()
            assert self.victim.alive
            (Path(str(self._disk)) / harms.FILLER).unlink()
            self._train_on()
            return
        if fate is cells.DIES_OR_RETURNS:
            self._train_on()
            if not self.victim.alive:
                self._killed.append(self.victim)
            return
        status = self.victim.wait()
        self._killed.append(self.victim)
        if fate is cells.DIES:
            assert status == cells.STATUSES[self._cell.fault], status
        elif fate is cells.LEAVES:
            assert status == 0, status
            self._check_that_it_is_no_loss()
        else:
            assert status == 1, status
        harms.clean_up_memory(self.victim.pid)

    @property
    def victim(self) -> WorkerProcess:
        assert self._victim is not None
        return self._victim

    def _struck(self) -> bool:
        if not self.victim.alive:
            return True
        where = cells.MOMENTS[self._cell.moment]["where"]
        return bool(self._job.events("fault", what=f"injected:{where}"))

    def _wait_for_a_view_without_it(self) -> None:
        self._job.wait_until(
            lambda _: any(self._victims_id not in view["members"] for view in self._job.events("view")),
            "a view without the victim",
        )

    @property
    def _victims_id(self) -> str:
        (start,) = self._job.events("start", pid=self.victim.pid) or [{"worker": ""}]
        return str(start["worker"])

    def _check_that_it_is_no_loss(self) -> None:
        """It has left by a planned view."""
        self._train_on()  # so the view after it is in the log
        reasons = [view["reason"] for view in self._job.events("view")]
        assert not any(f"{self._victims_id} gone (" in reason for reason in reasons), reasons

    def _train_on(self) -> None:
        """Somebody makes some more updates."""
        newest = max((event["step"] for event in self._job.events("step")), default=0)
        self._job.wait_for_step(newest + NUM_STEPS_AFTER)

    def end(self) -> None:
        """The others train on, and keep every promise; or the job ends everywhere."""
        others = [worker for worker in self._workers if worker not in self._killed]
        if self._cell.fate is cells.ENDS_THE_JOB:
            assert [worker.wait() for worker in others] == [1] * len(others)
            assert "Injected: this one is meant to be" in self.victim.output.read_text()
            return
        self._train_on()
        survivors = [worker for worker in others if not (worker is self.victim and self._may_end_with_an_error())]
        check_run(self._job, survivors)

    def _may_end_with_an_error(self) -> bool:
        return self._cell.fate is cells.DIES_OR_RETURNS and self.victim.wait() != 0


@contextmanager
def _small_disk(path: Path, wanted: bool) -> Iterator[Path | None]:
    if not wanted:
        yield None
        return
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", _DISK, "tmpfs", str(path)], check=True, capture_output=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def why_it_cannot_run(cell: Cell) -> str:
    """What is missing on this machine, or ""."""
    if cell.fault == "full disk" and os.geteuid() != 0:
        return "no right to mount a small disk"
    if cell.fault == "out of memory" and not harms.can_limit_memory():
        return "no right to make cgroups, or they are not of version 1"
    return ""


def timed(cell: Cell, directory: Path, expected: Weights | None) -> tuple[str, float]:
    """Carry out a cell. Returns what went wrong ("" if nothing), and the seconds that it took."""
    begin = time.monotonic()
    try:
        run(cell, directory, expected)
    except AssertionError as error:
        return str(error) or repr(error), time.monotonic() - begin
    return "", time.monotonic() - begin
