"""An elastic training under a real Slurm: an array of nodes, which come and go."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ef_common.testing.harness_run import Run
from tests.faults import slurm_cluster
from tests.faults.conftest import check_gentle
from tests.faults.hosts import ENOUGH
from tests.faults.launched import ENVIRON
from tests.faults.slurm_cluster import SERVE, Cluster
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(530),
    pytest.mark.skipif(slurm_cluster.why_not() is not None, reason=str(slurm_cluster.why_not())),
]

ROOT = Path(__file__).parents[2]
NUM_NODES = 3
BY_HAND = {**ENVIRON, "ELASTICFLOW_TOKEN": "secret", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
"""What whoever writes a script has in the shell."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm_cluster.cluster(NUM_NODES) as running:
        yield running


def has_pmix() -> bool:
    """Whether Slurm's plugin for PMIx finds the library under the name that it looks for."""
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL("libpmix.so"))
    return False


class Submitted(Run):
    """A training that was submitted.

    Attributes:
        job: Its number.
    """

    job = ""

    def __init__(self, directory: Path, cluster: Cluster) -> None:
        super().__init__(directory)
        self._cluster = cluster

    def submit(self, nodes: str, *options: str, **training: Any) -> str:
        """Submit it; what the command says."""
        said = self._cluster.elasticflow(
            *("slurm", "submit", f"--nodes={nodes}", f"--run-dir={self.directory}", "--exclusive"),
            *(f"--output={self.outputs}/%A_%a.txt", "--monitor-interval=0.1", *options),
            *(str(SCRIPT), json.dumps({**OPTIONS, **training})),
            environ=ENVIRON,
        )
        found = re.match(r"Slurm job (\d+) ", said)
        assert found, said
        self.job = found[1]
        return said

    def wait_for_tasks(self, reached: Callable[[dict[int, dict[str, str]]], bool]) -> dict[int, dict[str, str]]:
        """Wait until Slurm says this of the tasks."""
        self._cluster.wait_until(lambda: reached(self._cluster.tasks(self.job)))
        return self._cluster.tasks(self.job)

    def wait_for_states(self, *states: str) -> None:
        """Wait until these are the states of the tasks, in their order."""
        self._cluster.wait_until(lambda: self._cluster.states(self.job) == list(states))

    def processes_of(self, task: int, words: str) -> list[psutil.Process]:
        """Those of a task that have these words on their command line."""
        (host,) = {self._cluster.tasks(self.job)[task]["NodeList"]}
        found = []
        for pid in self._cluster.processes(self._cluster.node_of(host)):
            process = psutil.Process(pid)
            if words in " ".join(process.cmdline()):
                found.append(process)
        return found

    def finish(self, *states: str) -> None:
        """The training is enough: it ends well, and with it the job."""
        (self.directory / ENOUGH).touch()
        self.wait_for_states(*states)
        self.audit()

    def tails(self) -> str:
        states = self._cluster.call("scontrol", "--oneliner", "show", "job").stdout
        return f"{super().tails()}\n--- Slurm\n{states}"


@pytest.fixture
def run(cluster: Cluster, tmp_path: Path) -> Iterator[Submitted]:
    yield Submitted(tmp_path / "run", cluster)
    cluster.cancel_all()


def test_training_starts_with_the_nodes_that_are_free_and_grows(run: Submitted, cluster: Cluster) -> None:
    cluster.occupy()
    other = cluster.occupy()
    said = run.submit("1:2")
    assert f"  elasticflow status {run.directory} " in said
    first = run.wait_for_world(1)
    run.wait_for_steps()
    assert cluster.states(run.job) == ["RUNNING", "PENDING"]
    cluster.ask("scancel", other)
    run.wait_for_world(2, after=first)
    run.wait_for_steps()
    check_gentle(run)
    status = json.loads(cluster.elasticflow("status", "--json", str(run.directory)))
    assert len(status["workers"]) == 2
    assert "worker" in cluster.elasticflow("logs", str(run.directory))
    run.finish("COMPLETED", "COMPLETED")
    assert "finished" in cluster.elasticflow("status", "--once", str(run.directory))


@pytest.mark.thorough
def test_tasks_that_still_wait_are_cancelled_when_the_training_is_over(run: Submitted, cluster: Cluster) -> None:
    cluster.occupy()
    cluster.occupy()
    run.submit("1:3")
    run.wait_for_world(1)
    run.wait_for_steps()
    run.finish("COMPLETED", "CANCELLED")  # Slurm has one record of those that have never started
    assert len(run.events("start")) == 1


