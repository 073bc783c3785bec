"""The scale subresource of jobs, on a real Kubernetes: `kubectl scale` and autoscalers read and write it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lightkube")

from ef_common.errors import ClusterConflict
from ef_common.kubernetes.kinds import JOBS, Kind
from ef_common.kubernetes.resource import JOB_LABEL, UNLIMITED, Json
from tests.kubernetes import cluster as clusters
from tests.kubernetes import tools
from tests.kubernetes.cluster import Cluster, Training

pytestmark = clusters.MARKS

SCALE = Kind(JOBS.api_version, "Scale", f"{JOBS.plural}/a")
AUTOSCALERS = Kind("autoscaling/v1", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
IDLE = ("sh", "-c", "trap 'exit 75' TERM; while :; do sleep 0.05; done")


@pytest.fixture
def job(training: Training) -> Training:
    """A job that says nothing of how many pods it may have now, and so has all."""
    job = training.submit(1, 4, command=IDLE)
    job.wait_for_pods(4)
    return job


@pytest.fixture
def autoscalers(cluster: Cluster) -> Iterator[Cluster]:
    yield cluster
    for thing in cluster.api.list(AUTOSCALERS, "default")[0]:
        cluster.api.delete(AUTOSCALERS, "default", thing["metadata"]["name"])


def scale(cluster: Cluster) -> Json:
    return cluster.api.get(SCALE, "default", "scale")


def wait_for_scale(cluster: Cluster, wanted: int, pods: int) -> Json:
    """Wait until so many pods are wanted, and there; what the subresource says then."""

    def has_both() -> bool:
        found = scale(cluster)
        return (found["spec"].get("replicas", 0), found["status"].get("replicas", 0)) == (wanted, pods)

    cluster.wait_until(has_both, f"a scale of {wanted} and {pods}")
    return scale(cluster)


def test_scale_is_read_patched_and_put_and_the_job_follows(job: Training, cluster: Cluster) -> None:
    found = wait_for_scale(cluster, UNLIMITED, 4)
    selector = dict(pair.split("=") for pair in found["status"]["selector"].split(","))
    assert selector[JOB_LABEL] == "a"

    cluster.api.change(SCALE, "default", "scale", {"spec": {"replicas": 3}})
    job.wait_for_pods(3)
    found = wait_for_scale(cluster, 3, 3)

    cluster.api.replace(JOBS, {**found, "spec": {"replicas": 2}}, sub="scale")
    job.wait_for_pods(2)
    with pytest.raises(ClusterConflict):
        cluster.api.replace(JOBS, {**found, "spec": {"replicas": 4}}, sub="scale")  # read before the change

    cluster.api.change(SCALE, "default", "scale", {"spec": {"replicas": 0}})
    job.wait_for_phase("Suspended")
    assert cluster.pods("a") == {}
    wait_for_scale(cluster, 0, 0)

    cluster.api.change(JOBS, "default", "a", {"spec": {"workers": None}})
    job.wait_for_pods(4)
    wait_for_scale(cluster, UNLIMITED, 4)


def test_scale_can_be_put_before_anything_was_set(job: Training, cluster: Cluster) -> None:
    cluster.api.replace(JOBS, {**scale(cluster), "spec": {"replicas": 1}}, sub="scale")
    job.wait_for_pods(1)


@pytest.mark.skipif(tools.why_not("kubectl") is not None, reason=str(tools.why_not("kubectl")))
def test_kubectl_scales_a_job(job: Training, cluster: Cluster, tmp_path: Path) -> None:
    def kubectl(*arguments: str) -> str:
        return tools.run("kubectl", f"--kubeconfig={cluster.plane.kubeconfig}", *arguments, cwd=tmp_path)

    assert "scaled" in kubectl("scale", "ej/a", "--replicas=3")
    job.wait_for_pods(3)
    assert "scaled" in kubectl("scale", "ej/a", "--current-replicas=3", "--replicas=2")  # reads it, and puts it
    job.wait_for_pods(2)


def test_autoscaler_of_kubernetes_shrinks_and_grows_a_job(job: Training, autoscalers: Cluster) -> None:
    # It has no metrics here, without which it keeps a job between its own limits.
    api = autoscalers.api
    target = {"apiVersion": JOBS.api_version, "kind": JOBS.kind, "name": "a"}
    meta = {"name": "a", "namespace": "default"}
    api.create(
        AUTOSCALERS,
        {
            "apiVersion": AUTOSCALERS.api_version,
            "kind": AUTOSCALERS.kind,
            "metadata": meta,
            "spec": {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 2},
        },
    )
    job.wait_for_pods(2)
    wait_for_scale(autoscalers, 2, 2)
    api.change(AUTOSCALERS, "default", "a", {"spec": {"minReplicas": 3, "maxReplicas": 3}})
    job.wait_for_pods(3)
    wait_for_scale(autoscalers, 3, 3)
