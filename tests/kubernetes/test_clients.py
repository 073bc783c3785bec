"""What the commands ask of a cluster: an installation is applied, and the lines of pods are followed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ef_common.errors import ClusterAway, ClusterFailed, ClusterNotFound, ClusterRefused, ThreadFailed
from ef_common.kubernetes import following
from ef_common.kubernetes.applying import apply_all
from ef_common.kubernetes.following import lines
from ef_common.kubernetes.installation import manifests
from ef_common.kubernetes.kinds import JOBS, PODS, Kind
from ef_common.kubernetes.resource import JOB_LABEL, Json
from tests.kubernetes.memory_api import MemoryApi
from tests.kubernetes.objects import job


class Applied:
    """An API server that takes what is applied, and may be too old for some of it."""

    def __init__(self, refused: str = "", unknown: str = "") -> None:
        self.refused, self.unknown = refused, unknown
        self.applied: dict[str, Json] = {}

    def apply(self, kind: Kind, thing: Mapping[str, Any]) -> Json:
        if kind.api_version == self.unknown:
            raise ClusterNotFound("the server could not find the requested resource")
        if self.refused and self.refused in str(thing):
            raise ClusterRefused(f".spec.{self.refused}: field not declared in schema")
        self.applied[kind.path(thing["metadata"].get("namespace"), thing["metadata"]["name"])] = dict(thing)
        return dict(thing)


def test_installation_is_applied_where_each_object_belongs() -> None:
    api = Applied()
    told = list(apply_all(api, manifests(image="i", namespace="here")))  # type: ignore[arg-type]
    assert told[0] == "CustomResourceDefinition elasticjobs.elasticflow.dev is applied"
    assert len(told) == len(api.applied)
    for path in (
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/elasticjobs.elasticflow.dev",
        "/api/v1/namespaces/here",
        "/api/v1/namespaces/here/serviceaccounts/elasticflow-controller",
        "/apis/rbac.authorization.k8s.io/v1/clusterroles/elasticflow-controller",
        "/apis/rbac.authorization.k8s.io/v1/namespaces/here/rolebindings/elasticflow-controller",
        "/apis/apps/v1/namespaces/here/deployments/elasticflow-controller",
    ):
        assert path in api.applied


def test_api_server_that_knows_no_rules_gets_none_and_that_is_said() -> None:
    api = Applied("x-kubernetes-validations")
    told = list(apply_all(api, manifests(image="i")))  # type: ignore[arg-type]
    assert "the controller alone checks jobs" in told[0]
    definition = next(iter(api.applied.values()))
    assert "x-kubernetes-validations" not in str(definition)
    assert "x-kubernetes-preserve-unknown-fields" in str(definition)


def test_older_api_server_gets_the_older_version_of_the_disruption_budget() -> None:
    api = Applied(unknown="policy/v1")
    told = list(apply_all(api, manifests(image="i", namespace="here")))  # type: ignore[arg-type]
    assert "PodDisruptionBudget elasticflow-controller is applied" in told
    path = "/apis/policy/v1beta1/namespaces/here/poddisruptionbudgets/elasticflow-controller"
    assert api.applied[path]["apiVersion"] == "policy/v1beta1"


def test_other_refusals_of_an_installation_are_errors() -> None:
    with pytest.raises(ClusterRefused):
        list(apply_all(Applied("ServiceAccount"), manifests(image="i")))  # type: ignore[arg-type]
    with pytest.raises(ClusterNotFound):
        list(apply_all(Applied(unknown="apps/v1"), manifests(image="i")))  # type: ignore[arg-type]


class Written(MemoryApi):
    """Pods that have written something. They have two containers, of which the first one trains.

    Attributes:
        asked: Whose logs were followed, and since when.
        breaks: Whose logs break behind the first line, once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, str]] = []
        self.breaks: set[str] = set()

    def log(self, namespace: str, pod: str, container: str) -> Iterator[str]:
        assert container == "worker"
        if pod == "a-1":
            raise ClusterFailed("it has gone")
        yield from (f"{pod} begins", f"{pod} ends")

    def follow_log(self, namespace: str, pod: str, container: str, *, since: str = "") -> Iterator[tuple[str, str]]:
        self.asked.append((pod, since))
        for second, line in enumerate(self.log(namespace, pod, container)):
            if (at := f"2026-01-01T00:00:0{second}Z") > since:
                yield at, line
            if pod in self.breaks:
                self.breaks.remove(pod)
                raise ClusterAway("the API server does not answer")