@pytest.mark.thorough
def test_task_that_is_preempted_leaves_and_comes_back_when_there_is_room(run: Submitted, cluster: Cluster) -> None:
    run.submit("1:3")
    first = run.wait_for_world(3)
    run.wait_for_steps()
    other = cluster.occupy(f"--partition={SERVE}")
    second = run.wait_for_world(2, after=first)
    run.wait_for_steps()
    (preempted,) = (
        number
        for number, task in run.wait_for_tasks(lambda tasks: _restarts(tasks) == 1).items()
        if task["Restarts"] == "1"
    )
    assert cluster.tasks(run.job)[preempted]["JobState"] == "PENDING"
    check_gentle(run)
    cluster.wait_until(lambda: cluster.ask("squeue", "--noheader", f"--jobs={other}", "--format=%T") == "RUNNING")
    cluster.ask("scancel", other)
    run.wait_for_world(3, after=second)
    run.wait_for_steps()
    assert len(run.events("start")) == 4
    check_gentle(run)
    run.finish("COMPLETED", "COMPLETED", "COMPLETED")


def _restarts(tasks: dict[int, dict[str, str]]) -> int:
    return sum(int(task["Restarts"]) for task in tasks.values())


@pytest.mark.thorough
@pytest.mark.parametrize("whom", ["its launcher", "its agent", "its worker"])
def test_node_that_is_killed_comes_back_and_the_job_ends_well(run: Submitted, cluster: Cluster, whom: str) -> None:
    run.submit("1:2")
    first = run.wait_for_world(2)
    run.wait_for_steps()
    launchers = run.processes_of(1, "elasticflow run")
    (victim,) = [one for one in launchers if one.parent() not in launchers]
    if whom != "its launcher":
        (victim,) = victim.children()
    if whom == "its worker":
        (victim,) = victim.children()
    victim.send_signal(signal.SIGKILL)
    second = run.wait_for_world(1, after=first)
    run.wait_for_world(2, after=second)
    run.wait_for_steps()
    assert _restarts(cluster.tasks(run.job)) == (0 if whom == "its worker" else 1)
    run.finish("COMPLETED", "COMPLETED")


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["scancel", "stop"])
def test_job_that_is_cancelled_saves_a_checkpoint_from_which_the_next_one_goes_on(
    run: Submitted, cluster: Cluster, how: str
) -> None:
    run.submit("1:2", checkpoint=f"file://{run.directory}")
    run.wait_for_world(2)
    run.wait_for_steps(10)
    if how == "stop":
        cluster.elasticflow("stop", str(run.directory))
    else:
        cluster.ask("scancel", run.job)
    run.wait_for_states("CANCELLED", "CANCELLED")
    last = max(event["step"] for event in run.events("step"))
    assert max(event["step"] for event in run.events("checkpoint")) in (last, last + 1)
    check_gentle(run)
    run.job = cluster.ask(
        "sbatch",
        "--parsable",
        f"--export=ALL,{','.join(f'{k}={v}' for k, v in ENVIRON.items())}",
        f"{run.directory}/job.sh",
    )
    run.wait_until(lambda _: [e for e in run.events("run") if e["resumed"]], "a run that goes on")
    run.finish("COMPLETED", "COMPLETED")


@pytest.mark.thorough
def test_job_is_scaled_down_and_up_from_the_login_node(run: Submitted, cluster: Cluster) -> None:
    run.submit("1:3")
    first = run.wait_for_world(3)
    run.wait_for_steps()
    assert cluster.elasticflow("scale", str(run.directory), "1")
    second = run.wait_for_world(1, after=first)
    run.wait_for_steps()
    run.wait_for_tasks(lambda tasks: _restarts(tasks) == 2)
    assert sorted(cluster.states(run.job)) == ["PENDING", "PENDING", "RUNNING"]
    cluster.elasticflow("scale", str(run.directory), "2")
    third = run.wait_for_world(2, after=second)
    run.wait_for_steps()
    going = max(number for number, task in cluster.tasks(run.job).items() if task["JobState"] == "RUNNING")
    cluster.ask("scancel", f"{run.job}_{going}")  # one task, for good
    run.wait_for_world(1, after=third)
    run.wait_for_steps()
    check_gentle(run)
    run.wait_for_tasks(lambda tasks: tasks[going]["JobState"] == "CANCELLED")


