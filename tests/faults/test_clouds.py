"""Nodes of a cloud that is not here, with the variables that it would give them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.faults import networks
from tests.faults.hosts import ENOUGH
from tests.faults.launched import LaunchedRun
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT

pytestmark = [pytest.mark.processes, pytest.mark.timeout(530)]

NUM_NODES = 3


def skypilot(number: int, addresses: list[str]) -> Mapping[str, str]:
    return {"SKYPILOT_NODE_IPS": "\n".join(addresses), "SKYPILOT_NODE_RANK": str(number), "SKYPILOT_TASK_ID": "sky-1"}


def sagemaker(number: int, addresses: list[str]) -> Mapping[str, str]:
    return {"SM_HOSTS": json.dumps(addresses), "SM_CURRENT_HOST": addresses[number]}


@pytest.fixture(params=[skypilot, pytest.param(sagemaker, marks=pytest.mark.thorough)])
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[LaunchedRun]]:
    """One and the same command on each node."""
    addresses = [networks.address(node) for node in range(1, NUM_NODES + 1)]
    with networks.nodes(NUM_NODES), contextlib.ExitStack() as stack:
        runs = []
        for number in range(NUM_NODES):
            environ = {"ELASTICFLOW_TOKEN": "secret", **request.param(number, addresses)}
            run = LaunchedRun(tmp_path / "run", guard_s=200.0, without=("SKYPILOT_", "SM_"), environ=environ)
            stack.callback(run.close)
            run.launch(
                *(*networks.inside(number + 1), sys.executable, "-m", "ef_common.cli", "run", "--monitor-interval=0.1"),
                *(f"--run-dir={run.directory}", str(SCRIPT), json.dumps({**OPTIONS, "stop": ENOUGH})),
            )
            runs.append(run)
        yield runs


@pytest.mark.skipif(networks.why_not() is not None, reason=str(networks.why_not()))
def test_nodes_of_a_cloud_meet_and_go_on_without_the_first_one(nodes: list[LaunchedRun]) -> None:
    first, *others = nodes
    formed = others[0].wait_for("view", NUM_NODES, world_size=NUM_NODES)[0]
    first.close()
    left = others[0].wait_for("view", NUM_NODES - 1, world_size=NUM_NODES - 1)[0]
    assert set(left["members"]) < set(formed["members"])
    newest = max((event["step"] for event in others[0].events("step")), default=0)
    others[0].wait_for_step(newest + 5)
    (first.directory / ENOUGH).touch()
    assert [run.status() for run in others] == [0, 0], first.tails()
    first.audit()
