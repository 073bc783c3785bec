"""Nodes whose network is cut, in one direction or both, or is bad: never two trainings, and all come together again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults import networks
from tests.faults.network_nodes import Nodes
from tests.faults.switch import Way
from tests.storage.conftest import require_etcd
from tests.storage.etcd import EtcdServers

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(networks.why_not() is not None, reason=str(networks.why_not())),
]

LAST_S = 1.0
"""By then, whoever is cut off has logged its last update."""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    with ExitStack() as stack:

        def make(number: int) -> Nodes:
            nodes = Nodes(tmp_path, stack.enter_context(networks.nodes(number)))
            stack.enter_context(nodes.job)
            return nodes

        yield make


def begin(nodes: Nodes, number: int, **options: Any) -> None:
    """Start these nodes, which train together."""
    nodes.start(*range(1, number + 1), **options)
    nodes.wait_for_view(number)


@pytest.mark.thorough
def test_bad_network_changes_no_view(make):
    nodes = make(3)
    begin(nodes, 3, heartbeat_timeout_s=6.0)
    generation = nodes.newest()
    for way in (Way(loss=0.2), Way(bytes_per_s=20e6 / 8), Way(delay_s=0.05)):
        before = nodes.switch.num_lost()
        nodes.switch.set_all(way)
        nodes.wait_for_steps(5)
        assert nodes.switch.num_lost() > before or not way.loss
        nodes.switch.heal()
    assert nodes.newest() == generation
    nodes.finish()


@pytest.mark.parametrize(("whose", "directions"), [("coordinator", ("", "out")), ("other", ("in",))])
@pytest.mark.thorough
def test_node_that_is_cut_off_stops_while_the_others_go_on_and_comes_back(make, whose, directions):
    nodes = make(3)
    begin(nodes, 3)
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
    begin(nodes, 3)
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
    begin(nodes, num_nodes, checkpoint=str(tmp_path / "store"), checkpoint_steps=5, keep_last=1000)
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
    nodes = make(3)
    folder = tmp_path / "etcd"
    folder.mkdir()
    with EtcdServers(folder, host=networks.address(3), prefix=networks.inside(3)) as etcd:
        begin(nodes, 2, heartbeat_timeout_s=1.5, environ={"ELASTICFLOW_CLAIMS": etcd.url()})
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


@pytest.mark.thorough
def test_half_that_is_left_when_the_coordinators_node_is_killed_goes_on(make, tmp_path):
    nodes = make(2)
    begin(nodes, 2, checkpoint=str(tmp_path / "store"), checkpoint_steps=5)
    nodes.job.wait_for("checkpoint")
    generation = nodes.newest()
    nodes.kill(1)
    nodes.wait_for_view(1, after=generation)
    nodes.wait_for_steps(10)
    nodes.finish()