@pytest.mark.thorough
def test_job_that_chooses_its_size_asks_slurm_for_nodes_and_lets_one_go(run: Submitted, cluster: Cluster) -> None:
    """Two workers have enough of what all of them need, so that a third is not worth it."""
    step_s = 0.8
    run.submit(
        *("1:3", "--autoscale=max=3,every_steps=10"),
        throttled=True,
        step_sleep_s=step_s,
        shared_per_s=2 / step_s,
        length=100_003,
    )
    run.wait_for_world(1)
    assert sorted(cluster.states(run.job)) == ["PENDING", "PENDING", "RUNNING"]
    run.wait_for_world(2, after=run.wait_for_world(3))
    tasks = run.wait_for_tasks(lambda tasks: _restarts(tasks) == 1)
    assert sorted(task["JobState"] for task in tasks.values()) == ["PENDING", "RUNNING", "RUNNING"]
    wanted = [event["wanted"] for event in run.events("autoscale")]
    assert wanted[-2:] == [3, 2]
    assert len(wanted) <= 3
    run.wait_for_steps()
    check_gentle(run)


@pytest.mark.thorough
def test_partition_that_does_not_exist_is_said_in_slurms_own_words(cluster: Cluster, tmp_path: Path) -> None:
    command = ("python", "-m", "ef_common.cli", "slurm", "submit", f"--run-dir={tmp_path}/run", "--partition=missing")
    done = cluster.call(*command, str(SCRIPT))
    assert done.returncode == 2
    assert "invalid partition specified: missing" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_exception_in_the_script_fails_the_job(run: Submitted, cluster: Cluster, tmp_path: Path) -> None:
    cluster.occupy()
    (tmp_path / "bad.py").write_text("raise ValueError('this is wrong')")
    said = cluster.elasticflow(
        *("slurm", "submit", "--nodes=1:3", f"--run-dir={run.directory}", "--exclusive", str(tmp_path / "bad.py"))
    )
    run.job = said.split()[2]
    cluster.wait_until(lambda: "RUNNING" not in cluster.states(run.job) and "FAILED" in cluster.states(run.job))
    assert "COMPLETED" not in cluster.states(run.job)
    assert os.listdir(run.directory)


@pytest.mark.thorough
def test_script_of_the_example_trains(run: Submitted, cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    options = ("--parsable", "--exclusive", f"--chdir={tmp_path}", f"--output={run.outputs}/%A_%a.txt")
    done = cluster.call("sbatch", *options, f"{ROOT}/examples/11-slurm/job.sh", "--epochs=2", environ=BY_HAND)
    run.job = done.stdout.strip()
    cluster.wait_until(lambda: set(cluster.states(run.job)) == {"COMPLETED", "CANCELLED"})
    assert cluster.states(run.job)[0] == "COMPLETED"
    assert "finished" in cluster.elasticflow("status", "--once", f"{tmp_path}/elasticflow-runs/digits-{run.job}")


def start_step(run: Submitted, cluster: Cluster, srun: str, *options: str, checkpoint: str = "") -> str:
    """Submit a batch script with one step. Returns the number of the job."""
    training = json.dumps(json.dumps({**OPTIONS, "checkpoint": checkpoint}))
    step = f"{srun} elasticflow run --run-dir={run.directory} {SCRIPT} {training}"
    given = ("--parsable", "--exclusive", *options, f"--output={run.outputs}/%A.txt", f"--wrap={step}")
    return cluster.call("sbatch", *given, environ=BY_HAND).stdout.strip()


def kill_task(cluster: Cluster, *nodes: int) -> None:
    """Kill the last task on these nodes with all that it has started."""
    processes = [psutil.Process(pid) for node in nodes for pid in cluster.processes(node)]
    *_, launcher = (one for one in processes if "bin/elasticflow run" in " ".join(one.cmdline()))
    for process in (launcher, *launcher.children(recursive=True)):
        process.kill()


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["killed", "given back"])
def test_tasks_of_a_step_meet_without_a_host_or_place_and_lose_one(run: Submitted, cluster: Cluster, how: str) -> None:
    job = start_step(run, cluster, "elasticflow slurm srun", "--nodes=3", "--ntasks-per-node=1")
    first = run.wait_for_world(3)
    run.wait_for_steps()
    if how == "killed":
        kill_task(cluster, 2)
    else:
        cluster.ask("scontrol", "update", f"JobId={job}", "NumNodes=2")
    run.wait_for_world(2, after=first)
    finish_step(run, cluster, job)
    assert cluster.state(job) == "COMPLETED"  # whatever has become of one task


