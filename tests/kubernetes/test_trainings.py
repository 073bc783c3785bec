"""What a cluster knows of the trainings in it, and what they ask of it: on a real Kubernetes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightkube")

from ef_common.errors import ClusterFailed
from ef_common.kubernetes.kinds import BUDGETS, JOBS, OLD_BUDGETS, PODS
from ef_common.kubernetes.writing import own_name
from tests.faults.conftest import check_gentle
from tests.kubernetes import cluster as clusters
from tests.kubernetes import control_plane
from tests.kubernetes.cluster import Cluster, Training

pytestmark = clusters.MARKS

STEP_S, EVERY = 0.8, 10


def wait_for(job: Training, cluster: Cluster, **fields: Any) -> None:
    """Wait until the status says this."""

    def says() -> bool:
        status = cluster.status(job.name)
        return all(status.get(name) == value for name, value in fields.items())

    cluster.wait_until(says, f"the status to say {fields}")


def test_status_tells_how_many_workers_train_and_how_fast(training: Training, cluster: Cluster) -> None:
    training.submit(1, 2, options={"checkpoint": f"file://{training.directory}/checkpoints"})  # after every second step
    first = training.wait_for_world(2)
    training.wait_for_steps()
    wait_for(training, cluster, training=2, generation=first)
    cluster.wait_until(lambda: cluster.status("a").get("samplesPerSecond", 0) > 0, "its speed")
    cluster.wait_until(lambda: cluster.status("a").get("checkpointStep", 0) > 0, "its checkpoint")
    assert cluster.status("a")["checkpointStep"] <= max(event["step"] for event in training.events("checkpoint"))
    status = cluster.status("a")
    assert 0 < status["step"] <= max(event["step"] for event in training.events("step"))
    assert "2 workers train, at step" in cluster.elasticflow("status", "a")
    cluster.elasticflow("scale", "a", "1")
    second = training.wait_for_world(1, after=first)
    wait_for(training, cluster, training=1, generation=second)
    training.finish()
    wait_for(training, cluster, training=0)
    assert cluster.status("a")["step"] >= status["step"]


def test_job_asks_for_the_pods_that_are_worth_it_and_gives_others_back(training: Training, cluster: Cluster) -> None:
    shared = {"throttled": True, "step_sleep_s": STEP_S, "shared_per_s": 2 / STEP_S, "length": 100_003}
    training.submit(1, 4, options=shared, autoscale={"threshold": 0.7, "everySteps": EVERY})
    first = training.wait_for_world(1)
    assert list(cluster.pods("a")) == ["a-0"]

    def decisions(*_: object) -> list[tuple[int, int]]:
        return [(event["nodes"], event["wanted"]) for event in training.events("autoscale")]

    training.wait_until(lambda _: (made := decisions()) and len(made) > 1 and made[-1][1] == 2, "the way back to 2")
    training.wait_for_world(2, after=first)
    wait_for(training, cluster, asked=2, wanted=2, training=2)
    training.wait_for_pods(2)
    training.wait_for_steps(2 * EVERY)
    assert decisions()[-1][1] == 2
    status = cluster.status("a")
    assert (status["workers"], status["crashes"], status["starts"]) == (2, 0, 1)
    assert not [event for event in cluster.events("a") if "grows from 2" in event], "nobody comes back"
    check_gentle(training)
    training.finish()


def test_spare_takes_the_place_of_a_worker_that_is_lost(training: Training, cluster: Cluster) -> None:
    training.submit(1, 2, spares=1)
    training.wait_for_world(2)
    training.wait_for_pods(3)
    wait_for(training, cluster, wanted=2, workers=2, running=3, spares=1, training=2)
    training.wait_for("start", 3)
    training.wait_for_steps(100)  # the spare is ready then
    view = training.events("view")[-1]
    victims = training.members()
    assert len(victims) == 2
    killed_at = cluster.cut_off(victims[0])
    training.wait_for_world(2, after=view["generation"])
    (newest,) = set(training.events("view")[-1]["members"]) - set(view["members"])
    (start,) = training.events("start", worker=newest)
    assert start["time"] < killed_at
    training.wait_for_pods(3)  # and there is another spare
    training.finish()


def test_straggler_is_replaced_by_a_pod_that_is_asked_for(training: Training, cluster: Cluster) -> None:
    """It is slow enough for half a minute; then another pod starts, and waits until the slow one has left."""
    slow = {"throttled": True, "step_sleep_s": 0.1, "length": 100_003}
    training.submit(2, 3, options=slow, autoscale={"everySteps": 100_000})
    first = training.wait_for_world(2)
    training.wait_for_steps()
    newest = training.events("view")[-1]["members"][-1]
    (start,) = training.events("start", worker=newest)
    (training.directory / "slow").write_text(str(start["pid"]))
    training.wait_until(lambda _: newest not in training.events("view")[-1]["members"], "another worker in its place")
    assert [len(event["members"]) for event in training.events("view") if event["generation"] >= first][-1] == 2
    wait_for(training, cluster, asked=2, wanted=2, training=2)
    training.wait_for_pods(2)
    training.wait_for_steps()
    assert cluster.status("a")["crashes"] == 0
    check_gentle(training)
    training.finish()


def test_node_is_drained_as_long_as_the_minimum_stays(training: Training, cluster: Cluster) -> None:
    training.submit(2, 3)
    first = training.wait_for_world(3)
    training.wait_for_pods(3)

    def allowed() -> int:
        kind = BUDGETS if control_plane.release() >= (1, 21) else OLD_BUDGETS
        budget = cluster.api.get(kind, "default", own_name(cluster.api.get(JOBS, "default", "a")))
        return int((budget.get("status") or {}).get("disruptionsAllowed", 0))

    cluster.wait_until(lambda: allowed() == 1, "the budget to be counted")
    evict(cluster, "a-0")
    with pytest.raises(ClusterFailed, match="disruption budget"):
        evict(cluster, "a-1")
    training.wait_for_world(3, after=first)
    check_gentle(training)
    training.finish()


def evict(cluster: Cluster, pod: str) -> None:
    """As `kubectl drain` does it."""
    meta = {"name": pod, "namespace": "default"}
    version = "policy/v1" if control_plane.release() >= (1, 22) else "policy/v1beta1"
    eviction = {"apiVersion": version, "kind": "Eviction", "metadata": meta}
    cluster.api._ask("POST", PODS.path("default", pod, "eviction"), body=eviction)
