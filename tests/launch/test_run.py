"""`elasticflow run`, `status` and `scale`, with real jobs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from click.testing import CliRunner

from ef_common.cli import main
from ef_common.core.membership import Settings
from ef_common.errors import UsageError
from ef_common.launch import joining, run_directory
from ef_common.launch import run as launcher
from ef_common.launch.coordinator_process import LINGER_S
from ef_common.launch.ending import has_ended
from ef_common.launch.signals import listening
from ef_common.protocol.auth import Token
from ef_common.storage.checkpoints import Checkpoints
from ef_common.storage.store import Store
from ef_common.testing.harness_run import GUARD_S, HEARTBEAT_TIMEOUT_S, HarnessError, Run
from ef_common.testing.ports import reserve_port
from tests.faults.faults import HANG
from tests.faults.hosts import ENOUGH
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT
from tests.gpu import GPU_MARKS
from tests.waiting import poll_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


LACKS = {
    "before it joins": "raise ImportError('libfoo.so is not there')",
    "before its first step": """
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from ef_lightning import ElasticFlowStrategy


class Lacking(BoringModel):
    def setup(self, stage):
        raise FileNotFoundError("/data is not there")


pl.Trainer(strategy=ElasticFlowStrategy(), logger=False, enable_checkpointing=False).fit(Lacking())
""",
}
"""Programs that fail, as their machine lacks something."""


DIES_NEAR_THE_END = """
import os, pathlib, signal, sys, time
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from ef_lightning import ElasticFlowStrategy

died = pathlib.Path(sys.argv[1])
if died.exists():
    time.sleep(LINGER_S + 3.0)  # imports, on a slow disk


class Model(BoringModel):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        time.sleep(0.05)
        if self.trainer.global_rank == 1 and batch_idx == 25:
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


options = {"max_epochs": 1, "accelerator": "cpu", "limit_val_batches": 0, "logger": False}
trainer = pl.Trainer(strategy=ElasticFlowStrategy(), enable_checkpointing=False, **options)
trainer.fit(Model())
""".replace("LINGER_S", str(LINGER_S))


class Launched(Run):
    """A job, or one node of it, that `elasticflow run` has started."""

    reader: subprocess.Popen[bytes] | None = None

    def start(
        self, *arguments: str, name: str = "launcher", run_dir: Path | None = None, tee: bool = False, **environ: str
    ) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "ELASTICFLOW_"))}
        variables = {
            "ELASTICFLOW_AUDIT": "1",
            "ELASTICFLOW_HEARTBEAT_TIMEOUT": str(HEARTBEAT_TIMEOUT_S),
            "PYTHONWARNINGS": "ignore",
            **environ,
        }
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        place = f"--run-dir={run_dir or self.directory}"
        self.output = self.outputs / f"{name}.txt"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ef_common.cli", "run", place, "--monitor-interval=0.1", *arguments],
                env={**inherited, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if tee else output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if tee:
            assert self.process.stdout is not None
            self.reader = subprocess.Popen(
                ["tee", str(self.output)], stdin=self.process.stdout, stdout=subprocess.DEVNULL
            )
            self.process.stdout.close()

    def check(self) -> None:
        if self.process.poll() is not None:
            raise HarnessError(f"the launcher has ended ({self.process.returncode})\n{self.tails()}")

    def interrupt(self) -> None:
        """As Ctrl-C does: all processes of the terminal's foreground are signalled."""
        if self.reader is not None:
            self.reader.kill()  # by another signal: a shell may have it ignore SIGINT
            self.reader.wait(GUARD_S)
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self) -> int:
        try:
            return self.process.wait(GUARD_S)
        except subprocess.TimeoutExpired:
            raise HarnessError(f"the launcher does not end\n{self.tails()}") from None

    def workers(self) -> list[int]:
        """Processes of workers that have started and live, the oldest first."""
        return [event["pid"] for event in self.events("start") if psutil.pid_exists(event["pid"])]

    def end(self) -> None:
        """End all of it, also what a launcher has left behind that did not do its work."""
        mine = f"--run-dir={self.directory}"
        agents = [p for p in psutil.process_iter(["cmdline"]) if mine in (p.info["cmdline"] or [])]
        for process in [*agents, *map(psutil.Process, self.workers())]:
            for one in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        self.process.wait(GUARD_S)
        if self.reader is not None:
            self.reader.kill()
            self.reader.wait(GUARD_S)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(*arguments: str, directory: Path = tmp_path / "run", tee: bool = False, **environ: str) -> Launched:
        launched = Launched(directory)
        launched.start(*arguments, name=f"launcher-{len(started)}", tee=tee, **environ)
        started.append(launched)
        return launched

    yield start
    for launched in started:
        launched.end()


