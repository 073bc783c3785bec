"""`elasticflow demo`: trains, kills a worker, lets another one join, and proves that nothing went wrong.

The job is that of `elasticflow run`, which starts a new worker in the place of the one that is killed. All that this
process knows of the training comes from the event log.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import click
import psutil

from ef_common.audit import audit
from ef_common.demo.picture import Picture
from ef_common.demo.timeline import Display, Timeline
from ef_common.errors import UsageError
from ef_common.events import EventLogError
from ef_common.launch import environment, run_directory
from ef_common.launch.child import Child
from ef_common.launch.signals import handled, to_end

PROGRAMS = {"lightning": "ef_lightning.demo", "keras": "ef_keras.demo"}
_NEEDED = {"lightning": ("torch", "lightning"), "keras": ("torch", "keras")}
_INSTEAD = {"lightning": "pytorch_lightning"}
EPOCHS = 8
STEPS_PER_EPOCH = 27
BATCH_SIZE = 16
STEP_SECONDS = 0.1
MIN_ACCURACY = 0.9
_KILL_IN = (1, 5)  # epoch, and steps behind its first one
_PATIENT_FROM = 4
_STAND_STILL_S = 1.5  # far less than the heartbeat timeout
_LOOK_S = 0.2
_MAX_WIDTH = 100
_VARIABLES = {
    environment.AUDIT: "1",
    # Long, so that on a busy machine no worker seems to be dead.
    environment.HEARTBEAT_TIMEOUT: "10",
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_NONE_OF_THE_USERS = {environment.CHECKPOINT: "", environment.CLAIMS: ""}


def run(framework: str, *, workers: int, run_dir: Path | None, limit_s: float) -> int:
    """Run the demo to its end.

    Args:
        framework: One of `PROGRAMS`.
        workers: Workers that train; at least two.
        run_dir: Directory of the run, or None for a new one.
        limit_s: Seconds after which it gives up.

    Returns:
        Exit status: 0 if the training came through, and the audit found every promise kept.

    Raises:
        UsageError: A package is missing, or the directory holds another run.
    """
    _check_installed(framework)
    place = run_directory.create("demo", run_dir)
    if any((place / "events").iterdir()):
        raise UsageError(f"this directory holds the event log of another run. Received: --run-dir={place}")
    timeline = Timeline(place)
    output = place / "output.log"
    with (
        output.open("wb") as file,
        Child(_command(framework, workers, place), output=file.fileno(), environ=_environ(framework)) as child,
        Display(timeline) as display,
    ):
        problems = _play(child, timeline, display, workers=workers, limit_s=limit_s)
    if child.process.returncode and not problems:
        problems = [f"`elasticflow run` ended with status {child.process.returncode}; the end of its output:"]
        problems += [_tail(output)]
    problems += _judge(place, timeline, output.read_text(errors="replace"))
    click.echo(f"event log: {place}   (see also `elasticflow logs` and `elasticflow status`)")
    for problem in problems:
        click.echo(f"PROBLEM: {problem}", err=True)
    return 1 if problems else 0


def _check_installed(framework: str) -> None:
    missing = [name for name in _NEEDED[framework] if not find_spec(name) and not find_spec(_INSTEAD.get(name, name))]
    if missing:
        raise UsageError(
            f"--framework={framework} needs packages that are not installed. Install them: "
            f"pip install {' '.join(missing)}"
        )


def _command(framework: str, workers: int, place: Path) -> list[str]:
    """Arguments of `elasticflow run`."""
    launcher = [f"--nproc-per-node={workers}", f"--nnodes=1:{workers}", f"--run-dir={place}"]
    # All start at once, but on a busy machine not equally fast: the first view waits for them.
    launcher += ["--rdzv-conf=last_call_timeout=60", "--max-restarts=3"]
    program = [f"--epochs={EPOCHS}", f"--samples={STEPS_PER_EPOCH * BATCH_SIZE * workers}"]
    return [*launcher, "-m", PROGRAMS[framework], *program, f"--batch-size={BATCH_SIZE}", f"--step-s={STEP_SECONDS}"]


def _environ(framework: str) -> dict[str, str]:
    """Variables for the job: the user's own, except places of checkpoints."""
    found = _NONE_OF_THE_USERS | {name: value for name, value in _VARIABLES.items() if name not in os.environ}
    if framework == "keras" and "KERAS_BACKEND" not in os.environ and find_spec("tensorflow") is None:
        found["KERAS_BACKEND"] = "torch"
    return found


