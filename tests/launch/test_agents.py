"""What `elasticflow run` holds for its agents, with agents that end at once."""

from __future__ import annotations

import atexit
import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException

from ef_common.errors import JobFailed
from ef_common.launch import run as module
from ef_common.launch.ending import has_ended
from ef_common.launch.environment import CHECKPOINT, CLAIMS, CRASH_RECORDS
from ef_common.launch.rendezvous_options import BACKEND, GivenParameters, RendezvousOptions
from ef_common.launch.run_directory import order, read_launcher, this_launcher
from ef_common.launch.signals import listening
from ef_common.launch.torchrun_handler import ElasticFlowRendezvous
from ef_common.session.crash_record import CrashRecord, write_failure
from ef_common.testing.ports import free_ports
from tests.waiting import poll_until

GUARD_S = 60.0
KILLED_BY = module.KILLED + signal.SIGKILL


def end_as(status: int, why: str = "") -> Callable[..., None]:
    def body(args: object, device: object, records: Path, *rest: object) -> None:
        if why:
            write_failure(records, why)
        os._exit(status)

    return body


OURS: Any = SimpleNamespace(rdzv_backend=BACKEND, log_dir=None, logs_specs=None, redirects="0", tee="0")


@pytest.fixture
def agents() -> Any:
    options: Any = SimpleNamespace(torchrun=OURS, local=False)
    made = module._Agents(options)
    yield made
    made.__exit__()


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_agents_that_were_replaced_hold_nothing(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_run_agent", end_as(KILLED_BY))
    agents._max_restarts = 25
    agents.start()
    before = num_files()
    for lives in range(2, 27):
        poll_until(lambda: agents.lost)
        agents.replace_lost()
        assert [agent.lives for agent in agents._agents.values()] == [lives]
    assert num_files() <= before
    poll_until(lambda: not agents.alive)
    assert agents.lost == []
    assert (agents.failed, agents.finished) == (True, False)
    assert len(list(agents._directory.iterdir())) == 1


def test_agents_that_have_left_hold_nothing_but_why_the_job_has_failed(
    agents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_run_agent", end_as(1, "w raised ValueError: x"))
    before = num_files()
    for number in range(5):
        agents.start()
        agents.drain(number)
        poll_until(lambda: not agents.alive)
        agents.forget_those_that_left()
        assert agents._agents == {}
    assert num_files() <= before
    assert list(agents._directory.iterdir()) == []
    assert (agents.failed, agents.finished, agents.failure) == (False, False, "w raised ValueError: x")


def test_agent_of_another_rendezvous_hears_no_signal_of_ours(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for other nodes, whose workers still save, and end them if it is killed."""
    monkeypatch.setattr(module, "_run_agent", lambda *args: signal.pause())
    agents._args = SimpleNamespace(rdzv_backend="c10d")
    agents.start()
    (agent,) = agents._agents.values()
    agents.drain(0)
    agents.drain(0)
    assert (agent.was_told, agent.process.is_alive()) == (False, True)
    agent.process.kill()


def test_agents_whose_worker_the_job_has_let_go_hold_nothing(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asked them: the job wants fewer nodes."""

    def leave(args: object, device: object, records: Path, *rest: object) -> None:
        CrashRecord(records, 0).leave()
        os._exit(0)

    monkeypatch.setattr(module, "_run_agent", leave)
    before = num_files()
    for _ in range(5):
        agents.start()
        poll_until(lambda: not agents.alive)
        assert agents.training == []
        agents.forget_those_that_left()
        assert agents._agents == {}
    assert num_files() <= before
    assert list(agents._directory.iterdir()) == []
    assert (agents.failed, agents.finished, agents.left) == (False, False, True)


def end_in_training(args: object, device: object, records: Path, *rest: object) -> None:
    CrashRecord(records, 0).begin_training()
    os._exit(0)


def test_worker_that_ends_in_a_training_has_left_and_the_job_has_not_finished(
    agents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_run_agent", end_in_training)
    agents.start()
    poll_until(lambda: not agents.alive)
    assert (agents.failed, agents.finished, agents.left) == (False, False, True)


@pytest.mark.parametrize(
    ("status", "why", "told"),
    [
        (KILLED_BY, "", KILLED_BY),
        (module.EXCUSED, "", module.EXCUSED),
        (KILLED_BY, "w was ended by SIGKILL at the same step three times", 0),
        (1, "", 0),
        (0, "", 0),
    ],
)
def test_node_whose_worker_was_killed_can_tell_so_unless_the_job_has_failed_by_it(
    agents: Any, monkeypatch: pytest.MonkeyPatch, status: int, why: str, told: int
) -> None:
    monkeypatch.setattr(module, "_run_agent", end_as(status, why))
    agents.start()
    poll_until(lambda: not agents.alive)
    assert agents.killed_as == told


def test_node_whose_agent_was_killed_can_tell_so(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_run_agent", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    agents.start()
    poll_until(lambda: not agents.alive)
    assert agents.killed_as == KILLED_BY


def test_agents_are_started_without_standard_output_and_error(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_run_agent", end_as(0))
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    agents.start()
    poll_until(lambda: agents.finished)


# ---------------------------------------------------------------- the launcher waits for them

LONG_S = 600.0
"""Longer than a test may last."""


@pytest.fixture
def supervise(
    agents: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[Callable[..., None]], tuple[int, str]]]:
    """Runs one agent of this body; the exit status, and what has become of it. Nothing is looked for meanwhile."""
    monkeypatch.setattr(module, "_LOOK_S", LONG_S)
    options: Any = SimpleNamespace(local=False, left_status=75)
    launcher = this_launcher(["train.py"], max_workers=1, local=False)
    with listening() as signals:

        def run(body: Callable[..., None]) -> tuple[int, str]:
            monkeypatch.setattr(module, "_run_agent", body)
            status = module._Supervisor(options, tmp_path, agents, launcher, signals).run()
            told = read_launcher(tmp_path)
            return status, "" if told is None else told.outcome

        yield run


@pytest.mark.parametrize(
    ("status", "told"), [(0, (0, "finished")), (1, (1, "failed")), (KILLED_BY, (KILLED_BY, "failed"))]
)
def test_launcher_ends_as_soon_as_its_agent_has_ended(
    supervise: Callable[[Callable[..., None]], tuple[int, str]], status: int, told: tuple[int, str]
) -> None:
    assert supervise(end_as(status)) == told


def test_node_whose_worker_ends_in_a_training_says_that_it_is_not_over(
    supervise: Callable[[Callable[..., None]], tuple[int, str]],
) -> None:
    assert supervise(end_in_training) == (75, "stopped")


def test_node_whose_worker_catches_the_exception_that_fails_the_job_has_failed(
    supervise: Callable[[Callable[..., None]], tuple[int, str]],
) -> None:
    def body(args: object, device: object, records: Path, *rest: object) -> None:
        write_failure(records, "w raised ValueError: x")
        end_in_training(args, device, records)

    assert supervise(body) == (1, "failed: w raised ValueError: x")


def test_launcher_tells_its_workers_to_leave_as_soon_as_it_is_told(
    supervise: Callable[[Callable[..., None]], tuple[int, str]],
) -> None:
    def body(args: object, device: object, records: Path, local: bool, launcher: int) -> None:
        worker = subprocess.Popen(
            ["sleep", str(LONG_S)], preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL)
        )
        os.kill(launcher, signal.SIGTERM)
        os._exit(0 if worker.wait() == -signal.SIGTERM else 1)

    assert supervise(body) == (75, "stopped")


def remove_run_directory(place: Path) -> None:
    """In an agent: the launcher writes there just after the start, and again at the end."""
    poll_until(lambda: read_launcher(place) is not None)
    shutil.rmtree(place)


def test_launcher_whose_directory_is_lost_lets_its_workers_leave_all_the_same(
    supervise: Callable[[Callable[..., None]], tuple[int, str]], tmp_path: Path
) -> None:
    """A full disk, or one that is gone, must not cost the checkpoint that they save when they leave."""

    def body(args: object, device: object, records: Path, local: bool, launcher: int) -> None:
        remove_run_directory(tmp_path)
        worker = subprocess.Popen(
            ["sleep", str(LONG_S)], preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL)
        )
        os.kill(launcher, signal.SIGTERM)
        os._exit(0 if worker.wait() == -signal.SIGTERM else 1)

    assert supervise(body) == (75, "")


def test_job_whose_directory_is_lost_ends_well(
    supervise: Callable[[Callable[..., None]], tuple[int, str]], tmp_path: Path
) -> None:
    def body(*_: object) -> None:
        remove_run_directory(tmp_path)
        os._exit(0)

    assert supervise(body) == (0, "")


# ---------------------------------------------------------------- an agent is killed, and its worker lives

ORPHAN = """
import os, signal, sys, time
from pathlib import Path
from ef_common.session.crash_record import CrashRecord

agent, launcher, does, place = os.getppid(), int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
CrashRecord(Path(os.environ["ELASTICFLOW_CRASH_RECORDS"])).introduce("w")
(place / "pid").write_text(str(os.getpid()))
os.kill(agent, signal.SIGKILL)
while os.getppid() == agent:
    time.sleep(0.01)
while does == "interrupts":  # again and again: signals that come at once are one
    os.kill(launcher, signal.SIGINT)
    time.sleep(0.2)
time.sleep(0.5 if does == "saves" else 600.0)
(place / "saved").touch()
"""


def with_orphan(does: str, place: Path) -> Callable[..., None]:
    """The body of an agent that is killed by its worker."""

    def body(args: object, device: object, records: Path, local: bool, launcher: int) -> None:
        environ = {**os.environ, CRASH_RECORDS: str(records)}
        command = [sys.executable, "-c", ORPHAN, str(launcher), does, str(place)]
        subprocess.Popen(command, env=environ, start_new_session=True)
        signal.pause()

    return body


@pytest.mark.parametrize(
    ("does", "grace_s", "told"),
    [
        ("saves", LONG_S, (KILLED_BY, "failed")),
        ("interrupts", LONG_S, (module.INTERRUPTED, "killed")),
        ("stands still", 0.0, (KILLED_BY, "failed")),
    ],
)
def test_launcher_whose_agent_was_killed_ends_after_its_worker(
    supervise: Callable[[Callable[..., None]], tuple[int, str]],
    agents: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    does: str,
    grace_s: float,
    told: tuple[int, str],
) -> None:
    """It saves a checkpoint, for which it needs the coordinator; a second Ctrl-C and the grace time end it at once."""
    monkeypatch.setattr(module, "_LOOK_S", 0.02)
    monkeypatch.setattr(module, "_LATE_S", 0.0)
    agents._grace_s = grace_s
    assert supervise(with_orphan(does, tmp_path)) == told
    assert (tmp_path / "saved").exists() == (does == "saves")
    worker = int((tmp_path / "pid").read_text())
    agents.__exit__()
    poll_until(lambda: not psutil.pid_exists(worker) or has_ended(psutil.Process(worker)))


# ---------------------------------------------------------------- what the launcher tells its workers


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("runs/one", "{here}/runs/one"),
        ("runs/11:30", "{here}/runs/11:30"),
        ("~/one", "/home/me/one"),
        ("s3://bucket/one", "s3://bucket/one"),
        ("file:one", "file:one"),
    ],
)
@pytest.mark.parametrize("as_option", [True, False])
def test_places_are_absolute_so_that_a_script_may_change_its_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, told: str, as_option: bool
) -> None:
    found = {}

    def run(self: Any) -> int:
        found.update({name: os.environ[name] for name in (CHECKPOINT, CLAIMS)})
        return 0

    monkeypatch.setattr(module.command, "prepare", lambda args: None)
    monkeypatch.setattr(module._Agents, "_prepare_local_job", lambda self: None)
    monkeypatch.setattr(module._Supervisor, "run", run)
    monkeypatch.chdir(tmp_path)
    variables = {"HOME": "/home/me", CLAIMS: given, **({} if as_option else {CHECKPOINT: given})}
    options = [f"--checkpoint={given}"] if as_option else []
    with patch.dict(os.environ, variables):
        assert module.main(["--standalone", "--run-dir=run", *options, "train.py"]) == 0
    assert found == dict.fromkeys((CHECKPOINT, CLAIMS), told.format(here=tmp_path))


