"""The examples that are started by `elasticflow run`, as their READMEs say."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ef_common.events import Record, read

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def environment() -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("ELASTICFLOW_")}
    environ |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environ["ELASTICFLOW_HEARTBEAT_TIMEOUT"] = "10"  # a busy machine makes nobody look dead
    return environ


def shell(*command: str, cwd: Path) -> str:
    run = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.thorough
def test_own_module_trains_elastically_with_its_callbacks(tmp_path: Path) -> None:
    script = str(EXAMPLES / "08-own-module" / "train.py")
    printed = shell("elasticflow", "run", "--nproc-per-node=2", script, "--epochs=6", cwd=tmp_path)
    assert float(re.findall(r"^test accuracy: ([\d.]+)", printed, re.MULTILINE)[0]) > 0.9
    made = tmp_path / "build" / "own-module"
    assert len(list((made / "best").glob("*.ckpt"))) == 3  # the best two, and the last
    assert (made / "csv" / "version_0" / "metrics.csv").exists()
    shell("elasticflow", "audit", *map(str, (tmp_path / "elasticflow-runs").iterdir()), cwd=tmp_path)


@pytest.mark.thorough
def test_text_is_learnt_by_two_workers(tmp_path: Path) -> None:
    script = str(EXAMPLES / "07-text" / "train.py")
    printed = shell("elasticflow", "run", "--nproc-per-node=2", script, "--epochs=1", "--samples=2048", cwd=tmp_path)
    found = re.findall(r"^bits per letter, in text that was not read: ([\d.]+)$", printed, re.MULTILINE)
    assert len(found) == 1  # rank 0 alone prints
    assert float(found[0]) < 4.5  # 6.7 before it has learnt anything


@pytest.mark.thorough
def test_kill_and_join_by_hand_goes_as_told(tmp_path: Path) -> None:
    printed = shell(str(EXAMPLES / "09-by-hand" / "by_hand.sh"), str(tmp_path / "run"), cwd=tmp_path)
    assert "run 2 of the job, from checkpoint run-000001" in re.sub(r"[\s│]+", " ", printed)  # a table wraps its lines
    properties = printed.partition("Was every sample")[2].splitlines()[1:]
    assert [line[:1] for line in properties] == ["✓", "✓", "–", "✓", "✓"]  # weights are not recorded


@pytest.mark.thorough
def test_stream_of_files_is_read_once_though_a_worker_is_killed_and_one_joins(tmp_path: Path) -> None:
    script, run = str(EXAMPLES / "16-streams" / "train.py"), tmp_path / "run"
    # Several epochs: on a busy machine, a worker takes longer than one of them to start.
    command = ("elasticflow", "run", "--nproc-per-node=2", f"--run-dir={run}", script, "--epochs=4")
    process = subprocess.Popen(command, cwd=tmp_path, env=environment())
    try:
        victim = until_step(run, 20)["worker"]
        pid = next(event["pid"] for event in read(run) if event["kind"] == "start" and event["worker"] == victim)
        os.kill(pid, signal.SIGKILL)
        until_step(run, 60)
        shell("elasticflow", "scale", str(run), "3", cwd=tmp_path)
        assert process.wait(400) == 0
    finally:
        process.kill()
        process.wait()
    shell("elasticflow", "audit", str(run), cwd=tmp_path)
    ends = [event["exact"] for event in read(run) if event["kind"] == "epoch_end"]
    assert set(ends) == {True}
    assert len({event["worker"] for event in read(run) if event["kind"] == "step"}) >= 3


def until_step(run: Path, number: int) -> Record:
    """Wait for the record of a step."""
    for _ in range(1000):
        events = read(run) if any((run / "events").glob("*.jsonl")) else ()
        found = [event for event in events if event["kind"] == "step" and event["step"] >= number]
        if found:
            return found[0]
        time.sleep(0.2)
    raise TimeoutError(f"no step {number}")
