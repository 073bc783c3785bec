"""What a pod asks for, as the scheduler counts it: a job has as many pods as fit, and none that waits for room."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightkube")

from ef_common.kubernetes.kinds import JOBS, PODS
from ef_common.kubernetes.resource import Json
from tests.kubernetes import cluster as clusters
from tests.kubernetes import control_plane, objects
from tests.kubernetes.cluster import Cluster

IS_KNOWN_SINCE = {"sidecar": (1, 29), "whole": (1, 34)}

pytestmark = [
    *clusters.MARKS,
    pytest.mark.skipif(
        control_plane.why_not() is None and control_plane.release() < min(IS_KNOWN_SINCE.values()),
        reason="this Kubernetes has no other ways to ask for something",
    ),
]

SHARE, MORE = {"requests": {"cpu": "5"}}, {"requests": {"cpu": "6"}}
"""Nodes have 16 CPUs: three pods of the one fit, but only one pod of both."""


def idle(name: str, resources: Json, **more: Any) -> Json:
    command = ["sh", "-c", "trap 'exit 75' TERM; while :; do sleep 0.05; done"]
    return {"name": name, "image": "none", "command": command, "resources": resources, **more}


TEMPLATES = {
    "sidecar": {"containers": [idle("a", SHARE)], "initContainers": [idle("b", MORE, restartPolicy="Always")]},
    "whole": {"containers": [idle("a", SHARE)], "resources": {"requests": {"cpu": "11"}}},
}


@pytest.mark.parametrize("way", TEMPLATES)
def test_job_has_as_many_pods_as_the_scheduler_finds_room_for(cluster: Cluster, way: str) -> None:
    if control_plane.release() < IS_KNOWN_SINCE[way]:
        pytest.skip("this Kubernetes does not know that")
    template = {"spec": {"terminationGracePeriodSeconds": 1, **TEMPLATES[way]}}
    job = objects.job(low=1, high=8, template=template)
    cluster.api.create(JOBS, {**job, "metadata": {"name": "a", "namespace": "default"}})
    cluster.wait_until(lambda: list(cluster.pods("a").values()) == ["Running"] * 4, "a pod on each node")
    assert (status := cluster.status("a"))["wanted"] == 4, status
    assert len({pod["spec"]["nodeName"] for pod in cluster.api.list(PODS, "default")[0]}) == 4
    told = {"Resized: grows from 0 to 4 pods", "Running: 4 pods, as it shall be"}
    cluster.wait_until(lambda: set(cluster.events("a")) == told, "the events")