@pytest.fixture
def api() -> Written:
    api = Written()
    api.create(JOBS, job())
    for name in ("a-0", "a-1", "a-2"):
        meta = {"name": name, "namespace": "here", "labels": {JOB_LABEL: "a"}}
        phase = "Pending" if name == "a-2" else "Running"
        api.create(PODS, {"metadata": meta, "spec": {}, "status": {"phase": phase}})
    return api


def test_lines_have_the_name_of_their_pod(api: Written) -> None:
    found = list(lines(api, "here", "a", follow=False))  # type: ignore[arg-type]
    assert found == [("a-0", "a-0 begins"), ("a-0", "a-0 ends"), ("a-1", "(it has gone)")]
    with pytest.raises(ClusterNotFound):
        list(lines(api, "here", "b", follow=False))  # type: ignore[arg-type]


def test_lines_are_followed_until_the_job_has_ended_also_of_pods_that_come_later(
    api: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_LOOK_S", 0.01)
    told = lines(api, "here", "a", follow=True)  # type: ignore[arg-type]
    first = {next(told) for _ in range(3)}
    assert ("a-1", "(it has gone)") in first
    api.change(PODS, "here", "a-2", {"status": {"phase": "Running"}})
    end = threading.Timer(0.1, lambda: api.change(JOBS, "here", "a", {"status": {"phase": "Succeeded"}}))
    end.start()
    assert list(told) == [("a-2", "a-2 begins"), ("a-2", "a-2 ends")]
    end.join()


@pytest.fixture
def told(api: Written, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """The lines that follow those of the pods that are there first."""
    monkeypatch.setattr(following, "_LOOK_S", 0.01)
    told = lines(api, "here", "a", follow=True)  # type: ignore[arg-type]
    assert ("a-0", "a-0 ends") in [next(told) for _ in range(3)]
    return told


def end(api: Written) -> None:
    api.change(JOBS, "here", "a", {"status": {"phase": "Succeeded"}})


def test_lines_of_a_pod_that_replaces_another_one_of_its_name_are_followed(
    api: Written, told: Iterator[tuple[str, str]]
) -> None:
    pod = api.get(PODS, "here", "a-0")
    api.remove(PODS, "here", "a-0")
    api.create(PODS, pod)
    assert [next(told), next(told)] == [("a-0", "a-0 begins"), ("a-0", "a-0 ends")]
    end(api)
    assert list(told) == []


def test_lines_are_followed_while_the_api_server_is_away_and_that_is_said_once(
    api: Written, told: Iterator[tuple[str, str]]
) -> None:
    api.down = True
    name, said = next(told)
    assert (name, "the API server does not answer. The pods are followed again" in said) == ("a", True)
    threading.Event().wait(0.1)
    api.down = False
    api.change(PODS, "here", "a-2", {"status": {"phase": "Running"}})
    assert [next(told), next(told)] == [("a-2", "a-2 begins"), ("a-2", "a-2 ends")]
    end(api)
    assert list(told) == []


def test_lines_that_break_off_go_on_behind_the_last_one(api: Written, told: Iterator[tuple[str, str]]) -> None:
    api.breaks.add("a-2")
    api.change(PODS, "here", "a-2", {"status": {"phase": "Running"}})
    assert [next(told), next(told)] == [("a-2", "a-2 begins"), ("a-2", "a-2 ends")]
    assert api.asked[-2:] == [("a-2", ""), ("a-2", "2026-01-01T00:00:00Z")]
    end(api)
    assert list(told) == []


def test_lines_that_break_off_at_the_end_of_the_job_go_on_all_the_same(
    api: Written, told: Iterator[tuple[str, str]]
) -> None:
    api.breaks.add("a-2")
    with api._lock:
        api.change(PODS, "here", "a-2", {"status": {"phase": "Succeeded"}})
        end(api)
    assert list(told) == [("a-2", "a-2 begins"), ("a-2", "a-2 ends")]


@pytest.mark.parametrize("error", [ClusterNotFound("there is no job a"), ClusterRefused("jobs are forbidden")])
def test_lines_end_if_the_job_cannot_be_seen(
    api: Written, told: Iterator[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, error: ClusterFailed
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(api, "get", fail)
    assert list(told) == [("a", f"({error})")]


@pytest.mark.parametrize("method", ["log", "list"])
def test_lines_that_cannot_be_read_for_whatever_reason_are_an_error(
    api: Written, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(api, method, fail)
    with pytest.raises(ThreadFailed, match="RuntimeError: out of order"):
        list(lines(api, "here", "a", follow=True))  # type: ignore[arg-type]
