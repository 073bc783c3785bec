"""Whatever happens to those who come, one training comes of a job, whichever door they come through."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ef_common.protocol.addresses import Address, parse_address
from tests.faults import name_server, networks
from tests.faults.alone import Alone, coordinators, wait_for_one_leader
from tests.faults.doors import DOORS, NUM_NODES, SERVER, Door, at
from tests.faults.hosts import ENOUGH
from tests.faults.network_nodes import Nodes, behind
from tests.faults.switch import Switch
from tests.faults.torchrun_worker import LINGER, LINGERING
from tests.storage.ceph import Ceph
from tests.storage.conftest import ceph, etcd  # noqa: F401  (fixtures)
from tests.storage.etcd import EtcdServers
from tests.waiting import poll_until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(530),
    pytest.mark.skipif(networks.why_not() is not None, reason=str(networks.why_not())),
]

PATIENT = {"heartbeat_timeout_s": 10.0}
"""A machine with too much to do makes nobody look dead."""
AWAY_S = 10.0
EVERYBODY = range(1, NUM_NODES + 1)
AT_THE_GATE_S = 1.0
"""By then, all stand there."""
OVER = "the training is over: there is nothing to join"


@pytest.fixture(scope="module")
def switch() -> Iterator[Switch]:
    with networks.nodes(SERVER) as switch:
        yield switch


@pytest.fixture(scope="module")
def ceph_on_network(switch: Switch, ceph: Ceph) -> Iterator[Address]:  # noqa: F811
    with networks.served(SERVER, parse_address(urlsplit(ceph.endpoint).netloc, what="the gateway")) as address:
        yield address


@pytest.fixture(scope="module")
def etcd_on_network(switch: Switch, etcd: EtcdServers) -> Iterator[Address]:  # noqa: F811
    with networks.served(SERVER, etcd.address(0)) as address:
        yield address


@pytest.fixture(scope="module")
def names_on_network(switch: Switch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A DNS server, which all nodes ask; the file of its names."""
    path = tmp_path_factory.mktemp("names") / "names.json"
    path.write_text("{}")
    with name_server.on_network(SERVER, path):
        for node in EVERYBODY:
            networks.set_name_server(node, SERVER)
        yield path


@pytest.fixture(params=list(DOORS))
def door(request: pytest.FixtureRequest, switch: Switch) -> Iterator[Door]:
    yield DOORS[request.param](request)
    switch.heal()
    for node in EVERYBODY:
        networks.set_link(node, "up")


@pytest.fixture
def nodes(switch: Switch, door: Door, tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path, switch, endpoint=door.endpoint, environ=door.environ)
    with nodes.job:
        yield nodes


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A pipe at which many wait until somebody writes to it."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


def begin(nodes: Nodes, door: Door, *numbers: int, **options: object) -> None:
    """Start these nodes, which train together."""
    door.stand_for(numbers)
    nodes.start(*numbers, **PATIENT, **options)
    nodes.wait_for_view(len(numbers))
    nodes.wait_for_steps(3)


@pytest.mark.thorough
@at("name", "s3")
def test_newcomer_finds_the_job_after_the_machine_of_its_founder_is_gone(nodes: Nodes, door: Door) -> None:
    begin(nodes, door, 1, 2, 3)
    founder, generation = nodes.leader(), nodes.newest()
    others = [node for node in (1, 2, 3) if node != founder]
    kept = [nodes.workers(node) for node in others]
    nodes.lose(founder)
    nodes.wait_for_view(2, after=generation)
    generation = nodes.newest()
    door.stand_for([*others, 4])
    nodes.start(4, **PATIENT)
    nodes.wait_for_view(3, after=generation)
    nodes.wait_for_steps(3)
    assert [nodes.workers(node) for node in others] == kept
    nodes.finish()
    assert nodes.num_trainings() == 1


@pytest.mark.thorough
@at("list", "folder")
def test_job_that_was_killed_whole_goes_on_from_its_checkpoint(nodes: Nodes, door: Door, tmp_path: Path) -> None:
    checkpoint = door.endpoint if door.holds_checkpoints else f"file://{tmp_path}/store"
    place = {"checkpoint": checkpoint, "checkpoint_steps": 5}
    begin(nodes, door, 1, 2, 3, **place)
    nodes.job.wait_for("checkpoint")
    founder = nodes.leader()
    left = [*(node for node in (1, 2, 3) if node != founder), 4]
    nodes.lose(founder)
    nodes.kill(*left[:2])
    begin(nodes, door, *left, **place)
    nodes.finish()
    assert {(event["run"], bool(event["resumed"])) for event in nodes.job.events("run")} == {(1, False), (2, True)}
    assert nodes.num_trainings() == 2


@pytest.mark.thorough
@at("name", "etcd")
def test_latecomer_hears_that_the_training_is_over(nodes: Nodes, door: Door) -> None:
    begin(nodes, door, 1, 2)
    directory = nodes.job.directory
    for name in (LINGER, ENOUGH):
        (directory / name).touch()
    poll_until((directory / LINGERING).exists, guard_s=nodes.job.guard_s)
    poll_until(lambda: not all(map(nodes.workers, (1, 2))), guard_s=nodes.job.guard_s)
    nodes.start(4)  # one worker has ended; as the other one is there, so is the agent that leads
    assert nodes.wait(4) == 0
    assert nodes.said(4).count(OVER) == 1
    (directory / LINGERING).unlink()
    nodes.finish()
    nodes.start(3)
    if door.remembers:
        assert nodes.wait(3) == 0
        assert nodes.said(3).count(OVER) == 1
    else:  # nobody is left who could tell: it waits for others, and trains nothing meanwhile
        wait_for_waiting(nodes, 3)
        nodes.kill(3)
    assert nodes.num_trainings() == 1
    assert len(nodes.job.events("start")) == 2