def script(**options: Any) -> list[str]:
    return [str(SCRIPT), json.dumps({**OPTIONS, **options})]


def fault(harm: str, *, rank: int = 1) -> str:
    """A fault of the worker with this rank, in its third step."""
    return json.dumps({"where": "forward", "step": 2, "rank": rank, "harm": harm})


def elasticflow(*arguments: str) -> tuple[int, str]:
    with patch.dict(os.environ):  # to which the launcher adds what its agents need
        result = CliRunner().invoke(main, list(arguments))
    return result.exit_code, result.output


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=GPU_MARKS)])
def test_local_job_loses_gains_and_gives_back_workers(job: Callable[..., Launched], accelerator: str) -> None:
    run = job("--nproc-per-node=2", "--max-restarts=1", *script(accelerator=accelerator, backend="nccl"))
    run.wait_for_world(2)
    run.wait_for_step(3)
    first, victim = run.workers()
    status, text = elasticflow("scale", str(run.directory), "3")
    assert status == 0
    assert re.fullmatch(r"2 → 3 workers: worker \S+ joined after \d+\.\d s\n", text)
    third = run.wait_for_world(3)
    os.kill(victim, signal.SIGKILL)
    after = run.wait_for_world(2, after=third)
    again = run.wait_for_world(3, after=after)  # it was started again, as a newcomer
    assert elasticflow("scale", "--no-wait", str(run.directory), "1") == (0, "3 → 1 worker ordered\n")
    run.wait_for_world(1, after=again)
    status, text = elasticflow("status", "--once", str(run.directory))
    assert status == 0
    assert "1 of 1 wanted (at most 8)" in text
    (run.directory / ENOUGH).touch()
    assert run.wait() == 0
    assert run.events("start")[0]["pid"] in (first, victim)
    assert [event["worker"] for event in run.events("end") if event["reason"] == "crash"] == []
    assert len(run.events("notice")) == 2  # drained, not killed
    run.audit()
    told = [line for line in run.output.read_text().splitlines() if line.startswith("elasticflow: ")]
    names = {event["pid"]: event["worker"] for event in run.events("start")}
    assert "elasticflow: training with 2 workers" in told
    assert sum(names[victim] in line and "lost (its connection ended)" in line for line in told) == 1
    assert any("joined; resumed after" in line for line in told)
    status, text = elasticflow("status", str(run.directory))
    assert "finished" in text
    assert elasticflow("scale", str(run.directory), "2")[0] == 2


ANNOUNCED = Path(__file__).parents[1] / "lightning" / "announced.py"


@pytest.mark.thorough
def test_lightning_announces_itself_once_in_a_job(job: Callable[..., Launched]) -> None:
    run = job("--nproc-per-node=2", str(ANNOUNCED), ENOUGH)
    run.wait_for_world(2)
    run.wait_for_step(3)
    assert elasticflow("scale", str(run.directory), "3")[0] == 0
    run.wait_for_world(3)
    (run.directory / ENOUGH).touch()
    assert run.wait() == 0
    text = run.output.read_text()
    announced = ("Seed set to 5", "GPU available:", "TPU available:", "Seed set to 7")
    assert {line: text.count(line) for line in announced} == dict.fromkeys(announced, 1)


@pytest.mark.thorough
def test_interrupt_leaves_with_a_checkpoint_and_the_same_command_goes_on(
    job: Callable[..., Launched], tmp_path: Path
) -> None:
    url = str(tmp_path / "store")
    # A step takes longer than the time within which two signals are one.
    arguments = ("--nproc-per-node=2", f"--checkpoint={url}", *script(checkpoint_steps=100_000, step_sleep_s=2.0))
    run = job(*arguments, tee=True)
    run.wait_for_world(2)
    run.wait_for_step(2)
    run.interrupt()  # which also ends who has read the output
    assert run.wait() == 128 + signal.SIGINT
    found = Checkpoints(Store(url)).newest_valid()
    assert found is not None
    assert found.id.step == max(event["step"] for event in run.events("step")) >= 2
    assert run.workers() == []
    again = job(*arguments)
    again.wait_for_step(found.id.step + 1)
    (again.directory / ENOUGH).touch()
    assert again.wait() == 0
    assert f"elasticflow: run 2 of this job goes on from checkpoint {found.id.name}" in again.output.read_text()
    assert again.events("run")[-1]["resumed"] == found.id.name
    again.audit()


