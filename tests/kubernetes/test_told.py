"""Trainings on a real Kubernetes whose pods have no name server: their controller tells them where the others are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("lightkube")

from ef_common.core.door_list import DoorList
from ef_common.kubernetes.kinds import JOBS, PODS
from ef_common.kubernetes.resource import DOORS_ANNOTATION, JOB_LABEL
from ef_common.kubernetes.writing import own_name
from tests.faults import networks
from tests.faults.conftest import check_gentle
from tests.kubernetes import cluster as clusters
from tests.kubernetes.cluster import Cluster, Training

pytestmark = clusters.MARKS

NODES = (1, 2, 3, 4)
NOBODY = 99


@pytest.fixture
def nameless(cluster: Cluster) -> Iterator[Cluster]:
    """No node knows the name of a service: it asks a name server that never answers."""
    cluster.kubelets.has_names = False
    for node in NODES:
        networks.set_name_server(node, NOBODY)
    yield cluster
    for node in NODES:
        networks.unset_name_server(node)
    cluster.kubelets.has_names = True
    cluster.kubelets.lag_s = 0.0


def told(cluster: Cluster) -> dict[str, DoorList]:
    found, _ = cluster.api.list(PODS, "default", labels=f"{JOB_LABEL}=a")
    annotations = {pod["metadata"]["name"]: pod["metadata"].get("annotations") or {} for pod in found}
    return {name: DoorList.of(one.get(DOORS_ANNOTATION, "")) for name, one in annotations.items()}


def test_job_without_a_name_server_starts_loses_pods_and_grows(training: Training, nameless: Cluster) -> None:
    training.submit(2, 3, workers=2)
    first = training.wait_for_world(2)
    training.wait_for_steps()
    assert [one for one in told(nameless).values() if one.nonce], "somebody was told"
    name = f"{own_name(nameless.api.get(JOBS, 'default', 'a'))}.default.svc"
    assert not any(name in networks.names(node) for node in NODES)

    nameless.elasticflow("scale", "a", "3")
    second = training.wait_for_world(3, after=first)
    training.wait_for_steps()
    check_gentle(training)
    assert told(nameless)["a-2"].doors, "with which it was created"
    assert not told(nameless)["a-2"].nonce, "so it needed nothing else"

    for victim in ("a-0", "a-1"):  # those that were there first, the founder among them
        nameless.cut_off(victim)
        second = training.wait_for_world(3, after=second)
        training.wait_for_pods(3)
        training.wait_for_steps()
    assert nameless.status("a")["starts"] == 1
    training.finish()


def test_job_without_a_name_server_starts_again_when_all_of_it_is_lost(training: Training, nameless: Cluster) -> None:
    training.submit(2, 2, options={"checkpoint": f"file://{training.directory}/checkpoints"})
    training.wait_for_world(2)
    training.wait_for("checkpoint")
    for pod in list(nameless.pods("a")):
        nameless.cut_off(pod)
    training.wait_until(lambda _: [e for e in training.events("run") if e["resumed"]], "a run that goes on")
    training.wait_for_phase("Running")
    training.finish()


@pytest.mark.exhaustive
def test_kubelets_that_write_what_pods_are_told_a_minute_late_only_delay_the_start(
    training: Training, nameless: Cluster
) -> None:
    nameless.kubelets.lag_s = 60.0
    training.submit(2, 3)
    first = training.wait_for_world(3)
    training.wait_for_steps()
    nameless.cut_off("a-1")
    training.wait_for_world(3, after=first)
    training.finish()
