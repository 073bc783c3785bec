"""Nodes whose network is cut, in one direction or both, or is bad: never two trainings, and all come together again."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ef_common.testing.harness_torchrun import Node, TorchrunJob
from tests.faults import networks
from tests.faults.hosts import ENOUGH
from tests.faults.networks import Switch, Way
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT
from tests.storage.conftest import require_etcd
from tests.storage.etcd import EtcdServers

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(networks.why_not() is not None, reason=str(networks.why_not())),
]

TIMEOUT_S = 2.0
LAST_S = 1.0
"""By then, whoever is cut off has logged its last update."""


class Nodes:
    """Nodes 1 … number, which train.

    Attributes:
        job: Their job.
        switch: Their network.
    """

    def __init__(self, directory: Path, switch: Switch, number: int) -> None:
        self.switch = switch
        self.number = number
        self._token = directory / "token"
        self._token.write_text("not for others\n")
        self.job = TorchrunJob(directory / "run", SCRIPT, endpoint=f"{networks.address(1)}:29400")
        self._nodes: list[Node] = []
        self._killed: list[int] = []

    def start(
        self, *, heartbeat_timeout_s: float = TIMEOUT_S, environ: dict[str, str] | None = None, **options: object
    ) -> None:
        conf = f"--rdzv-conf=token_file={self._token},last_call_timeout=30,heartbeat_timeout={heartbeat_timeout_s}"
        for node in range(1, self.number + 1):
            address = f"--local-addr={networks.address(node)}"
            arguments = (json.dumps({**OPTIONS, **options}),)
            self._nodes.append(
                self.job.start(
                    f"--nnodes=1:{self.number}",
                    "--max-restarts=50",
                    conf,
                    address,
                    script_args=arguments,
                    environ=environ,
                    prefix=networks.inside(node),
                )
            )
        self.wait_for_view(self.number)

    def agent(self, node: int) -> int:
        return self._nodes[node - 1].pid

    def workers(self, node: int) -> set[str]:
        """Ids of the workers of a node."""
        pids = self._nodes[node - 1].worker_pids()
        return {event["worker"] for event in self.job.events("start") if event["pid"] in pids}

    def leader(self) -> int:
        """The node whose agent has the workers' lines."""
        return max(range(1, self.number + 1), key=self._num_lines)

    def _num_lines(self, node: int) -> int:
        command = (*networks.inside(node), "ss", "-Htnp", "state", "established")
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return lines.count(f"pid={self.agent(node)},")

    def records_of(self, workers: set[str], kind: str) -> int:
        return sum(event["worker"] in workers for event in self.job.events(kind))

    def kill(self, node: int) -> None:
        self._nodes[node - 1].kill()
        self._killed.append(node)

    def wait_for_view(self, size: int, *, after: int = 0) -> None:
        """Wait until so many are in one view, which is newer, and train."""

        def complete(events: list[dict]) -> bool:
            views = [e["generation"] for e in events if e["kind"] == "view" and e["world_size"] == size]
            new = {generation for generation in views if generation > after and views.count(generation) == size}
            return any(event["kind"] == "step" and event["generation"] in new for event in events)

        self.job.wait_until(complete, f"a view of {size} after view {after}")

    def wait_for_steps(self, number: int) -> None:
        self.job.wait_for_step(max(event["step"] for event in self.job.events("step")) + number)

    def newest(self) -> int:
        return max(event["generation"] for event in self.job.events("view"))

    def finish(self) -> None:
        (self.job.directory / ENOUGH).touch()
        left = [node for number, node in enumerate(self._nodes, 1) if number not in self._killed]
        assert [node.wait() for node in left] == [0] * len(left)
        self.job.audit()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    with ExitStack() as stack:

        def make(number: int, *, train: int | None = None) -> Nodes:
            nodes = Nodes(tmp_path, stack.enter_context(networks.nodes(number)), number if train is None else train)
            stack.enter_context(nodes.job)
            return nodes

        yield make


@pytest.mark.thorough
def test_bad_network_changes_no_view(make):
    nodes = make(3)
    nodes.start(heartbeat_timeout_s=6.0)
    generation = nodes.newest()
    for way in (Way(loss=0.2), Way(bytes_per_s=20e6 / 8), Way(delay_s=0.05)):
        before = nodes.switch.lost
        nodes.switch.set_all(way)
        nodes.wait_for_steps(5)
        assert nodes.switch.lost > before or not way.loss
        nodes.switch.heal()
    assert nodes.newest() == generation
    nodes.finish()