@pytest.mark.parametrize("max_restarts", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_only_worker_whose_agent_is_killed_leaves_a_checkpoint_and_is_replaced(
    job: Callable[..., Launched], tmp_path: Path, max_restarts: int
) -> None:
    url = str(tmp_path / "store")
    options = script(checkpoint_steps=100_000)
    run = job(f"--max-restarts={max_restarts}", f"--checkpoint={url}", *options)
    run.wait_for_step(2)
    (worker,) = map(psutil.Process, run.workers())
    worker.parent().kill()  # type: ignore[union-attr]
    lost = "elasticflow: a worker lost its agent, which was killed by SIGKILL; "
    if max_restarts:
        run.wait_until(lambda _: run.events("run")[1:], "the next run of the job")
        run.wait_for_steps()
        (run.directory / ENOUGH).touch()
        assert run.wait() == 0
        assert f"{lost}restarting it (restart 1 of 1)" in run.output.read_text()
        run.audit()
    else:
        assert run.wait() == 1
        assert f"{lost}it is not replaced (--max-restarts=0)" in run.output.read_text()
    assert has_ended(worker)
    found = Checkpoints(Store(url)).newest_valid()
    assert found is not None
    saved = run.events("run")[1]["resumed"] if max_restarts else found.id.name
    last = max(event["step"] for event in run.events("step", worker=run.events("start")[0]["worker"]))
    assert saved.endswith(f"-step-{last:09}")


@pytest.mark.thorough
def test_two_jobs_that_are_started_at_once_do_not_share_a_directory(
    job: Callable[..., Launched], tmp_path: Path
) -> None:
    waits = tmp_path / "waits.py"
    waits.write_text(f"import os, time\nwhile not os.path.exists({str(tmp_path / 'enough')!r}): time.sleep(0.05)")
    both = [job(str(waits)) for _ in range(2)]
    poll_until(lambda: any(one.process.poll() is not None for one in both))
    refused, taken = sorted(both, key=lambda one: one.process.poll() is None)
    assert (refused.wait(), taken.process.poll()) == (2, None)
    assert f"another run is active there (process {taken.process.pid})" in refused.output.read_text()
    (tmp_path / "enough").touch()
    assert taken.wait() == 0


@pytest.mark.parametrize(
    ("sent", "noted"),
    [
        ([signal.SIGINT, signal.SIGHUP], [signal.SIGINT]),
        ([signal.SIGHUP, signal.SIGHUP], [signal.SIGHUP]),
        ([signal.SIGHUP, signal.SIGINT], [signal.SIGHUP, signal.SIGINT]),
        ([signal.SIGUSR1, signal.SIGTERM], [signal.SIGUSR1, signal.SIGTERM]),
        ([signal.SIGTERM, signal.SIGUSR1], [signal.SIGTERM]),
    ],
)
def test_end_of_the_terminal_lets_the_workers_leave_and_never_kills_them(
    sent: list[signal.Signals], noted: list[signal.Signals], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(partial(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_DFL)))
    with listening() as signals:
        for number in sent:
            signal.raise_signal(number)
    assert signals == noted
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_launcher_that_is_to_outlive_its_terminal_goes_on_ignoring_its_end() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening() as signals:
            signal.raise_signal(signal.SIGHUP)
        assert signals == []
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.thorough
def test_second_interrupt_ends_all_at_once(job: Callable[..., Launched]) -> None:
    # No boundary comes for long, and nobody ends by himself.
    run = job("--nproc-per-node=2", *script(step_sleep_s=600.0, num_workers=1), ELASTICFLOW_GRACE="600")
    run.wait_for_world(2)
    tree = psutil.Process(run.process.pid).children(recursive=True)
    run.interrupt()
    run.wait_until(lambda _: "Press Ctrl-C again" in run.output.read_text(), "the launcher's answer")
    assert run.process.poll() is None
    run.interrupt()
    assert run.wait() == 128 + signal.SIGINT
    _, left = psutil.wait_procs(tree, GUARD_S)
    assert left == []


@pytest.mark.thorough
def test_launcher_that_is_killed_takes_its_workers_along(job: Callable[..., Launched]) -> None:
    run = job("--nproc-per-node=2", *script())
    run.wait_for_world(2)
    tree = psutil.Process(run.process.pid).children(recursive=True)
    run.process.kill()
    _, left = psutil.wait_procs(tree, GUARD_S)
    assert left == []
    assert not run_directory.read_launcher(run.directory).alive  # type: ignore[union-attr]


@pytest.mark.thorough
def test_two_nodes_with_an_endpoint_train_together_and_share_a_directory(job: Callable[..., Launched]) -> None:
    reserved = reserve_port()
    endpoint = f"--rdzv-endpoint=127.0.0.1:{reserved.getsockname()[1]}"
    first, second = (
        job(endpoint, f"--rdzv-conf=is_host={is_host},last_call_timeout=60", "--nnodes=1:2", *script())
        for is_host in (1, 0)
    )
    first.wait_for_world(2)
    assert "one node of a larger job" in elasticflow("scale", str(first.directory), "2")[1]
    second.process.send_signal(signal.SIGTERM)
    assert second.wait() == os.EX_TEMPFAIL
    first.wait_until(lambda _: first.events("view", world_size=1), "the other node's leave")
    (first.directory / ENOUGH).touch()
    assert first.wait() == 0
    assert elasticflow("audit", str(first.directory))[0] == 0
    reserved.close()


@pytest.mark.thorough
@pytest.mark.parametrize("where", LACKS)
def test_newcomer_on_a_machine_that_lacks_something_costs_its_node_alone(
    job: Callable[..., Launched], tmp_path: Path, where: str
) -> None:
    reserved = reserve_port()
    endpoint = f"--rdzv-endpoint=127.0.0.1:{reserved.getsockname()[1]}"
    first = job(endpoint, "--rdzv-conf=is_host=1", "--nnodes=1:2", *script())
    first.wait_for_world(1)
    first.wait_for_step(2)
    program = tmp_path / "lacks.py"
    program.write_text(LACKS[where])
    second = job(endpoint, "--rdzv-conf=is_host=0", "--nnodes=1:2", "--max-restarts=1", str(program))
    assert second.wait() == launcher.EXCUSED
    first.wait_for_step(first.events("step")[-1]["step"] + 3)
    (first.directory / ENOUGH).touch()
    assert first.wait() == 0
    first.audit()
    reserved.close()


@pytest.mark.thorough
def test_node_that_joins_by_the_run_directory_needs_no_option_and_no_script(job: Callable[..., Launched]) -> None:
    run = job("--nproc-per-node=2", "--nnodes=1:4", *script())
    run.wait_for_world(2)
    assert (run.directory / "job.json").stat().st_mode & 0o777 == 0o600
    newcomer = job(f"--join={run.directory}")
    run.wait_for_world(3)
    assert "one node of a larger job" not in elasticflow("scale", "--no-wait", str(run.directory), "1")[1]
    run.wait_for_world(2)
    run.process.send_signal(signal.SIGTERM)  # with it goes the coordinator, and the newcomer's standby takes over
    assert run.wait() == os.EX_TEMPFAIL
    newcomer.wait_for_world(1)
    newcomer.wait_for_step(newcomer.events("step")[-1]["step"] + 3)
    (run.directory / ENOUGH).touch()
    assert newcomer.wait() == 0
    run.audit()
    late = job(f"--join={run.directory}")
    assert late.wait() == 0
    assert late.output.read_text() == "elasticflow: the training is over: there is nothing to join\n"


@pytest.mark.thorough
@pytest.mark.parametrize("door", ["host", "list", "registry"])
def test_node_that_joins_founds_no_job_of_its_own(job: Callable[..., Launched], tmp_path: Path, door: str) -> None:
    reserved = reserve_port()
    here = f"127.0.0.1:{reserved.getsockname()[1]}"
    endpoint = {
        "host": here,
        "list": f"{here},127.0.0.2:{reserved.getsockname()[1]}",
        "registry": f"file://{tmp_path}/at",
    }
    alone = job(f"--rdzv-endpoint={endpoint[door]}", "--rdzv-conf=join=1", *script(), directory=tmp_path / "alone")
    assert alone.wait() == 2
    assert "within 10 s" in alone.output.read_text()
    assert alone.events("start") == []
    nodes = [job(f"--rdzv-endpoint={endpoint[door]}", "--nnodes=1:4", *script())]
    if door == "list":  # more than half of the two
        nodes.append(job(f"--rdzv-endpoint={endpoint[door]}", "--nnodes=1:4", *script()))
    nodes[0].wait_for_world(len(nodes))
    nodes.append(job(f"--join={nodes[0].directory}"))
    if door == "registry":
        nodes.append(job(f"--join={endpoint[door]}", *script()))
    nodes[0].wait_for_world(len(nodes))
    (nodes[0].directory / ENOUGH).touch()
    assert [node.wait() for node in nodes] == [0] * len(nodes)
    nodes[0].audit()
    reserved.close()


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["SIGUSR1", "notice"])
def test_node_of_the_coordinator_that_is_told_to_go_ends_with_its_own_status(
    job: Callable[..., Launched], tmp_path: Path, how: str
) -> None:
    reserved = reserve_port()
    endpoint = f"--rdzv-endpoint=127.0.0.1:{reserved.getsockname()[1]}"
    conf = "last_call_timeout=60"
    notice = {"ELASTICFLOW_NOTICE": f"file://{tmp_path}/go"}
    first, second = (
        job(
            endpoint,
            f"--rdzv-conf=is_host={is_host},{conf}",
            "--nnodes=1:2",
            *more,
            *script(),
            directory=place,
            **environ,
        )
        for is_host, place, more, environ in (
            (1, tmp_path / "a", ["--left-status=7"], notice),
            (0, tmp_path / "b", [], {}),
        )
    )
    second.wait_until(lambda _: second.events("view", world_size=2), "the other node")
    (kept,) = second.workers()
    if how == "notice":
        (tmp_path / "go").touch()
    else:
        first.process.send_signal(signal.SIGUSR1)
    assert first.wait() == 7
    second.wait_for_step(max(event["step"] for event in second.events("step")) + 5)
    assert second.workers() == [kept]
    (second.directory / ENOUGH).touch()
    assert second.wait() == 0
    assert not second.events("fault")
    reserved.close()


