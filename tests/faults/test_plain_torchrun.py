"""Plain torchrun with its own rendezvous: losses are survived in the process, a join costs torchrun's restart."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ef_common.audit import audit
from ef_common.testing.harness_torchrun import Node, TorchrunJob

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

TRAIN = Path(__file__).parents[2] / "examples" / "01-lightning-digits" / "train.py"
# Where agents share the store of their rendezvous with the workers, all may exit when a node joins (torch 2.13).
ENVIRON = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TorchrunJob]:
    with TorchrunJob(tmp_path / "run", TRAIN, rdzv_backend="c10d") as job:
        yield job


def start(job: TorchrunJob, nnodes: str, *script_args: str, **environ: str) -> Node:
    is_host = f"--rdzv-conf=is_host={int(not job.nodes)}"
    environ = {**ENVIRON, **environ}
    return job.start(f"--nnodes={nnodes}", is_host, "--local-addr=127.0.0.1", script_args=script_args, environ=environ)


def hosts_the_coordinator(node: Node) -> bool:
    return any(psutil.Process(pid).environ()["RANK"] == "0" for pid in node.worker_pids())


@pytest.mark.thorough
@pytest.mark.parametrize("environ", [{}, {"ELASTICFLOW_TOKEN": "hunter2", "ELASTICFLOW_TLS": "1"}], ids=["", "TLS"])
def test_node_is_killed_the_others_go_on_in_their_processes(job: TorchrunJob, environ: dict[str, str]) -> None:
    nodes = [start(job, "3", "--epochs", "3", "--step-seconds", "0.05", **environ) for _ in range(3)]
    job.wait_for("step", 3, step=2)
    victim = next(node for node in reversed(nodes[1:]) if not hosts_the_coordinator(node))
    survivors = [node for node in nodes if node is not victim]
    pids = [node.worker_pids() for node in survivors]
    assert all(len(of_node) == 1 for of_node in pids)
    victim.kill()
    job.wait_for("evaluation", 2, stage="test")
    assert [node.worker_pids() for node in survivors] == pids
    # The agents themselves would wait five minutes for the dead one once their workers are done.
    job.wait_until(lambda events: not any(node.worker_pids() for node in survivors), "the end of the workers")
    assert len(job.events("start")) == 3
    assert job.events("view", world_size=2)
    job.audit()


@pytest.mark.thorough
def test_node_that_joins_restarts_the_job_with_it(job: TorchrunJob, tmp_path: Path) -> None:
    arguments = ("--epochs", "4", "--step-seconds", "0.05")
    nodes = [start(job, "2:3", *arguments) for _ in range(2)]
    job.wait_for("step", 2, step=2)
    nodes.append(start(job, "2:3", *arguments))
    assert [node.wait() for node in nodes] == [0, 0, 0]
    # Without a checkpoint the job starts over: a life of its own, to be audited by itself.
    second = {event["worker"] for event in job.events("view", world_size=3)}
    assert len(second) == 3
    (tmp_path / "second" / "events").mkdir(parents=True)
    for worker in second:
        shutil.copy(job.directory / "events" / f"{worker}.jsonl", tmp_path / "second" / "events")
    assert audit(tmp_path / "second").ok
