"""The pods of examples, of submitted jobs and of the controller may run where pods are restricted."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ef_common.kubernetes.installation import manifests
from ef_common.kubernetes.resource import Json
from ef_common.kubernetes.submission import Submission
from ef_common.kubernetes.writing import pod_of
from tests.kubernetes.kubeflow.examples import example
from tests.kubernetes.kubeflow.operators import of_mpijob, of_pytorchjob, of_tfjob, of_trainjob
from tests.kubernetes.restricted import problems

JOB = Path(__file__).parents[2] / "examples" / "15-kubernetes" / "job.yaml"
_META = {"name": "a", "namespace": "here", "uid": "0123456789"}


def _of_elastic_jobs() -> Iterator[tuple[str, Json]]:
    submitted = Submission("a", "here", 1, 2, "digits", ("train.py",)).job()
    for name, job in {"job.yaml": yaml.safe_load(JOB.read_text()), "submitted": submitted}.items():
        yield name, pod_of({**job, "metadata": _META}, 0)["spec"]


def _of_kubeflow() -> Iterator[tuple[str, Json]]:
    train = example("trainjob")
    made = {
        "pytorchjob": of_pytorchjob(example("pytorchjob")["PyTorchJob"]),
        "tfjob": of_tfjob(example("tfjob")["TFJob"]),
        "trainjob": of_trainjob(train["TrainJob"], train["TrainingRuntime"]),
        "mpijob": of_mpijob(example("mpijob")["MPIJob"]),
    }
    for name, (_, pods) in made.items():
        yield from ((f"{name} {pod['metadata']['name']}", pod["spec"]) for pod in pods)


def _of_controllers() -> Iterator[tuple[str, Json]]:
    (deployment,) = (thing for thing in manifests(image="i") if thing["kind"] == "Deployment")
    yield "controller", deployment["spec"]["template"]["spec"]


PODS = dict([*_of_elastic_jobs(), *_of_kubeflow(), *_of_controllers()])


@pytest.mark.parametrize("name", PODS)
def test_pod_is_taken_where_pods_are_restricted_and_cannot_write_to_its_image(name: str) -> None:
    assert problems(PODS[name]) == []
    for container in PODS[name]["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize(
    ("where", "value", "problem"),
    [
        (("hostNetwork",), True, "hostNetwork"),
        (("hostPID",), True, "hostPID"),
        (("hostIPC",), True, "hostIPC"),
        (("initContainers",), [{"name": "first"}], "first: capabilities"),
        (("volumes",), [{"name": "a", "hostPath": {"path": "/"}}], "volume a"),
        (("securityContext",), {}, "worker: runAsNonRoot"),
        (("securityContext", "runAsUser"), 0, "worker: runAsUser"),
        (("securityContext", "seccompProfile"), {"type": "Unconfined"}, "worker: seccompProfile"),
        (("containers", 0, "securityContext", "privileged"), True, "worker: privileged"),
        (("containers", 0, "securityContext", "allowPrivilegeEscalation"), True, "worker: allowPrivilegeEscalation"),
        (("containers", 0, "securityContext", "capabilities", "drop"), ["CHOWN"], "worker: capabilities"),
        (("containers", 0, "securityContext", "capabilities", "add"), ["SYS_ADMIN"], "worker: capabilities"),
        (("containers", 0, "securityContext", "procMount"), "Unmasked", "worker: procMount"),
        (("containers", 0, "ports"), [{"hostPort": 80}], "worker: hostPort"),
    ],
)
def test_pod_that_may_do_more_is_not_restricted(where: tuple[str | int, ...], value: object, problem: str) -> None:
    spec = copy.deepcopy(PODS["submitted"])
    place = spec
    for step in where[:-1]:
        place = place[step]  # type: ignore[index]
    place[where[-1]] = value  # type: ignore[index]
    assert problem in problems(spec)