@pytest.mark.thorough
@pytest.mark.parametrize(("where", "whom"), [("node", "launcher"), ("node", "agent"), ("machine", "launcher")])
def test_node_that_is_told_to_go_while_its_worker_imports_starts_no_other(
    job: Callable[..., Launched], tmp_path: Path, where: str, whom: str
) -> None:
    reserved = reserve_port()
    options = ["--nnodes=1:2"]
    if where == "node":
        options += [f"--rdzv-endpoint=127.0.0.1:{reserved.getsockname()[1]}", "--rdzv-conf=is_host=1"]
    slow = tmp_path / "imports.py"
    slow.write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    run = job(*options, "--max-restarts=3", str(slow))
    run.wait_until(lambda _: "importing" in run.output.read_text(), "the worker")
    (agent,) = (one for one in psutil.Process(run.process.pid).children() if one.children())
    os.kill(run.process.pid if whom == "launcher" else agent.pid, signal.SIGUSR1)
    assert run.wait() == 75
    assert run.output.read_text().count("importing") == 1
    reserved.close()


@pytest.mark.thorough
def test_worker_that_stood_still_for_so_long_that_it_was_lost_is_replaced(job: Callable[..., Launched]) -> None:
    """It comes back by itself, hears that the others have gone on without it, and ends with status 1."""
    run = job("--nproc-per-node=2", "--rdzv-conf=heartbeat_timeout=2", *script())
    generation = run.wait_for_world(2)
    run.wait_for_step(3)
    stopped = run.workers()[1]
    os.kill(stopped, signal.SIGSTOP)
    after = run.wait_for_world(1, after=generation)
    os.kill(stopped, signal.SIGCONT)
    run.wait_for_world(2, after=after)
    text = run.output.read_text()
    assert "a worker lost its place in the job (see above); restarting it (restart 1 of 3)" in text
    (run.directory / ENOUGH).touch()
    assert run.wait() == 0
    run.audit()