# ---------------------------------------------------------------- a job on this machine, which is scaled


@pytest.fixture
def local_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A job of two workers. Those whose indices are in `killed` are killed at once, and the others never end.

    With `kills_agents`, their agents are.
    """
    monkeypatch.setattr(module, "_START_AGAIN_S", 0.05)
    killed: set[int] = set()

    def body(args: object, device: object, records: Path, *rest: object) -> None:
        if int(records.name) in killed:
            CrashRecord(records, 0).introduce("w")
            os.kill(os.getpid(), signal.SIGKILL) if job.kills_agents else os._exit(KILLED_BY)
        signal.pause()

    monkeypatch.setattr(module, "_run_agent", body)
    options: Any = SimpleNamespace(torchrun=OURS, local=True, num_workers=2, left_status=75)
    agents = module._Agents(options)
    agents._max_restarts = 3
    launcher = this_launcher(["train.py"], max_workers=8, local=True)
    with listening() as signals:
        supervisor = module._Supervisor(options, tmp_path, agents, launcher, signals)
        job = SimpleNamespace(supervisor=supervisor, agents=agents, killed=killed, run_dir=tmp_path, kills_agents=False)
        yield job
    agents.__exit__()


def look_until(job: Any, condition: Callable[[], bool]) -> None:
    """Have the supervisor look, until this is so."""

    def look() -> bool:
        job.supervisor._look()
        return condition()

    poll_until(look)


def failing_once(method: Any, error: OSError) -> Callable[..., Any]:
    """The method, which raises this the first time."""
    left = [error]

    def call(*args: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return method(*args, **options)

    return call


FORK: Any = multiprocessing.get_context("fork").Process
NO_PROCESS = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.mark.parametrize(("owner", "name"), [(FORK, "start"), (os, "fork")])
def test_lost_worker_that_cannot_be_started_again_at_once_costs_no_other(
    local_job: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], owner: Any, name: str
) -> None:
    local_job.killed.add(1)
    agents = local_job.agents
    for _ in range(2):
        agents.start()
    poll_until(lambda: agents.lost)
    local_job.killed.clear()
    monkeypatch.setattr(owner, name, failing_once(getattr(owner, name), NO_PROCESS))
    before = num_files()
    local_job.supervisor._look()
    assert (agents.training, agents.lost) == ([0], [1])
    assert num_files() == before
    look_until(local_job, lambda: len(agents.training) == 2)
    assert (agents.training, agents.lost) == ([0, 2], [])
    assert [agents._agents[number].lives for number in agents.training] == [1, 2]
    said = capfd.readouterr().err
    assert said.count("no worker can be started on this machine (Resource temporarily unavailable)") == 1


def test_lost_worker_is_replaced_after_another_one_has_ended_in_a_training(
    local_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents, lives = local_job.agents, module._run_agent
    monkeypatch.setattr(module, "_run_agent", end_in_training)
    agents.start()
    monkeypatch.setattr(module, "_run_agent", lives)
    local_job.killed.add(1)
    agents.start()
    poll_until(lambda: not agents.alive)
    local_job.killed.clear()
    look_until(local_job, lambda: bool(agents.training))
    assert [agents._agents[number].lives for number in agents.training] == [2]


def test_worker_whose_agent_was_killed_is_replaced_and_keeps_its_records_for_itself(
    local_job: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    local_job.kills_agents = True
    local_job.killed.add(1)
    agents = local_job.agents
    for _ in range(2):
        agents.start()
    poll_until(lambda: agents.lost)
    records = agents._agents[1].records
    agents.replace_lost()
    assert agents.training == [0, 2]
    assert (agents._agents[2].lives, agents._agents[2].records != records) == (2, True)
    said = "a worker lost its agent, which was killed by SIGKILL; restarting it (restart 1 of 3)"
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kills_agents", "what"), [(False, "was killed by SIGKILL"), (True, "lost its agent, which was killed by SIGKILL")]
)
def test_launcher_says_once_that_it_replaces_no_more(
    local_job: Any, capfd: pytest.CaptureFixture[str], kills_agents: bool, what: str
) -> None:
    local_job.kills_agents = kills_agents
    local_job.killed.add(0)
    local_job.agents._max_restarts = 0
    local_job.agents.start()
    poll_until(lambda: local_job.agents.failed)
    for _ in range(2):
        local_job.supervisor._look()
    assert local_job.agents.alive == []
    assert capfd.readouterr().err.count(f"a worker {what}; it is not replaced (--max-restarts=0)") == 1


@pytest.mark.parametrize(("ordered", "left"), [(1, [0]), (2, [0, 2])])
def test_order_for_fewer_workers_counts_those_that_wait_for_their_restart(
    local_job: Any, ordered: int, left: list[int]
) -> None:
    """They are given up first; a worker that trains is not drained for one that may come."""
    agents = local_job.agents
    local_job.killed.add(1)
    for _ in range(3):
        agents.start()
    poll_until(lambda: agents.lost)
    agents._agents[1].due = time.monotonic() + LONG_S
    local_job.supervisor._tell()
    order(local_job.run_dir, ordered)
    local_job.supervisor._look()
    assert (agents.training, agents.lost) == (left, [])
    assert 1 not in agents._agents


def test_worker_that_is_lost_while_an_order_is_read_is_restarted(
    local_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = local_job.agents
    local_job.killed.add(1)
    for _ in range(2):
        agents.start()
    poll_until(lambda: agents.lost)
    agents._agents[1].due = time.monotonic() + LONG_S
    local_job.supervisor._tell()
    order(local_job.run_dir, 2)
    with monkeypatch.context() as context:
        context.setattr(type(agents), "training", [0, 1])  # as it was when it was looked up
        local_job.supervisor._follow_orders()
    assert agents.lost == [1]


def test_order_is_followed_when_the_machine_has_room_again(local_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = local_job.agents
    agents.start()
    local_job.supervisor._tell()
    number = order(local_job.run_dir, 3).number
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "mkdir", failing_once(Path.mkdir, full))
    local_job.supervisor._look()
    assert (agents.training, read_launcher(local_job.run_dir).order) == ([0], number - 1)  # type: ignore[union-attr]
    look_until(local_job, lambda: len(agents.training) == 3)
    assert read_launcher(local_job.run_dir).order == number  # type: ignore[union-attr]


def test_workers_are_started_after_their_directory_was_removed(local_job: Any) -> None:
    """As systemd does with what is old in /tmp."""
    agents = local_job.agents
    local_job.killed.add(1)
    for _ in range(2):
        agents.start()
    poll_until(lambda: agents.lost)
    shutil.rmtree(agents._directory)
    agents.replace_lost()
    agents.start()
    assert agents.training == [0, 2, 3]
    assert agents._directory.stat().st_mode & 0o777 == 0o700
    assert {agents._agents[number].records for number in (2, 3)} == set(agents._directory.iterdir())


# ---------------------------------------------------------------- what an agent is, with a torchrun that does one thing

run_agent = module._run_agent


def agent_that(does: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The body of an agent whose torchrun does only this."""
    monkeypatch.setattr(module.torchrun, "run", lambda args: does())
    return lambda args, *rest: run_agent(OURS, *rest)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_agent_that_waits_for_another_machine_ends_as_soon_as_its_launcher_is_told(
    supervise: Callable[[Callable[..., None]], tuple[int, str]],
    agents: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    launcher = os.getpid()
    given = GivenParameters(f"127.0.0.1:{free_ports(1)[0]}", 1, 2, {"is_host": "0", "join_timeout": "30"})

    def wait() -> None:
        threading.Timer(0.5, os.kill, (launcher, number)).start()
        ElasticFlowRendezvous(RendezvousOptions.parse(given), run_id="none").start()

    assert supervise(agent_that(wait, monkeypatch)) == (75 if number == signal.SIGTERM else 130, "stopped")
    assert agents.left, "it has not given up, nor was it killed"
    assert "no coordinator answers" not in capfd.readouterr().err


def test_agent_that_was_told_before_it_looks_for_its_job_does_not_look(
    agents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = GivenParameters(f"127.0.0.1:{free_ports(1)[0]}", 1, 2, {"is_host": "0", "join_timeout": "30"})
    told, tell = os.pipe()

    def wait() -> None:
        os.read(told, 1)
        ElasticFlowRendezvous(RendezvousOptions.parse(given), run_id="none").start()

    monkeypatch.setattr(module, "_run_agent", agent_that(wait, monkeypatch))
    agents.start()
    module.ask_to_leave(agents._agents[0].records)
    os.write(tell, b"x")
    poll_until(lambda: not agents.alive)
    assert agents.left
    for end in (told, tell):
        os.close(end)


@pytest.mark.parametrize(("redirects", "num_left"), [("0", 0), ("3", 1)])
def test_torchruns_directory_goes_with_the_launcher_unless_it_has_logs(
    agents: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redirects: str, num_left: int
) -> None:
    given = SimpleNamespace(**{**vars(OURS), "redirects": redirects})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module.torchrun, "run", lambda args: DefaultLogsSpecs(args.log_dir))
    monkeypatch.setattr(module, "_run_agent", lambda args, *rest: run_agent(given, *rest))
    agents.start()
    poll_until(lambda: not agents.alive)
    assert agents.finished
    assert [*agents._directory.rglob("torchrun")] == [agents._agents[0].records / "torchrun"] * (not num_left)
    assert len([*tmp_path.iterdir()]) == num_left


@pytest.mark.parametrize(("error", "status"), [(None, 0), (SignalException("told", signal.SIGTERM), 143)])
def test_agent_runs_its_own_exit_handlers_and_none_of_the_launcher(
    agents: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception | None, status: int
) -> None:
    """The first one hands the coordinator over; what the launcher has imported may end what the launcher still has."""

    def work() -> None:
        atexit.register((tmp_path / "agent").touch)
        if error is not None:
            raise error

    of_launcher = (tmp_path / "launcher").touch
    atexit.register(of_launcher)
    try:
        monkeypatch.setattr(module, "_run_agent", agent_that(work, monkeypatch))
        agents.start()
        poll_until(lambda: not agents.alive)
    finally:
        atexit.unregister(of_launcher)
    assert [agent.process.exitcode for agent in agents._agents.values()] == [status]
    assert [path.name for path in tmp_path.iterdir()] == ["agent"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OSError(errno.EAGAIN, "no process can be made"), module.EXCUSED),
        (OSError(errno.ENOSPC, "no space is left"), module.EXCUSED),
        (MemoryError(), module.EXCUSED),
        (FileNotFoundError(errno.ENOENT, "no such file", "./program"), 1),
        (PermissionError(errno.EACCES, "permission denied", "./program"), 1),
        (OSError(errno.ENOEXEC, "not a program", "./program"), 1),
        (ValueError("a wrong option of torchrun"), 1),
        (JobFailed("w raised ValueError: x"), 1),
    ],
)
def test_agent_whose_machine_has_failed_it_fails_no_job(
    supervise: Callable[[Callable[..., None]], tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
    status: int,
) -> None:
    def fail() -> None:
        raise error

    assert supervise(agent_that(fail, monkeypatch)) == (status, "failed")
    told = capfd.readouterr().err
    assert f"{type(error).__name__}" in told, "where that was"
    assert ("this node is lost" in told) == (status == module.EXCUSED)
