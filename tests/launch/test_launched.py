"""`elasticflow.launch`, with real jobs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ef_common.launch import run_directory
from ef_common.storage.checkpoints import Checkpoints
from ef_common.storage.store import Store
from ef_common.testing.harness_run import GUARD_S, HEARTBEAT_TIMEOUT_S, HarnessError, Run

PROGRAM = Path(__file__).with_name("launching.py")
STOP = "stop"

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


class Program(Run):
    """A program that launches a job."""

    def __init__(self, directory: Path, name: str, argument: str, *, checkpoint: str = "") -> None:
        super().__init__(directory)
        self.output = self.outputs / "program.txt"
        variables = {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONWARNINGS": "ignore",
            "ELASTICFLOW_AUDIT": "1",
            "ELASTICFLOW_GRACE": "600",
            "ELASTICFLOW_HEARTBEAT_TIMEOUT": str(HEARTBEAT_TIMEOUT_S),
        }
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(directory), checkpoint, name, argument],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def check(self) -> None:
        if self.process.poll() is not None:
            raise HarnessError(f"the program has ended ({self.process.returncode})\n{self.tails()}")

    def tree(self) -> list[psutil.Process]:
        """All processes that it has started, and theirs."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def result(self) -> tuple[dict[str, Any], str]:
        """What the program says at its end, and what it has printed before."""
        try:
            status = self.process.wait(GUARD_S)
        except subprocess.TimeoutExpired:
            raise HarnessError(f"the program does not end\n{self.tails()}") from None
        text, _, result = self.output.read_text().rpartition("RESULT ")
        assert status == 0, self.output.read_text()
        return json.loads(result), text

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*self.tree(), psutil.Process(self.process.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait(GUARD_S)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(*args: Any, **options: Any) -> Program:
        started.append(Program(tmp_path / "run", *args, **options))
        return started[-1]

    yield start
    for one in started:
        one.end()


def left_of(directory: Path) -> list[Path]:
    return list(directory.glob("function-*"))


def test_launched_function_survives_a_killed_worker_and_returns_the_value_of_rank_0(
    program: Callable[..., Program],
) -> None:
    run = program("train", STOP)
    run.wait_until(lambda _: run.events("view", generation=3, world_size=2), "a newcomer in the place of the lost")
    (run.directory / STOP).touch()
    result, text = run.result()
    first = run.events("view", generation=1)[0]["members"][0]
    (survivor,) = run.events("start", worker=first)
    assert result == {
        "run_dir": str(run.directory),
        "outcome": "finished",
        "value": {"pid": survivor["pid"], "numbers": [0, 1, 2]},
    }
    assert len(run.events("start")) == 3
    assert text.count("elasticflow: training with 2 workers\n") == 1
    assert "was killed by SIGKILL; restarting it" in text
    assert left_of(run.directory) == []
    run.audit()


def test_exception_of_a_launched_function_is_raised_once_with_its_traceback(program: Callable[..., Program]) -> None:
    result, text = program("fail_at_once", "this is a bug").result()
    assert result["failed"].count("ValueError: this is a bug") == 1
    assert "raise ValueError(what)  # in all workers" in result["failed"]
    assert "Traceback" not in text


@pytest.mark.thorough
def test_exception_in_one_worker_is_raised_and_ends_the_others(program: Callable[..., Program]) -> None:
    run = program("fail", "1")
    result, text = run.result()
    assert result["failed"].startswith("worker ")
    assert result["failed"].count("\nValueError: this is a bug") == 1
    assert "Traceback" not in text
    assert text.count("the job has failed: worker ") == 1
    assert left_of(run.directory) == []


@pytest.mark.thorough
def test_interrupt_stops_a_launched_job_with_a_checkpoint(program: Callable[..., Program], tmp_path: Path) -> None:
    run = program("wait", "1", checkpoint=str(tmp_path / "store"))
    run.wait_for_step(2)
    tree = run.tree()
    os.killpg(run.process.pid, signal.SIGINT)
    result, text = run.result()
    assert result == {"interrupted": True}
    assert text.count("saving a checkpoint and stopping") == 1
    found = Checkpoints(Store(str(tmp_path / "store"))).newest_valid()
    assert found is not None
    assert found.id.step == max(event["step"] for event in run.events("step"))
    assert psutil.wait_procs(tree, GUARD_S)[1] == []
    assert left_of(run.directory) == []


@pytest.mark.thorough
def test_second_interrupt_ends_a_launched_job_at_once(program: Callable[..., Program]) -> None:
    run = program("wait", "600")
    run.wait_for("view", 2)
    tree = run.tree()
    os.killpg(run.process.pid, signal.SIGINT)
    run.wait_until(lambda _: "Press Ctrl-C again" in run.output.read_text(), "the launcher's answer")
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.result()[0] == {"interrupted": True}
    assert psutil.wait_procs(tree, GUARD_S)[1] == []


@pytest.mark.thorough
def test_job_stops_when_the_process_that_has_launched_it_is_killed(program: Callable[..., Program]) -> None:
    run = program("wait", "1")
    run.wait_for_step(2)
    tree = run.tree()
    run.process.kill()
    assert psutil.wait_procs(tree, GUARD_S)[1] == []
    launcher = run_directory.read_launcher(run.directory)
    assert launcher is not None
    assert (launcher.state, launcher.outcome) == ("ended", "stopped")


@pytest.mark.thorough
def test_launch_scales_and_stops_as_a_run_does(program: Callable[..., Program]) -> None:
    run = program("wait", "1")
    run.wait_for_step(2)
    run_directory.order(run.directory, 3)
    run.wait_until(lambda _: run.events("view", world_size=3), "a third worker")
    run_directory.stop(run.directory)
    result, _ = run.result()
    assert (result["outcome"], result["value"]) == ("stopped", None)
    run.audit()
