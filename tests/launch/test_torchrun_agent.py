"""An agent of torchrun that loses one of its workers: where torch keeps what is needed for that, and real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from ef_common.errors import UnsupportedError
from ef_common.launch import torchrun_agent
from ef_common.launch.deaths import Deaths
from ef_common.launch.torchrun_agent import PARTS, RELEASES, package
from ef_common.parts import check
from ef_common.session.crash_record import CrashRecord
from tests import sources
from tests.launch.conftest import Job
from tests.parts import assert_one_sentence, changes
from tests.waiting import poll_until

CONF = "--rdzv-conf=last_call_timeout=60"  # the first view is one of all nodes

# ---------------------------------------------------------------- torch's private parts


def test_each_part_of_torch_is_where_it_is_expected() -> None:
    assert package().problems() == []
    assert sources.releases_of("torch") == RELEASES


def test_release_that_has_moved_or_changed_a_part_is_named_in_one_sentence() -> None:
    for part in PARTS:
        for change in changes(part, package().roots):
            with pytest.MonkeyPatch.context() as patch:
                change(patch)
                with pytest.raises(UnsupportedError) as refused:
                    check([package()])
            assert_one_sentence(str(refused.value), package(), part)
    check([package()])  # all is as it was


def test_private_parts_are_listed_and_are_touched_in_one_file() -> None:
    listed = {part.name for part in PARTS}
    folder = Path(torchrun_agent.__file__).parent
    assert sources.private_uses(folder / "torchrun_agent.py") <= listed
    for name in ("torchrun_handler.py", "deaths.py", "unnamed_rendezvous.py", "plain_script.py"):
        assert sources.private_uses(folder / name) == set()
    assert sources.unknown_users(PARTS, folder) == set()


def test_release_without_a_part_is_left_as_it_is_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Agent:
        def get_worker_group(self) -> object:
            return type("Group", (), {"spec": type("Spec", (), {"local_world_size": 2})})

    agent = Agent()
    siblings = torchrun_agent.Siblings(None, told=lambda: False)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr("torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler._popen")
        siblings.attach(agent)
    assert vars(agent) == {}
    said = f"takes the others of this node along, because torch {torch.__version__} has no `SubprocessHandler._popen`"
    assert said in caplog.text


# ---------------------------------------------------------------- which are started again


class Context(SubprocessContext):
    """Two workers, of which the second one has been killed."""

    def __init__(self) -> None:
        self.envs = {0: {}, 1: {}}
        self._running_local_ranks = {0, 1}
        self.started: list[str] = []
        lives, dead = (SimpleNamespace(poll=lambda status=status: status, args="train", pid=7) for status in (None, -9))
        self.subprocess_handlers = {  # type: ignore[assignment]
            0: SimpleNamespace(proc=lives),
            1: SimpleNamespace(proc=dead, _popen=lambda args, env: self.started.append(args) or lives),
        }


@pytest.mark.parametrize("told", [False, True])
def test_dead_worker_is_started_again_unless_its_agent_was_told_to_go(tmp_path: Path, told: bool) -> None:
    context = Context()
    spec = SimpleNamespace(local_world_size=2, max_restarts=1)
    agent = SimpleNamespace(
        get_worker_group=lambda: SimpleNamespace(spec=spec, workers=[SimpleNamespace(), SimpleNamespace()]),
        _start_workers=lambda group: {},
        _pcontext=context,
        _remaining_restarts=1,
    )
    CrashRecord(tmp_path, 1).introduce("one of ours")
    deaths = Deaths(tmp_path, node="n", report=lambda why, fatal: "")
    siblings = torchrun_agent.Siblings(deaths, told=lambda: told)
    siblings.attach(agent)
    agent._start_workers(None)
    assert context._poll() is None  # torch does not hear of it
    assert context._running_local_ranks == ({0} if told else {0, 1})
    assert context.started == ([] if told else ["train"])
    assert agent._remaining_restarts == (1 if told else 0)


# ---------------------------------------------------------------- real agents


def start(job: Job, number: int, *options: str, nodes: str = "1:1") -> dict[int, int]:
    """Start a node of so many workers, and wait for their first view; their process ids, by local rank."""
    known = len(job.records("start"))
    job.agent(f"--nnodes={nodes}", f"--nproc-per-node={number}", *options, CONF)
    records = job.wait_for("start", known + number)[known:]
    return {record["local_rank"]: record["pid"] for record in records}


def lose_one_of_two(job: Job) -> int:
    """Start a node of two workers and kill the second one; the process id of the other one, which trains alone now."""
    pids = start(job, 2)
    job.wait_for("view", 2, size=2)
    os.kill(pids[1], signal.SIGKILL)
    job.wait_for("view", pid=pids[0], size=1)
    return pids[0]


@pytest.mark.processes
def test_killed_worker_without_restarts_leaves_its_sibling_in_its_process(job: Job, entry_point: None) -> None:
    said = "worker 1 of this node died before its first step (SIGKILL); the others go on without it (--max-restarts=0)"
    lose_one_of_two(job)
    job.wait_for_log(said)  # the coordinator hears of the death before the agent looks
    job.tell("end")
    assert job.wait_exit(job.agents[0]) == 0
    assert len(job.records("start")) == 2
    assert job.logs().count(said) == 1
    assert "Traceback" not in job.logs()


@pytest.mark.processes
def test_crashed_worker_is_restarted_alone_and_neither_sibling_nor_other_node(job: Job, entry_point: None) -> None:
    pair = start(job, 2, "--max-restarts=1", nodes="1:2")
    job.agent("--nnodes=1:2", CONF)
    job.wait_for("view", 3, size=3)
    job.tell("crash", pair[0])
    (newcomer,) = job.wait_for("newcomer")
    job.wait_for("view", 2, size=3, pid=pair[1])
    assert len(job.records("start")) == 4
    (restarted,) = [record for record in job.records("start") if record["pid"] == newcomer["pid"]]
    assert (restarted["local_rank"], restarted["restart"]) == (0, "1")
    said = "worker 0 of this node died before its first step (exit status 17); restarting it (restart 1 of 1)"
    assert job.logs().count(said) == 1
    job.tell("crash", newcomer["pid"])  # no restart is left
    job.wait_for("view", size=2, pid=pair[1])
    job.tell("end")
    assert [job.wait_exit(agent) for agent in job.agents] == [0, 0]


@pytest.mark.processes
def test_worker_that_ends_in_the_training_ends_it_for_no_sibling(job: Job, entry_point: None) -> None:
    pids = start(job, 3, "--max-restarts=1")
    job.wait_for("view", 3, size=3)
    job.tell("quit", pids[0])
    job.wait_for("view", 2, size=2)
    poll_until(lambda: not psutil.pid_exists(pids[0]))  # the agent knows how it has ended
    os.kill(pids[1], signal.SIGKILL)
    (newcomer,) = job.wait_for("newcomer")
    job.wait_for("view", size=2, pid=newcomer["pid"])
    job.tell("end")
    assert job.wait_exit(job.agents[0]) == 0
    assert len(job.records("start")) == 4
    assert job.logs().count("(SIGKILL); restarting it (restart 1 of 1)") == 1


@pytest.mark.processes
def test_last_worker_that_is_killed_ends_the_node_as_torchrun_does(job: Job, entry_point: None) -> None:
    os.kill(lose_one_of_two(job), signal.SIGKILL)
    assert job.wait_exit(job.agents[0]) == 1
    assert "ChildFailedError" in job.logs()


@pytest.mark.processes
def test_restarted_worker_writes_on_in_its_log(job: Job, entry_point: None, tmp_path: Path) -> None:
    pids = start(job, 2, "--max-restarts=1", "--redirects=3", f"--log-dir={tmp_path / 'logs'}")
    job.wait_for("view", 2, size=2)
    os.kill(pids[1], signal.SIGKILL)
    job.wait_for("newcomer")
    job.tell("end")
    assert job.wait_exit(job.agents[0]) == 0
    (log,) = (tmp_path / "logs").rglob("1/stdout.log")
    assert log.read_text() == "started\nstarted\n"


@pytest.mark.processes
def test_node_that_is_told_to_go_restarts_nobody(job: Job, entry_point: None) -> None:
    start(job, 2, "--max-restarts=3")
    job.wait_for("view", 2, size=2)
    job.agents[0].send_signal(signal.SIGTERM)
    job.wait_exit(job.agents[0])
    assert len(job.records("start")) == 2


@pytest.mark.processes
@pytest.mark.parametrize("max_restarts", [0, 3])
def test_node_that_is_told_to_go_while_its_worker_imports_ends_well(
    job: Job, entry_point: None, tmp_path: Path, max_restarts: int
) -> None:
    script = tmp_path / "imports.py"
    script.write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    agent = job.agent("--nnodes=1:2", f"--max-restarts={max_restarts}", CONF, script=script)
    poll_until(lambda: "importing" in job.logs())
    agent.send_signal(signal.SIGUSR1)
    assert job.wait_exit(agent) == 0
    assert job.logs().count("importing") == 1
    assert "Traceback" not in job.logs()
