"""An installation, controller's deployment included, is accepted by a real API server, however it gets there.

There are no nodes here, so the pods of the controller stay pending.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

pytest.importorskip("lightkube")

from ef_common.kubernetes.api import Api
from ef_common.kubernetes.installation import NAMESPACE
from ef_common.kubernetes.kinds import BUDGETS, JOBS, OLD_BUDGETS, PODS, Kind
from ef_common.kubernetes.resource import CONTROLLER
from tests.kubernetes import control_plane, objects, tools
from tests.kubernetes.control_plane import ControlPlane

pytestmark = [
    pytest.mark.processes,
    pytest.mark.thorough,
    pytest.mark.skipif(control_plane.why_not() is not None, reason=str(control_plane.why_not())),
]

IMAGE = "here/controller:1"
DEPLOYMENTS = Kind("apps/v1", "Deployment", "deployments")


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    with control_plane.control_plane() as running:
        yield running


def install(*options: str) -> str:
    command = [sys.executable, "-m", "ef_common.cli", "kubernetes", "install", f"--image={IMAGE}", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kubectl(plane: ControlPlane, *arguments: str | Path) -> str:
    return tools.run("kubectl", f"--kubeconfig={plane.kubeconfig}", *arguments, cwd=plane.kubeconfig.parent)


def check_installation(plane: ControlPlane) -> None:
    """Jobs are accepted, and the cluster makes both pods of the controller, with its account."""
    api = Api(str(plane.kubeconfig))
    deadline = time.monotonic() + 60.0
    while len(pods := api.list(PODS, NAMESPACE)[0]) < 2:
        assert time.monotonic() < deadline, api.get(DEPLOYMENTS, NAMESPACE, CONTROLLER)
        time.sleep(0.1)
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        assert (container["image"], pod["spec"]["serviceAccountName"]) == (IMAGE, CONTROLLER)
        assert pod["status"]["phase"] == "Pending"
    job = objects.job()
    api.create(JOBS, {**job, "metadata": {"name": "a", "namespace": "default"}})
    assert api.get(JOBS, "default", "a")["spec"]["template"] == job["spec"]["template"]
    api.close()


def test_install_makes_all_that_a_cluster_needs(plane: ControlPlane) -> None:
    option = f"--kubeconfig={plane.kubeconfig}"
    said = install(option)
    assert f"Deployment {CONTROLLER} is applied" in said
    check_installation(plane)
    assert install(option) == said  # a second time does no harm


@pytest.mark.skipif(tools.why_not("kubectl") is not None, reason=str(tools.why_not("kubectl")))
def test_kubectl_applies_what_install_prints(plane: ControlPlane, tmp_path: Path) -> None:
    text = install("--dry-run", "--policy=priority")
    printed = tmp_path / "elasticflow.yaml"
    has_budgets = control_plane.release() >= (1, 21)
    new, old = (f"apiVersion: {one.api_version}\n" for one in (BUDGETS, OLD_BUDGETS))
    printed.write_text(text if has_budgets else text.replace(new, old))
    applied = ["apply", "-f", printed]
    if not control_plane.knows_rules():
        with pytest.raises(AssertionError) as refused:
            kubectl(plane, *applied)
        problems = str(refused.value).partition("error validating data: [")[2].split("ValidationError")[1:]
        assert problems
        assert all('unknown field "x-kubernetes-validations"' in one for one in problems)
        applied.insert(1, "--validate=false")

    done = kubectl(plane, *applied).splitlines()
    assert len(done) == len(list(yaml.safe_load_all(printed.read_text())))
    assert all(line.endswith(" created") for line in done)
    check_installation(plane)
    api = Api(str(plane.kubeconfig))
    (container,) = api.get(DEPLOYMENTS, NAMESPACE, CONTROLLER)["spec"]["template"]["spec"]["containers"]
    assert "--policy=priority" in container["command"]
    assert api.get(BUDGETS if has_budgets else OLD_BUDGETS, NAMESPACE, CONTROLLER)["spec"]["maxUnavailable"] == 1
    api.close()
    again = kubectl(plane, *applied).splitlines()
    changed = [line.split("/")[0] for line in again if not line.endswith(" unchanged")]
    not_kept = [] if control_plane.knows_rules() else ["customresourcedefinition.apiextensions.k8s.io"]
    if has_budgets:  # kubectl always replaces their selectors
        not_kept.append("poddisruptionbudget.policy")
    assert changed == not_kept  # an older API server does not store its rules