@pytest.mark.thorough
def test_workers_of_a_step_leave_with_a_checkpoint_when_it_is_interrupted(run: Submitted, cluster: Cluster) -> None:
    step = "exec elasticflow slurm srun"  # so that it is what the batch script becomes
    job = start_step(run, cluster, step, "--nodes=2", "--ntasks-per-node=1", checkpoint=f"file://{run.directory}")
    run.wait_for_world(2)
    run.wait_for_steps()
    cluster.ask("scancel", "--batch", "--signal=INT", job)
    cluster.wait_until(lambda: cluster.state(job) == "FAILED")
    assert "ExitCode=130:0" in cluster.ask("scontrol", "--oneliner", "show", "job", job)
    last = max(event["step"] for event in run.events("step"))
    assert max(event["step"] for event in run.events("checkpoint")) in (last, last + 1)
    check_gentle(run)


@pytest.mark.thorough
def test_task_that_fails_fails_the_job_of_its_step(run: Submitted, cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise ValueError('this is wrong')")
    step = f"elasticflow slurm srun elasticflow run --run-dir={run.directory} {tmp_path}/bad.py"
    given = ("--parsable", "--exclusive", "--nodes=2", f"--output={run.outputs}/%A.txt", f"--wrap={step}")
    job = cluster.call("sbatch", *given, environ=BY_HAND).stdout.strip()
    cluster.wait_until(lambda: cluster.state(job) == "FAILED")
    assert "ValueError: this is wrong" in (run.outputs / f"{job}.txt").read_text()


@pytest.mark.thorough
@pytest.mark.skipif(not has_pmix(), reason="not installed: libpmix-dev")
def test_tasks_of_a_step_under_pmix_meet_and_lose_one(run: Submitted, cluster: Cluster) -> None:
    """They are on one node: those of several share a folder of the plugin's here, as they share a machine."""
    job = start_step(run, cluster, "srun --mpi=pmix --kill-on-bad-exit=0 --no-kill", "--nodes=1", "--ntasks=3")
    first = run.wait_for_world(3)
    run.wait_for_steps()
    kill_task(cluster, 1, 2, 3)
    run.wait_for_world(2, after=first)
    finish_step(run, cluster, job)


def finish_step(run: Submitted, cluster: Cluster, job: str) -> None:
    """The training is enough: it ends well, and with it the job."""
    run.wait_for_steps()
    (run.directory / ENOUGH).touch()
    cluster.wait_until(lambda: not cluster.ask("squeue", "--noheader", f"--jobs={job}"))
    run.audit()


@pytest.mark.thorough
def test_tasks_whose_time_ends_leave_with_a_checkpoint_and_are_queued_again(run: Submitted, cluster: Cluster) -> None:
    run.submit("1:2", "--time=3", checkpoint=f"file://{run.directory}")  # minutes; the notice comes a minute earlier
    run.wait_for_world(2)
    run.wait_until(lambda _: len(run.events("notice")) == 2, "the end of the time")
    tasks = run.wait_for_tasks(lambda tasks: _restarts(tasks) == 2)
    assert {task["JobState"] for task in tasks.values()} == {"PENDING"}
    last = max(event["step"] for event in run.events("step"))
    assert max(event["step"] for event in run.events("checkpoint")) in (last, last + 1)
    check_gentle(run)


@pytest.mark.thorough
def test_job_that_depends_on_the_first_task_starts_when_the_training_has_ended_well(
    run: Submitted, cluster: Cluster
) -> None:
    run.submit("1:2")
    run.wait_for_world(2)
    options = ("--parsable", f"--dependency=afterok:{run.job}_0", "--output=/dev/null")
    other = cluster.ask("sbatch", *options, "--wrap=true")
    run.wait_for_steps()
    assert cluster.state(other) == "PENDING"
    run.finish("COMPLETED", "COMPLETED")
    cluster.wait_until(lambda: cluster.state(other) == "COMPLETED")
