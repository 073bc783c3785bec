"""Faults of a real Kubernetes under a training: its API server, its nodes, its controllers at each of their calls."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

pytest.importorskip("lightkube")

from ef_common.kubernetes.kinds import JOBS, NODES, PODS
from ef_common.kubernetes.resource import Json
from tests.faults.conftest import check_gentle
from tests.kubernetes import cluster as clusters
from tests.kubernetes.cluster import Cluster, Training
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.kubelets import is_ready
from tests.kubernetes.striking import Striker, striking
from tests.kubernetes.test_cluster import signal_all

pytestmark = clusters.MARKS

OUTAGE_S = 15.0
QUIET_S = 3.0
"""Longer than a controller waits until it looks again although nothing has changed."""
OVER = "over"
IDLE = ("sh", "-c", f"trap 'exit 75' TERM; while [ ! -e {OVER} ]; do sleep 0.05; done")
"""A pod that trains nothing, until that file is there, and leaves when it is told to."""

Outage = Callable[[ControlPlane], AbstractContextManager[None]]


@pytest.mark.parametrize(
    "outage",
    [
        pytest.param(ControlPlane.without_api_server, id="api-server-killed"),
        pytest.param(lambda plane: plane.standing_still("etcd"), id="etcd-stands-still"),
    ],
)
def test_outage_of_the_control_plane_stops_no_training(training: Training, cluster: Cluster, outage: Outage) -> None:
    training.submit(1, 4)
    first = training.wait_for_world(4)
    training.wait_for_steps()
    with outage(cluster.plane):
        signal_all(cluster, "a-0")
        second = training.wait_for_world(3, after=first)
        time.sleep(OUTAGE_S)
        training.wait_for_steps()
    training.wait_for_world(4, after=second)
    check_one_loss(training, cluster)
    training.finish()


def test_etcd_that_is_slow_delays_the_replacement_and_stops_no_training(training: Training, cluster: Cluster) -> None:
    training.submit(1, 4)
    first = training.wait_for_world(4)
    training.wait_for_steps()
    with cluster.plane.slow("etcd"):
        signal_all(cluster, "a-0")
        second = training.wait_for_world(3, after=first)
        training.wait_for_world(4, after=second)
        check_one_loss(training, cluster)
        training.finish()


def check_one_loss(training: Training, cluster: Cluster) -> None:
    """The training goes on, one loss is on record, and no controller has ended."""
    training.wait_for_steps()
    status = cluster.status("a")
    assert (status["phase"], status["starts"], status["crashes"]) == ("Running", 1, 1)
    assert [one.poll() for one in cluster.controllers] == [None]


def test_pods_of_a_node_that_vanishes_are_replaced_elsewhere(training: Training, cluster: Cluster) -> None:
    training.submit(1, 4, grace_s=5, workers=3)
    first = training.wait_for_world(3)
    training.wait_for_steps()
    where = cluster.api.get(PODS, "default", "a-1")["spec"]["nodeName"]
    with cluster.kubelets.without(int(where.removeprefix("node"))):
        second = training.wait_for_world(2, after=first)
        training.wait_for_world(3, after=second)
        training.wait_for_steps()
        status = cluster.status("a")
        assert (status["phase"], status["starts"], status["crashes"]) == ("Running", 1, 0)
        assert cluster.api.get(PODS, "default", "a-1")["spec"]["nodeName"] != where
        training.finish()
    cluster.wait_until(lambda: is_usable(cluster.api.get(NODES, None, where)), f"{where} to be ready")


def is_usable(node: Json) -> bool:
    return is_ready(node) and not node["spec"].get("taints")


def test_two_controllers_that_act_at_once_do_no_harm(training: Training, cluster: Cluster) -> None:
    # Each has a lease of its own, so neither waits for the other.
    cluster.start_controller("--namespace=default", kubeconfig=cluster.plane.kubeconfig)
    cluster.wait_until(lambda: cluster.log().count("this controller acts") >= 2, "both controllers to act")
    training.submit(2, 4)
    generation = training.wait_for_world(4)
    for workers in (2, 4, 2):
        cluster.elasticflow("scale", "a", str(workers))
        training.wait_for_pods(workers)
        before, generation = generation, training.wait_for_world(workers, after=generation)
        sizes = [event["world_size"] for event in training.events("view") if event["generation"] > before]
        assert min(sizes) >= 2, "below the minimum"
    training.wait_for_steps()
    check_gentle(training)
    assert cluster.status("a")["crashes"] == 0
    training.finish()


# ---------------------------------------------------------------- a controller dies at each of its calls


def test_controller_that_dies_at_each_of_its_calls_leaves_nothing_undone(
    training: Training, cluster: Cluster, tmp_path: Path
) -> None:
    """It acts on two jobs at a time, so one of them loses its controller at a call for the other one."""
    cluster.stop_controllers()
    other = Training(tmp_path / "b", cluster, "b")
    with striking(cluster.plane.address, lambda: cluster.controllers[-1].kill()) as striker:
        training.submit(1, 2, command=IDLE, ttlSecondsAfterFinished=0)
        other.submit(1, 1, command=IDLE, ttlSecondsAfterFinished=0)
        live_until(cluster, striker, lambda: runs(cluster, "a-0", "a-1", "b-0"))
        (kept,) = (pod["metadata"]["uid"] for pod in pods(cluster) if pod["metadata"]["name"] == "a-0")
        assert cluster.status("a")["starts"] == 1

        def has_its_minimum() -> bool:
            found = {pod["metadata"]["uid"]: pod for pod in pods(cluster)}
            assert "deletionTimestamp" not in found[kept]["metadata"], "below the minimum"
            return True

        cluster.elasticflow("scale", "a", "1")
        live_until(cluster, striker, lambda: has_its_minimum() and runs(cluster, "a-0", "b-0"))
        cluster.elasticflow("scale", "a", "2")
        live_until(cluster, striker, lambda: has_its_minimum() and runs(cluster, "a-0", "a-1", "b-0"))
        assert (cluster.status("a")["starts"], cluster.status("a")["crashes"]) == (1, 0)
        for job in (training, other):
            (job.directory / OVER).touch()
        live_until(cluster, striker, lambda: not cluster.api.list(JOBS)[0])
    cluster.wait_until(lambda: not pods(cluster), "the end of its pods")
    for died in (striker.lost, striker.unanswered):
        calls = {call.rsplit(" ", 1)[0] for call in died}
        assert calls >= CALLS


CALLS = {
    *("PUT elasticjobs", "DELETE elasticjobs", "DELETE pods", "PATCH poddisruptionbudgets"),
    *(f"POST {kind}" for kind in ("services", "secrets", "networkpolicies", "pods")),
}


def pods(cluster: Cluster) -> list[Json]:
    found = cluster.api.list(PODS, "default")[0]
    assert {pod["metadata"]["name"] for pod in found} <= {"a-0", "a-1", "b-0"}, "more than the maximum"
    return found


def runs(cluster: Cluster, *names: str) -> bool:
    """Whether these pods run, no others are there, and the jobs say so."""
    found = [(pod["metadata"]["name"], pod["status"]["phase"]) for pod in pods(cluster)]
    running = sum(cluster.status(job).get("running", 0) for job in ("a", "b"))
    return sorted(found) == [(name, "Running") for name in names] and running == len(names)


def live_until(cluster: Cluster, striker: Striker, condition: Callable[[], bool]) -> None:
    """Controllers live and die, one after the other, until this holds and one of them finds nothing more to do."""
    striker.begin_again()
    deadline = time.monotonic() + clusters.GUARD_S
    while True:
        cluster.stop_controllers()
        controller = cluster.start_controller(kubeconfig=cluster.kubeconfig(server=striker.url))
        holds_since = time.monotonic()
        while controller.poll() is None:
            now = time.monotonic()
            assert now < deadline, cluster.story()
            if not condition():
                holds_since = now
            elif now > holds_since + QUIET_S:
                return
            time.sleep(0.1)
        assert controller.returncode == -signal.SIGKILL, cluster.log()