@pytest.mark.thorough
@at("list", "s3")
def test_nodes_that_start_in_the_same_moment_are_one_job(nodes: Nodes, door: Door, gate: Path) -> None:
    door.stand_for(EVERYBODY)
    nodes.start(*EVERYBODY, gate=gate, **PATIENT)
    time.sleep(AT_THE_GATE_S)
    with gate.open("w"):
        nodes.wait_for_view(NUM_NODES)
    nodes.wait_for_steps(3)
    nodes.finish()
    assert nodes.num_trainings() == 1


@pytest.mark.thorough
@at("name", "folder")
def test_nodes_that_start_on_the_two_sides_of_a_cut_are_one_job(nodes: Nodes, door: Door) -> None:
    """Both sides reach a store. On neither one is a majority, so nobody founds a job without a store."""
    door.stand_for([1, 2])
    nodes.switch.cut(1, spared=[SERVER])
    nodes.start(1, 2, last_call_s=5.0, **PATIENT)
    if door.remembers:
        poll_until(lambda: waits(nodes, 1) or waits(nodes, 2), guard_s=nodes.job.guard_s)
        assert not (waits(nodes, 1) and waits(nodes, 2))
    else:
        wait_for_waiting(nodes, 1, 2)
        assert not nodes.job.events("start")
    nodes.switch.heal()
    nodes.wait_for_view(2)
    nodes.wait_for_steps(3)
    nodes.finish()
    assert nodes.num_trainings() == 1


@pytest.mark.thorough
@at("list", "etcd", never="folder")
def test_side_of_a_cut_with_the_store_or_most_doors_trains_and_the_other_one_joins(nodes: Nodes, door: Door) -> None:
    door.stand_for([1, 2, 3])
    nodes.switch.cut(1, spared=[SERVER] if door.names else [])
    first = (2, 3) if door.remembers else (1, 2, 3)  # who does not reach a store gives up after a minute
    nodes.start(*first, at_most=3, last_call_s=10.0, **PATIENT)
    nodes.wait_for_view(2)
    if door.remembers:
        nodes.start(1, **PATIENT)
    wait_for_waiting(nodes, 1)
    assert not nodes.workers(1)
    nodes.switch.heal()
    nodes.wait_for_view(3)
    nodes.wait_for_steps(3)
    nodes.finish()
    assert nodes.num_trainings() == 1


@pytest.mark.thorough
@pytest.mark.parametrize("door", ["etcd", "name"], indirect=True)
def test_server_that_is_away_while_nodes_start_is_waited_for(nodes: Nodes, door: Door) -> None:
    door.stand_for([1, 2])
    nodes.switch.cut(SERVER)
    nodes.start(1, 2, **PATIENT)
    poll_until(lambda: waits(nodes, 1) or waits(nodes, 2), guard_s=nodes.job.guard_s)
    time.sleep(AWAY_S)
    assert not nodes.job.events("start")
    nodes.switch.heal()
    nodes.wait_for_view(2)
    nodes.finish()
    assert nodes.num_trainings() == 1


# ---------------------------------------------------------------- coordinators without workers


@pytest.fixture
def alone(door: Door, tmp_path: Path) -> Iterator[Callable[..., Alone]]:
    """Starts a coordinator as a process of its own on a node."""
    (tmp_path / "token").write_text("not for others\n")
    with coordinators(tmp_path) as start:

        def start_on(node: int, *, behind: Sequence[str] = ()) -> Alone:
            options = (f"--local-addr={networks.address(node)}", "--nnodes=1:8")
            prefix = (*networks.inside(node), *behind)
            return start(door.endpoint, *options, conf=f",token_file={tmp_path}/token", prefix=prefix)

        yield start_on


@pytest.mark.parametrize("door", ["list", "name", "folder"], indirect=True)
def test_coordinators_that_start_in_the_same_moment_have_one_leader(
    door: Door, alone: Callable[..., Alone], gate: Path
) -> None:
    door.stand_for(EVERYBODY)
    some = [alone(node, behind=behind(gate)) for node in EVERYBODY]
    time.sleep(AT_THE_GATE_S)
    with gate.open("w"):
        wait_for_one_leader(some)


@pytest.mark.thorough
@pytest.mark.parametrize("door", ["list", "name"], indirect=True)
def test_coordinators_on_the_two_sides_of_a_cut_have_no_leader_until_it_heals(
    door: Door, alone: Callable[..., Alone], switch: Switch
) -> None:
    door.stand_for([1, 2])
    switch.cut(1, spared=[SERVER])
    some = [alone(node) for node in (1, 2)]
    for one in some:
        one.wait_for("waiting")
        assert not one.said("the coordinator at")
    switch.heal()
    wait_for_one_leader(some)


# ---------------------------------------------------------------- who waits


def waits(nodes: Nodes, number: int) -> bool:
    """Whether the agent of this node has said that it waits, and for what."""
    return "; waiting" in nodes.said(number)


def wait_for_waiting(nodes: Nodes, *numbers: int) -> None:
    """Wait until all of these wait."""
    poll_until(lambda: all(waits(nodes, number) for number in numbers), guard_s=nodes.job.guard_s)
