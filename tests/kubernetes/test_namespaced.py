"""A controller of one namespace, with a real API server and no more rights than its installation gives it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lightkube")

from ef_common.errors import ClusterRefused
from ef_common.kubernetes.api import Api
from ef_common.kubernetes.applying import apply_all
from ef_common.kubernetes.installation import manifests
from ef_common.kubernetes.kinds import JOBS, NODES, PODS
from ef_common.kubernetes.resource import CONTROLLER
from tests.kubernetes import cluster as clusters
from tests.kubernetes import objects
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.control_plane import NAMESPACES

TEAM = "team"

pytestmark = clusters.MARKS


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with clusters.cluster({1: 1, 2: 1}) as running:
        running.api.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TEAM}})
        things = manifests(image="none", namespace=TEAM, namespaced=True)
        assert list(apply_all(running.api, (one for one in things if one["kind"] != "Deployment")))
        yield running


@pytest.fixture
def kubeconfig(cluster: Cluster, tmp_path: Path) -> Path:
    """That of the controller of the team."""
    token = cluster.plane.token_of(TEAM, CONTROLLER)
    return cluster.plane.write_kubeconfig(tmp_path / "controller", token, namespace=TEAM)


def submit(cluster: Cluster, name: str, namespace: str) -> None:
    job = objects.job(name, 1, 2)
    job["metadata"] = {"name": name, "namespace": namespace}
    (container,) = job["spec"]["template"]["spec"]["containers"]
    container["command"] = ["sleep", "infinity"]
    cluster.api.create(JOBS, job)


def test_namespaced_controller_has_jobs_of_its_namespace_only_and_learns_what_room_others_leave(
    cluster: Cluster, kubeconfig: Path
) -> None:
    cluster.serve("s1")
    cluster.wait_until(lambda: cluster.is_running("s1"), "serving")
    submit(cluster, "b", "default")
    submit(cluster, "a", TEAM)
    cluster.start_controller("--namespaced", kubeconfig=kubeconfig)

    def pods() -> list[str]:
        return [pod["status"]["phase"] for pod in cluster.api.list(PODS, TEAM)[0]]

    cluster.wait_until(lambda: sorted(pods()) == ["Pending", "Running"], "a pod too many")  # it does not see serving
    cluster.wait_until(lambda: pods() == ["Running"], "the pod that is taken back")
    assert cluster.api.get(JOBS, TEAM, "a")["status"]["phase"] == "Running"
    assert cluster.status("b") == {}
    assert cluster.pods("b") == {}


def test_namespaced_controller_has_no_rights_elsewhere(kubeconfig: Path) -> None:
    api = Api(str(kubeconfig))
    assert len(api.list(NODES)[0]) == 2
    for namespace in (None, "default"):
        with pytest.raises(ClusterRefused, match="cannot list resource"):
            api.list(PODS, namespace)
    assert api.list(PODS, TEAM)[0] == []
    api.close()