@pytest.mark.parametrize(("whose", "directions"), [("coordinator", ("", "out")), ("other", ("in",))])
@pytest.mark.thorough
def test_node_that_is_cut_off_stops_while_the_others_go_on_and_comes_back(make, whose, directions):
    nodes = make(3)
    nodes.start()
    for direction in directions:
        generation, leader = nodes.newest(), nodes.leader()
        node = leader if whose == "coordinator" else leader % 3 + 1
        cut_off = nodes.workers(node)
        nodes.switch.cut(node, direction=direction)
        nodes.wait_for_view(2, after=generation)
        time.sleep(LAST_S)
        before = nodes.records_of(cut_off, "step")
        nodes.wait_for_steps(20)
        assert nodes.records_of(cut_off, "step") == before
        nodes.switch.heal()
        nodes.wait_for_view(3, after=generation)
    nodes.finish()


@pytest.mark.thorough
def test_most_of_the_workers_go_on_without_a_coordinator_that_hears_nobody(make):
    nodes = make(3)
    nodes.start()
    generation, leader = nodes.newest(), nodes.leader()
    others = set.union(*(nodes.workers(node) for node in (1, 2, 3) if node != leader))
    nodes.switch.cut(leader, direction="in")
    nodes.wait_for_view(2, after=generation)
    assert others == set(nodes.job.events("view")[-1]["members"])
    nodes.wait_for_steps(10)
    nodes.switch.heal()
    nodes.wait_for_view(3, after=generation)
    nodes.finish()


@pytest.mark.thorough
def test_nodes_that_are_cut_apart_are_told_which_one_goes_on_by_their_store(make, tmp_path):
    num_nodes = 3
    nodes = make(num_nodes)
    nodes.start(checkpoint=str(tmp_path / "store"), checkpoint_steps=5, keep_last=1000)
    nodes.job.wait_for("checkpoint")
    time.sleep(LAST_S)
    generation, workers = nodes.newest(), set.union(*(nodes.workers(node + 1) for node in range(num_nodes)))
    for node in range(1, num_nodes):
        nodes.switch.cut(node)
    nodes.wait_for_view(1, after=generation)
    (first,) = {e["worker"] for e in nodes.job.events("view", world_size=1) if e["generation"] > generation}
    cut_off = workers - {first}
    time.sleep(LAST_S)
    before = nodes.records_of(cut_off, "step"), nodes.records_of(cut_off, "checkpoint")
    nodes.wait_for_steps(60)
    assert (nodes.records_of(cut_off, "step"), nodes.records_of(cut_off, "checkpoint")) == before
    assert nodes.newest() == generation + 1
    assert len(list((tmp_path / "store" / "claims").iterdir())) == 1
    nodes.switch.heal()
    nodes.wait_for_view(num_nodes, after=generation)
    nodes.finish()


@pytest.mark.thorough
def test_half_that_reaches_etcd_goes_on_without_any_checkpoints(make, tmp_path):
    require_etcd()
    nodes = make(3, train=2)
    folder = tmp_path / "etcd"
    folder.mkdir()
    with EtcdServers(folder, host=networks.address(3), prefix=networks.inside(3)) as etcd:
        nodes.start(heartbeat_timeout_s=1.5, environ={"ELASTICFLOW_CLAIMS": etcd.url()})
        nodes.wait_for_steps(5)
        generation, cut_off = nodes.newest(), nodes.workers(1)
        nodes.switch.cut(1)
        nodes.wait_for_view(1, after=generation)
        assert set(nodes.job.events("view")[-1]["members"]) == nodes.workers(2)
        time.sleep(LAST_S)
        before = nodes.records_of(cut_off, "step")
        nodes.wait_for_steps(20)
        assert nodes.records_of(cut_off, "step") == before
        assert nodes.newest() == generation + 1
        nodes.kill(1)  # that it would come back when the network heals is as above
        nodes.finish()


def test_half_that_is_left_when_the_coordinators_node_is_killed_goes_on(make, tmp_path):
    nodes = make(2)
    nodes.start(checkpoint=str(tmp_path / "store"), checkpoint_steps=5)
    nodes.job.wait_for("checkpoint")
    generation = nodes.newest()
    nodes.kill(1)
    nodes.wait_for_view(1, after=generation)
    nodes.wait_for_steps(10)
    nodes.finish()
