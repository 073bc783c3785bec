"""A coordinator as a process of its own, without torch, and nodes that train elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ef_common.core.founding import FINISHED
from ef_common.launch.registry import Registry
from ef_common.storage.claims import place_for
from ef_common.testing.harness_torchrun import Node, TorchrunJob
from ef_common.testing.ports import reserve_port
from tests.faults.alone import GUARD_S, Alone, coordinators, wait_for_one_leader
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT, finish, wait_for_steps

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Callable[..., Alone]]:
    """Starts a coordinator where torch cannot be imported."""
    with coordinators(tmp_path) as start:
        yield start


def start(job: TorchrunJob) -> Node:
    conf = "--rdzv-conf=last_call_timeout=10,heartbeat_timeout=10"
    return job.start("--nnodes=1:8", conf, script_args=(json.dumps(OPTIONS),))


@pytest.mark.thorough
def test_coordinator_that_is_killed_costs_no_view_and_stands_by_when_it_comes_back(
    alone: Callable[..., Alone], tmp_path: Path
) -> None:
    with TorchrunJob(tmp_path / "run", SCRIPT) as job:
        first = alone(job._endpoint)
        first.wait_for("leads the job")
        nodes = [start(job) for _ in range(2)]
        job.wait_for("view", 2, world_size=2)
        job.wait_for_step(3)
        first.process.kill()
        first.process.wait()
        wait_for_steps(job, 20)
        assert len(job.events("view")) == 2  # one for each worker
        again = alone(job._endpoint, "--standby")
        again.wait_for("stands by")
        nodes.append(start(job))
        job.wait_for("view", 3, world_size=3)
        wait_for_steps(job)
        assert again.end() == 0
        finish(job, nodes)


@pytest.mark.thorough
def test_coordinator_that_is_told_to_end_hands_over(alone: Callable[..., Alone], tmp_path: Path) -> None:
    with TorchrunJob(tmp_path / "run", SCRIPT) as job:
        first = alone(job._endpoint)
        first.wait_for("leads the job")
        nodes = [start(job)]
        job.wait_for_step(3)
        assert first.end() == 0
        wait_for_steps(job, 20)
        assert len(job.events("view")) == 1
        finish(job, nodes)


@pytest.mark.thorough
def test_coordinator_at_a_registry_ends_with_the_training(alone: Callable[..., Alone], tmp_path: Path) -> None:
    url = f"file://{tmp_path}/registry"
    with TorchrunJob(tmp_path / "run", SCRIPT, endpoint=url) as job:
        standby = alone(url, "--standby")
        leader = alone(url)
        leader.wait_for("leads the job")
        standby.wait_for("stands by")
        finish_at = [start(job)]
        job.wait_for_step(3)
        finish(job, finish_at)
        assert leader.process.wait(GUARD_S) == 0
        assert leader.said("the training is over")
        assert standby.end() == 0
    newest = Registry(place_for(url), "none", "test").newest()
    assert newest is not None
    assert (newest.number, newest.end) == (1, FINISHED)
    late = alone(url)
    assert late.process.wait(GUARD_S) == 0
    assert late.said("the training is over: there is nothing to join")


def test_coordinators_at_a_list_have_one_leader_and_the_others_know_it(alone: Callable[..., Alone]) -> None:
    reserved = [reserve_port() for _ in range(3)]
    ports = [one.getsockname()[1] for one in reserved]
    endpoint = ",".join(f"127.0.0.1:{port}" for port in ports)
    try:
        two = [alone(endpoint) for _ in range(2)]
        wait_for_one_leader(two)
        standby = alone(endpoint, "--standby")
        standby.wait_for(f"127.0.0.1:{ports[2]} stands by")
        assert [one.end() for one in (standby, *two)] == [0, 0, 0]
    finally:
        for one in reserved:
            one.close()


def test_coordinator_whose_address_is_taken_says_so(alone: Callable[..., Alone]) -> None:
    with reserve_port() as reserved:
        endpoint = f"127.0.0.1:{reserved.getsockname()[1]}"
        first = alone(endpoint)
        first.wait_for("leads the job")
        second = alone(endpoint)
        assert second.process.wait(GUARD_S) == 2
        assert second.said("elasticflow coordinator: cannot host the coordinator")
        assert first.end() == 0


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("h1:1,",), "is missing"),
        (("127.0.0.1:1", "--nnodes=0:2"), "--nnodes"),
        (("127.0.0.1:1", "--nnodes=3:2"), "--nnodes"),
        (("127.0.0.1:1", "--rdzv-conf=is_host"), "--rdzv-conf"),
    ],
)
def test_coordinator_with_a_malformed_option_is_one_error(
    alone: Callable[..., Alone], options: tuple[str, ...], what: str
) -> None:
    one = alone(*options)
    assert one.process.wait(GUARD_S) == 2
    assert one.said(what)
    assert one._output.read_text().count("\n") == 1