def _play(child: Child, timeline: Timeline, display: Display, *, workers: int, limit_s: float) -> list[str]:
    """Kill a worker when the event log shows that the training is far enough; return what went wrong."""
    deadline = time.monotonic() + limit_s
    victim = ""
    timeline.note(f"starting {workers} workers")
    while child.process.poll() is None:
        timeline.update()
        epoch, steps = _KILL_IN
        due = timeline.epoch >= epoch and timeline.step >= timeline.first_step + steps
        if due and not victim and len(timeline.members) > 1:
            victim = [name for name in timeline.pids if name in timeline.members][-1]
            timeline.note(f"SIGKILL to {victim}")
            with contextlib.suppress(psutil.NoSuchProcess):
                _process(child, timeline.pids[victim]).kill()
        if timeline.epoch >= _PATIENT_FROM and timeline.num_joined == 0 and timeline.members:
            # On a busy machine a worker takes long to start: let there be something left of the training to join.
            with contextlib.suppress(psutil.NoSuchProcess):
                _stand_still(_process(child, timeline.pids[timeline.members[0]]))
        display.update()
        if time.monotonic() > deadline:
            return [f"the training has not ended within {limit_s:g} s"]
        time.sleep(_LOOK_S)
    timeline.update()
    timeline.note("finished")
    return []


def _process(child: Child, pid: int) -> psutil.Process:
    """A process of the job.

    Raises:
        psutil.NoSuchProcess: It has ended.
    """
    found = psutil.Process(pid)
    if child.process.pid not in (parent.pid for parent in found.parents()):
        raise psutil.NoSuchProcess(pid)
    return found


def _stand_still(process: psutil.Process) -> None:
    """Stop a worker for a moment. The others wait for it in their next step."""
    process.suspend()
    try:
        time.sleep(_STAND_STILL_S)
    finally:
        process.resume()


def _judge(place: Path, timeline: Timeline, output: str) -> list[str]:
    """Show how it went; return broken promises."""
    problems = []
    accuracies = re.findall(r"^test accuracy: ([\d.]+)", output, re.MULTILINE)
    accuracy = float(accuracies[-1]) if accuracies else 0.0
    if accuracy <= MIN_ACCURACY:
        problems.append(f"the test accuracy is {accuracy}, expected more than {MIN_ACCURACY}")
    if not (timeline.num_lost == 1 and timeline.num_joined == 1):
        problems.append(f"expected one loss and one join, saw {timeline.num_lost} and {timeline.num_joined}")
    try:
        picture = Picture.of(place)
        report = audit(place)
    except EventLogError as error:
        return [*problems, str(error)]
    click.echo(f"\n{picture.text(min(shutil.get_terminal_size().columns, _MAX_WIDTH))}")
    click.echo(f"\ntest accuracy: {accuracy:.3f}")
    if not report.ok:
        problems.append("the audit found a broken promise")
    click.echo(report)
    click.echo(f"longest pause of a worker that went on: {1000 * timeline.longest_pause:.0f} ms\n")
    image = place / "kill-and-join.svg"
    image.write_text(picture.svg())
    click.echo(f"picture:   {image}")
    return problems


def _tail(path: Path, num_lines: int = 30) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])


def ending_at_once() -> contextlib.AbstractContextManager[None]:
    """Within this, SIGTERM and SIGHUP leave through the context managers, which end the job, as Ctrl-C does."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    return handled([number for number in to_end() if number != signal.SIGINT], end)