@pytest.mark.thorough
def test_worker_that_is_stopped_for_good_is_ended_and_replaced(job: Callable[..., Launched]) -> None:
    run = job("--nproc-per-node=2", "--rdzv-conf=heartbeat_timeout=2", *script())
    generation = run.wait_for_world(2)
    run.wait_for_step(3)  # by then they have agreed that there is no store, so half of them may go on
    stopped = run.workers()[1]
    os.kill(stopped, signal.SIGSTOP)
    after = run.wait_for_world(1, after=generation)
    run.wait_for_world(2, after=after)
    assert not psutil.pid_exists(stopped)
    assert "a worker was killed by SIGKILL; restarting it" in run.output.read_text()
    (run.directory / ENOUGH).touch()
    assert run.wait() == 0
    run.audit()


def test_error_of_the_script_is_shown_and_gives_status_1(job: Callable[..., Launched], tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("raise ValueError('this is wrong')")
    run = job("--nproc-per-node=2", str(bad))
    assert run.wait() == 1
    assert run.output.read_text().count("ValueError: this is wrong") == 2
    assert "Root Cause" not in run.output.read_text()


def test_exit_with_another_status_than_0_in_a_step_ends_the_job(job: Callable[..., Launched]) -> None:
    run = job("--nproc-per-node=2", *script(), fault("exit 3"))
    assert run.wait() == 1
    text = run.output.read_text()
    assert "elasticflow: the job has failed: worker " in text
    assert "raised SystemExit: 3 (in " in text
    assert "restarting it" not in text


@pytest.mark.thorough
def test_worker_whose_program_ends_in_a_step_has_left_and_the_others_are_replaced(
    job: Callable[..., Launched],
) -> None:
    run = job("--nproc-per-node=2", *script(), fault("exit 0"))
    left, kept = run.wait_for_world(2), run.wait_for_world(1)
    assert kept > left
    run.wait_until(lambda _: len(run.workers()) == 1, "the end of the other worker")
    run.wait_until(lambda _: "ended with the program; resumed after" in run.output.read_text(), "what is told of it")
    os.kill(run.workers()[0], signal.SIGKILL)
    run.wait_for_world(1, after=kept)
    (run.directory / ENOUGH).touch()
    assert run.wait() == 0
    assert "a worker was killed by SIGKILL; restarting it (restart 1 of 3)" in run.output.read_text()
    run.audit()


@pytest.mark.thorough
def test_job_whose_program_ends_in_a_step_everywhere_is_not_over(job: Callable[..., Launched]) -> None:
    run = job("--nproc-per-node=1", *script(), fault("exit 0", rank=0))
    assert run.wait() == os.EX_TEMPFAIL
    assert "elasticflow: all workers have left before the training was over\n" in run.output.read_text()


@pytest.mark.thorough
def test_job_whose_others_fail_has_not_finished_because_one_was_asked_to_leave(job: Callable[..., Launched]) -> None:
    run = job("--nproc-per-node=2", "--max-restarts=0", *script())
    run.wait_for_world(2)
    assert elasticflow("scale", str(run.directory), "1")[0] == 0
    run.wait_for_world(1)
    run.wait_until(lambda events: len(run.workers()) == 1, "the end of the other worker")
    (last,) = run.workers()
    os.kill(last, signal.SIGKILL)
    assert run.wait() == 1


@pytest.mark.thorough
def test_worker_that_is_started_again_shortly_before_the_end_and_comes_late_has_not_failed(
    job: Callable[..., Launched], tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text(DIES_NEAR_THE_END)
    run = job("--nproc-per-node=2", "--nnodes=1:2", str(tmp_path / "a.py"), str(tmp_path / "died"))
    assert run.wait() == 0
    text = run.output.read_text()
    assert "a worker was killed by SIGKILL; restarting it (restart 1 of 3)" in text
    assert "failed" not in text
    assert "CoordinatorLost" not in text


@pytest.mark.thorough
def test_worker_that_is_killed_again_and_again_is_given_up(job: Callable[..., Launched], tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os; print('begin', flush=True); os.kill(os.getpid(), 9)")
    run = job("--max-restarts=2", str(tmp_path / "a.py"))
    assert run.wait() == 1
    assert run.output.read_text().count("begin\n") == 3
    assert run.output.read_text().count("killed by SIGKILL; restarting it") == 2


def test_options_of_torchrun_pass_through(job: Callable[..., Launched], tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['TORCHELASTIC_RUN_ID'], os.environ['ELASTICFLOW_RUN_DIR'], sys.argv[1:])"
    (tmp_path / "a.py").write_text(code)
    logs = tmp_path / "logs"
    options = (f"--log-dir={logs}", "--redirects=3", "--rdzv-id=mine", "--log-format=json")
    run = job(*options, str(tmp_path / "a.py"), "--nnodes", "7")
    assert run.wait() == 0
    assert json.loads(run.output.read_text())["run_dir"] == str(run.directory)
    (printed,) = logs.rglob("stdout.log")
    assert printed.read_text() == f"mine {run.directory} ['--nnodes', '7']\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rdzv-backend=c10d", "x.py"], "needs --rdzv-endpoint"),
        (["--nproc-per-node=0", "x.py"], "at least one worker"),
        (["--nproc-per-node=many", "x.py"], "many"),
        (["--nnodes=3:1:4", "x.py"], "3:1:4"),
        (["--nnodes=2", "x.py"], "at least 2 nodes needs a place where they meet: add --rdzv-endpoint=HOST:PORT"),
        (["--nnodes=4:8", "--nproc-per-node=2", "x.py"], "or start it with --nnodes=1:8 or --nproc-per-node=4 on this"),
        (["--rdzv-conf=hang_timeout=soon", "x.py"], "hang_timeout=soon"),
        (["--rdzv-conf=hang_timeout", "x.py"], "expected KEY=VALUE"),
        (["--left-status=256", "x.py"], "--left-status=256"),
        (["--join=/nowhere"], "--join takes the directory of a run"),
        (["--join=file:///nowhere/run"], "name the script, too"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    code, text = elasticflow("run", f"--run-dir={tmp_path}", *arguments)
    assert code == 2
    assert message in text


@pytest.mark.parametrize("options", [["--nnodes=2:3", "--nproc-per-node=2"], ["--nnodes=2", "--standalone"]])
def test_job_that_needs_several_workers_of_this_machine_starts_on_it(options: list[str]) -> None:
    """With --standalone, the number of nodes may be that of a scheduler's jobs, of which each trains alone."""
    assert launcher.Options.parse([*options, "x.py"]).local


def test_job_on_this_machine_is_joined_with_its_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ELASTICFLOW_TOKEN", raising=False)
    args = launcher.parser().parse_args(["--rdzv-endpoint=127.0.0.1:1", "--nnodes=1:3", "mine.py", "--lr=1"])
    args.module = True
    joining.write(tmp_path, args, ["mine.py", "--lr=1"], local=True, token="")
    code, text = elasticflow("run", f"--join={tmp_path}")
    assert (code, "set ELASTICFLOW_TOKEN" in text) == (2, True)
    joining.write(tmp_path, args, ["mine.py", "--lr=1"], local=True, token="made")
    with patch.dict(os.environ):
        options = launcher.Options.parse([f"--join={tmp_path}"])
        assert os.environ["ELASTICFLOW_TOKEN"] == "made"
    assert (options.max_nodes, options.local, options.run_dir) == (3, False, tmp_path)
    assert [options.torchrun.training_script, *options.torchrun.training_script_args] == ["mine.py", "--lr=1"]
    assert (options.torchrun.module, options.torchrun.no_python) == (True, False)


def test_run_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    args = launcher.parser().parse_args(["mine.py"])
    with pytest.raises(UsageError, match=r"cannot be written: No such file or directory\. Use another --run-dir"):
        joining.write(tmp_path / "gone", args, ["mine.py"], local=True, token="")


def test_option_of_the_script_that_is_named_as_one_of_ours_is_the_scripts() -> None:
    options = launcher.Options.parse(["mine.py", "--join"])
    assert (options.torchrun.join, options.torchrun.training_script_args) == (None, ["--join"])


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["-t3"],
        ["-t", "3"],
        ["-m"],
        ["--nproc-per-node", "2", "--no-python"],
        ["--rdzv_conf=hang_timeout=900", "--max-r", "1"],
        ["--"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    "arguments",
    [["--host", "x"], ["--num=3"], ["--run", "1", "--n", "2", "--log"], ["x", "--", "--host"], ["--help"]],
    ids=" ".join,
)
def test_what_is_behind_the_script_is_not_compared_with_the_options(options: list[str], arguments: list[str]) -> None:
    args = launcher.Options.parse([*options, "mine.py", *arguments]).torchrun
    assert (args.training_script, args.training_script_args) == ("mine.py", arguments)
    if "-t" in options or "-t3" in options:
        assert args.tee == "3"
    if "--max-r" in options:
        assert args.max_restarts == 1


def test_command_line_is_read_as_torchrun_reads_it() -> None:
    made = launcher.parser()
    assert {action.nargs for action in made._actions if action.option_strings} == {None, 0}
    for argv in (
        ["x.py", "--", "-a"],
        ["x.py", "-a", "--", "b"],
        ["--", "x.py", "-a"],
        ["-m", "x", "-", ""],
        ["-", "a"],
    ):
        assert vars(launcher._parse(made, argv)) == vars(made.parse_args(argv))


def test_refused_run_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = launcher.Options.parse(["--nproc-per-node=2", "--rdzv-conf=hang_timeout=soon", "x.py"])
    with pytest.raises(UsageError, match="hang_timeout=soon"), launcher._Agents(options):
        raise AssertionError("it was not refused")
    assert not list(tmp_path.iterdir())


NOBODY = 2**30  # no process has this id
LIMITS = {"heartbeat_timeout_s": 7.0, "hang_timeout_s": 30.0, "credentials": None, "linger_s": 60.0}


def prepared(monkeypatch: pytest.MonkeyPatch, conf: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a local job orders of its coordinator, and its agents' environment."""
    ordered: list[Any] = []

    def start(*args: Any, **kwargs: Any) -> tuple[str, int]:
        ordered.extend((args, kwargs))
        return ("127.0.0.1", 5), NOBODY

    monkeypatch.setattr(launcher, "start_coordinator", start)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("ELASTICFLOW_TOKEN", "put back")
    monkeypatch.delenv("ELASTICFLOW_TOKEN")
    with launcher._Agents(launcher.Options.parse(["--nproc-per-node=3", f"--rdzv-conf={conf}", "x.py"])):
        return ordered[0], ordered[1]


def test_settings_of_a_local_job_come_to_its_coordinator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hunter2")
    conf = f"heartbeat_timeout=7,hang_timeout=30,last_call_timeout=4,on_minority=continue,token_file={tmp_path}/token"
    (_, token, settings), limits = prepared(monkeypatch, conf)
    assert limits == {**LIMITS, "launcher": os.getpid()}
    assert settings == Settings(1, 8, 4.0, 3, on_minority="continue")
    assert (token.secret, os.environ["ELASTICFLOW_TOKEN"]) == ("hunter2", "hunter2")


def test_local_job_under_tls_keeps_its_token_from_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, token, _), order = prepared(monkeypatch, "tls=1")
    assert order["credentials"] is not None
    assert token.secret == Token(os.environ["ELASTICFLOW_TOKEN"]).for_workers().secret


@pytest.mark.parametrize(
    ("conf", "token", "is_recorded"), [("", None, True), ("tls=1", None, False), ("", "of the user", False)]
)
def test_token_is_left_to_those_who_join_if_nobody_knows_it_but_workers_do(
    monkeypatch: pytest.MonkeyPatch, conf: str, token: str | None, is_recorded: bool
) -> None:
    monkeypatch.setattr(launcher, "start_coordinator", lambda *args, **kwargs: (("127.0.0.1", 5), NOBODY))
    monkeypatch.setenv("ELASTICFLOW_TOKEN", token or "put back")
    if token is None:
        monkeypatch.delenv("ELASTICFLOW_TOKEN")
    with launcher._Agents(launcher.Options.parse([f"--rdzv-conf={conf}", "x.py"])) as agents:
        assert agents.token_to_join == (os.environ["ELASTICFLOW_TOKEN"] if is_recorded else "")


def test_settings_of_a_local_job_may_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICFLOW_HEARTBEAT_TIMEOUT", "7")
    monkeypatch.setenv("ELASTICFLOW_HANG_TIMEOUT", "30")
    (_, token, settings), limits = prepared(monkeypatch, "")
    assert limits == {**LIMITS, "launcher": os.getpid()}
    assert settings == Settings(1, 8, launcher.LAST_CALL_S, 3)
    assert len(token.secret) == 32


@pytest.mark.thorough
def test_hung_worker_of_a_local_job_is_replaced_after_the_limit_of_the_command_line(
    job: Callable[..., Launched],
) -> None:
    fault = {"where": "forward", "step": 6, "signal": HANG, "rank": 1, "generation": 1}
    run = job("--nproc-per-node=2", "--rdzv-conf=hang_timeout=3", *script(), json.dumps(fault))
    first = run.wait_for_world(2)
    (view,) = run.wait_until(lambda _: run.events("view", world_size=1), "a view without it")
    assert "and the limit is 3.0 s" in view["reason"]
    run.wait_for_world(2, after=first)
    (run.directory / ENOUGH).touch()
    assert run.wait() == 0
    run.audit()


RAISING = Path(__file__).parents[1] / "faults" / "raising_worker.py"


def raising(**options: Any) -> list[str]:
    return [str(RAISING), json.dumps(options)]


@pytest.mark.thorough
def test_exception_in_one_worker_ends_the_job(job: Callable[..., Launched]) -> None:
    run = job("--nproc-per-node=3", *raising(where="forward", rank=1))
    assert run.wait() == 1
    text = run.output.read_text()
    assert text.count("\nValueError: this is a bug\n") == 1
    assert text.count("the job has failed: worker ") == 1
    assert "torch/distributed/elastic" not in text
    assert "restarting it" not in text
    assert len(run.events("start")) == 3


@pytest.mark.thorough
def test_worker_that_crashes_at_one_step_is_given_up_with_its_positions(
    job: Callable[..., Launched], tmp_path: Path
) -> None:
    """There is but one, so nobody is left when it dies."""
    run = job("--max-restarts=9", *raising(where="crash", rank=0, step=5, checkpoint=str(tmp_path / "store")))
    assert run.wait() == 1
    text = run.output.read_text()
    assert text.count("killed by SIGSEGV; restarting it (restart ") == 1
    assert text.count("killed by SIGSEGV; restarting it in 1 s (restart ") == 1
    assert "has died 3 times at step 6 of epoch 0 (SIGSEGV), on the positions 20-23 in the order" in text
    assert len(run.events("start")) == 3
