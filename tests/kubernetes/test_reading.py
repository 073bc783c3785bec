"""What the API server says, as values."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest

from ef_common.core.autoscale import Autoscale
from ef_common.core.cluster import Cause, Decision, JobPhase, Pod, Record, Refusal, WorkerReport
from ef_common.core.door_list import DoorList
from ef_common.kubernetes import reading, writing
from ef_common.kubernetes.excerpts import of_pod
from ef_common.kubernetes.installation import manifests
from ef_common.kubernetes.quantities import thousandths
from ef_common.kubernetes.reading import job_of, nodes_of, places_of, pod_of, request_of
from ef_common.kubernetes.resource import (
    DOORS_ANNOTATION,
    INDEX_LABEL,
    JOB_LABEL,
    METRICS_PORT,
    UID_LABEL,
    definition,
)
from ef_common.launch.environment import read_environment
from ef_common.launch.rendezvous_options import GivenParameters, RendezvousOptions, config_of
from tests.kubernetes.objects import GPU, job, node


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("1", 1000),
        (2, 2000),
        ("500m", 500),
        ("0.5", 500),
        ("1.5Gi", 1536 * 1024 * 1024 * 1000),
        ("1k", 10**6),
        ("1e3", 10**6),
        ("1E", 10**21),
        ("100n", 1),
    ],
)
def test_amount_is_read_as_kubernetes_reads_it(text: str, amount: int) -> None:
    assert thousandths(text) == amount


@pytest.mark.parametrize("text", ["", "1x", "Gi", "1 Gi", "--1", "-1", "-500m"])
def test_amount_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="an amount of a resource"):
        thousandths(text)


@pytest.mark.parametrize("text", ["1e19", "1e999", "9223372036854775808", "9" * 50])
def test_amount_that_is_larger_than_any_is_the_largest(text: str) -> None:
    assert thousandths(text) == (2**63 - 1) * 1000


@pytest.mark.parametrize("text", ["1e9999999", "1e-9999999"])
def test_amount_without_bounds_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="an amount of a resource"):
        thousandths(text)


def test_pod_that_asks_for_more_than_all_nodes_have_is_no_error() -> None:
    largest = {"resources": {"requests": {"memory": str(2**63 - 1)}}}
    excerpt = of_pod({"metadata": {"name": "x"}, "spec": {"nodeName": "n", "containers": [largest, largest]}})
    assert excerpt is not None
    assert nodes_of([node()], [excerpt])


OURS = {JOB_LABEL: "a", UID_LABEL: "uid-of-a"}
DOORS_FILE = "/run/elasticflow-doors/doors"


def container(requests: Any = None, limits: Any = None, **more: Any) -> dict[str, Any]:
    return {"name": "c", "resources": {"requests": requests, "limits": limits}, **more}


def test_request_of_a_pod_is_that_of_its_containers_together_and_of_each_that_runs_before() -> None:
    spec = {
        "containers": [container({"cpu": "1"}, {"cpu": "2", GPU: "1"}), container({"cpu": "500m"})],
        "initContainers": [container({"cpu": "1"}), container({"cpu": "4", "memory": "1k"})],
        "overhead": {"cpu": "100m"},
    }
    assert request_of(spec) == {"cpu": 4100, GPU: 1000, "memory": 10**6, "pods": 1000}


def test_sidecars_run_beside_the_containers_and_beside_what_runs_after_them() -> None:
    def sidecar(cpu: str) -> dict[str, Any]:
        return container({"cpu": cpu, "memory": "1k"}, restartPolicy="Always")

    inits = [container({"cpu": "3"}), sidecar("1"), container({"cpu": "4"}), sidecar("2")]
    assert request_of({"containers": [container({"cpu": "3"})], "initContainers": inits})["cpu"] == 6000
    few = request_of({"containers": [container({"cpu": "1"})], "initContainers": inits})
    assert few == {"cpu": 5000, "memory": 2 * 10**6, "pods": 1000}


def test_what_a_pod_asks_for_as_a_whole_replaces_what_its_containers_ask_for() -> None:
    spec = {
        "containers": [container({"cpu": "1", GPU: "1"}), container({"cpu": "1"})],
        "resources": {"requests": {"cpu": "1500m"}, "limits": {"cpu": "8", "memory": "1k"}},
        "overhead": {"cpu": "100m"},
    }
    assert request_of(spec) == {"cpu": 1600, GPU: 1000, "memory": 10**6, "pods": 1000}
    del spec["resources"]["requests"]
    assert request_of(spec)["cpu"] == 2100


def foreign(name: str = "", **status: Any) -> dict[str, Any]:
    return {"metadata": {}, "spec": {"nodeName": name, "containers": [container({GPU: "1"})]}, "status": status}


def test_pods_of_others_count_where_they_are_or_will_be() -> None:
    others = [foreign("n1"), foreign("", nominatedNodeName="n1"), foreign("n1", phase="Succeeded"), foreign("")]
    (one,) = nodes_of([node("n1", 4)], others)
    assert (one.free[GPU], one.free["pods"]) == (2000, 8000)


def test_node_that_is_cordoned_or_not_ready_is_none() -> None:
    sick = node("n2")
    sick["status"]["conditions"][0]["status"] = "Unknown"
    assert nodes_of([node("n1", unschedulable=True), sick], []) == []


TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("spec", "suits"),
    [
        ({}, False),
        ({"tolerations": [{"key": "gpu", "value": "yes"}]}, True),
        ({"tolerations": [{"key": "gpu", "value": "no"}]}, False),
        ({"tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]}, True),
        ({"tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}]}, False),
        ({"tolerations": [{"operator": "Exists"}], "nodeSelector": {"zone": "east"}}, True),
        ({"tolerations": [{"operator": "Exists"}], "nodeSelector": {"zone": "west"}}, False),
    ],
)
def test_pod_may_be_where_its_selector_and_its_tolerations_allow_it(spec: dict[str, Any], suits: bool) -> None:
    assert places_of(spec, [node("n1", taints=[TAINT])]) == ({"n1"} if suits else frozenset())


@pytest.mark.parametrize(
    ("key", "effect", "limits", "suits"),
    [
        (GPU, "NoSchedule", {GPU: "1"}, True),
        (GPU, "NoSchedule", {"cpu": "1"}, False),
        (GPU, "NoExecute", {GPU: "1"}, False),
        ("cpu", "NoSchedule", {"cpu": "1"}, False),
    ],
)
def test_nodes_of_a_resource_take_pods_that_ask_for_it(
    key: str, effect: str, limits: dict[str, str], suits: bool
) -> None:
    """`ExtendedResourceToleration` lets such a pod stay, once it is created, as in Google's clusters."""
    taint = {"key": key, "value": "present", "effect": effect}
    spec = {"containers": [container(limits=limits)]}
    assert places_of(spec, [node("n1", taints=[taint])]) == ({"n1"} if suits else frozenset())


@pytest.mark.parametrize(
    ("limits", "tolerations", "lacks"),
    [
        ({GPU: "1"}, [], True),
        ({GPU: "1"}, [{"key": GPU, "operator": "Equal", "value": "present", "effect": "NoSchedule"}], True),
        ({GPU: "1"}, [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}], False),
        ({"cpu": "1", "a.kubernetes.io/b": "1"}, [], False),
    ],
)
def test_pod_that_was_created_without_the_toleration_for_its_resource_says_so(
    limits: dict[str, str], tolerations: list[dict[str, str]], lacks: bool
) -> None:
    spec = {"containers": [container(limits=limits)], "tolerations": tolerations}
    assert reading.lacks_tolerations(spec) is lacks
    taint = {"key": GPU, "value": "present", "effect": "NoSchedule"}
    without = {"containers": [container(limits={GPU: "1"})]}
    assert places_of(without, [node("n1", taints=[taint])], are_added=False) == frozenset()


def test_taint_that_only_prefers_keeps_nobody_away() -> None:
    assert places_of({}, [node("n1", taints=[{**TAINT, "effect": "PreferNoSchedule"}])]) == {"n1"}


def made_pod(phase: str = "Pending", *, status: int | None = None, **meta: Any) -> dict[str, Any]:
    pod = writing.pod_of(job(), 3)
    pod["metadata"].update(uid="p3", creationTimestamp="1970-01-01T00:00:07Z", **meta)
    ended = [] if status is None else [{"name": "worker", "state": {"terminated": {"exitCode": status}}}]
    pod["status"] = {"phase": phase, "containerStatuses": ended}
    return pod


def test_pod_is_read() -> None:
    request = {GPU: 1000, "pods": 1000}
    assert reading.pod_of(made_pod()) == Pod("a-3", "p3", 3, request, created=7.0)
    assert reading.pod_of(made_pod("Running")).running
    ended = reading.pod_of(made_pod("Failed", status=75))
    assert (ended.ended, ended.status, ended.running) == (True, 75, False)
    assert reading.pod_of(made_pod("Failed")).status is None
    assert reading.pod_of(made_pod(deletionTimestamp="1970-01-01T00:01:00Z")).gone_by == 60.0
    waiting = made_pod()
    waiting["status"]["conditions"] = [
        {"type": "PodScheduled", "reason": "Unschedulable", "lastTransitionTime": "1970-01-01T00:00:09Z"}
    ]
    assert reading.pod_of(waiting).unschedulable_since == 9.0


def test_number_of_a_pod_is_that_of_its_name() -> None:
    """A label can be changed. A pod whose name has no number was made by somebody else."""
    labels: dict[str, Any] = {"labels": {**OURS, INDEX_LABEL: "x"}}
    assert reading.pod_of(made_pod(**labels)).index == 3
    assert reading.pod_of(made_pod(**labels, name="a-1-12")).index == 12
    for name in ("a", "a-", "a-x", "a-²"):
        assert reading.pod_of(made_pod(**labels, name=name)).index == 0


SIDECAR = {"name": "logs", "state": {"running": {}}}


def test_container_that_trains_decides_whether_a_pod_has_ended() -> None:
    raw = made_pod("Running", status=0)
    raw["status"]["containerStatuses"].insert(0, SIDECAR)
    pod = reading.pod_of(raw)
    assert (pod.running, pod.ended, pod.lingers, pod.status) == (False, True, True, 0)
    assert pod.takes_room
    assert not reading.pod_of(made_pod("Succeeded", status=0)).takes_room
    raw = made_pod("Running")
    raw["status"]["containerStatuses"] = [{"name": "logs", "state": {"terminated": {"exitCode": 3}}}]
    pod = reading.pod_of(raw)
    assert (pod.running, pod.ended, pod.lingers, pod.status) == (True, False, False, None)


def with_proxy(pod: dict[str, Any]) -> dict[str, Any]:
    """The pod, into which a service mesh has put its proxy before the other containers, so that it starts first."""
    pod["spec"]["containers"].insert(0, {"name": "proxy", "env": [{"name": "ISTIO", "value": "1"}]})
    pod["status"]["containerStatuses"].insert(0, {"name": "proxy", "state": {"running": {}}})
    return pod


def test_container_that_is_put_before_the_one_that_trains_is_not_taken_for_it() -> None:
    pod = reading.pod_of(with_proxy(made_pod("Running", status=0)))
    assert (pod.running, pod.ended, pod.lingers, pod.status) == (False, True, True, 0)
    assert reading.pod_of(with_proxy(made_pod("Running"))).running
    asked = with_proxy(made_pod("Running"))
    asked["status"]["podIP"] = "10.0.0.7"
    assert reading.door_of(asked) == ("10.0.0.7", METRICS_PORT)


def test_pod_without_the_file_of_addresses_trains_in_its_first_container() -> None:
    """A controller of an earlier version has made it."""
    pod = made_pod("Running", status=0)
    del pod["spec"]["containers"][0]["volumeMounts"]
    assert reading.pod_of(pod).status == 0


def test_pod_that_is_on_a_node_and_does_not_start_says_since_when() -> None:
    raw = made_pod()
    creating = {"name": "worker", "state": {"waiting": {"reason": "ContainerCreating"}}}
    raw["status"]["containerStatuses"] = [creating]
    read = reading.pod_of(raw)
    assert (read.waits, read.waits_since) == ("ContainerCreating", 7.0)
    raw["status"]["startTime"] = "1970-01-01T00:00:09Z"
    assert reading.pod_of(raw).waits_since == 9.0
    raw["status"]["initContainerStatuses"] = [{"name": "data", "state": {"running": {}}}]
    assert reading.pod_of(raw).waits == "", "it loads data, say"
    raw["status"].update(phase="Running", initContainerStatuses=[])
    assert reading.pod_of(raw).waits == ""


def test_time_of_init_containers_does_not_count_as_waiting() -> None:
    raw = made_pod()
    raw["status"]["startTime"] = "1970-01-01T00:00:09Z"
    raw["status"]["containerStatuses"] = [{"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}]
    ends = ["1970-01-01T00:20:00Z", "1970-01-01T00:10:00Z", None]
    loaded = [{"name": f"data{n}", "state": {"terminated": {"finishedAt": end}}} for n, end in enumerate(ends)]
    raw["status"]["initContainerStatuses"] = loaded
    read = reading.pod_of(raw)
    assert (read.waits, read.waits_since) == ("PodInitializing", 1200.0)
    raw["status"]["initContainerStatuses"] = loaded[2:]
    assert reading.pod_of(raw).waits_since == 9.0


@pytest.mark.parametrize("where", ["initContainerStatuses", "containerStatuses"])
@pytest.mark.parametrize(
    ("waiting", "problem"),
    [
        ({"reason": "ContainerCreating"}, ""),
        ({"reason": "PodInitializing"}, ""),
        ({}, ""),
        ({"reason": "InvalidImageName"}, "InvalidImageName"),
        ({"reason": "ErrImagePull", "message": "not\n found"}, "ErrImagePull: not found"),
        ({"reason": "ImagePullBackOff", "message": "x" * 999}, f"ImagePullBackOff: {'x' * 200}…"),
        ({"reason": "CreateContainerConfigError", "message": "no secret"}, "CreateContainerConfigError: no secret"),
        ({"reason": "CreateContainerError", "message": "no"}, "CreateContainerError: no"),
        ({"reason": "ErrImageNeverPull", "message": "no"}, "ErrImageNeverPull: no"),
        ({"reason": "RunContainerError", "message": "no"}, "RunContainerError: no"),
    ],
)
def test_pod_whose_container_cannot_start_says_why(where: str, waiting: dict[str, str], problem: str) -> None:
    raw = made_pod()
    raw["status"][where] = [{"name": "worker", "state": {"waiting": waiting}}]
    assert reading.pod_of(raw).problem == problem


@pytest.mark.parametrize(
    ("change", "port", "door"),
    [
        ({"podIP": "10.0.0.7"}, "29401", ("10.0.0.7", 29401)),
        ({"podIP": "fd00::7"}, "29401", ("fd00::7", 29401)),
        ({"podIP": "metadata.internal"}, "29401", None),
        ({"podIP": "10.0.0.7"}, "99999", None),
        ({"podIP": "10.0.0.7"}, None, None),
        ({"podIP": "10.0.0.7", "phase": "Pending"}, "29401", None),
        (
            {"podIP": "10.0.0.7", "containerStatuses": [{"name": "worker", "state": {"terminated": {"exitCode": 0}}}]},
            "29401",
            None,
        ),
        ({}, "29401", None),
    ],
    ids=str,
)
def test_pod_is_asked_at_its_own_address(change: dict[str, Any], port: str | None, door: Any) -> None:
    pod = made_pod("Running")
    pod["status"].update(change)
    (variable,) = [one for one in pod["spec"]["containers"][0]["env"] if one["name"] == reading.METRICS_VARIABLE]
    assert variable["value"] == "29401"
    variable["value"] = port
    assert reading.door_of(pod) == door
    pod["metadata"]["deletionTimestamp"] = "1970-01-01T00:01:00Z"
    assert reading.door_of(pod) is None


def test_pod_of_a_job_before_with_the_same_name_is_not_its_own() -> None:
    new = job()
    new["metadata"]["uid"] = "another"
    assert reading.belongs(made_pod(), job())
    assert not reading.belongs(made_pod(), new)


def test_job_is_read_with_what_its_user_wants() -> None:
    read = job_of(job(workers=3), [made_pod()], [node()], priorities={"": 7})
    assert (read.key, read.minimum, read.maximum, read.priority, read.suspended) == ("here/a", 1, 3, 7, False)
    assert read.nodes == {"n1"}
    assert [pod.index for pod in read.pods] == [3]
    assert job_of(job(workers=0), [], [], priorities={}).suspended
    assert job_of(job(low=2, workers=1), [], [], priorities={}).maximum == 2
    assert job_of(job(workers=9), [], [], priorities={}).maximum == 4
    assert job_of(job(priorityClassName="high"), [], [], priorities={"high": 9, "": 1}).priority == 9


def test_job_has_all_of_its_pods_with_the_default_that_the_api_server_writes() -> None:
    (version,) = definition()["spec"]["versions"]
    field = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["workers"]
    with_default = job(high=2**31 - 1, workers=field["default"])
    assert job_of(with_default, [], [], priorities={}).maximum == 2**31 - 1
    assert not job_of(with_default, [], [], priorities={}).suspended


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"minWorkers": 5}, "minWorkers must not be greater than maxWorkers. Received: minWorkers=5, maxWorkers=4"),
        ({"minWorkers": 0}, "minWorkers must not be greater"),
        ({"template": {"spec": {"containers": []}}}, "template needs a container"),
        ({"template": {}}, "template needs a container"),
        ({"autoscale": {"budget": 5}}, "only with policy cost"),
        ({"autoscale": {"policy": "cost"}}, "exactly one of valuePerHour, deadlineSeconds and budget"),
        ({"autoscale": {"policy": "cost", "budget": 5, "deadlineSeconds": 9}}, "exactly one of valuePerHour"),
        ({"autoscale": {"policy": "cost", "budget": 5}}, "needs pricePerWorkerHour"),
        ({"autoscale": {"minGlobalBatchSize": 5}}, "needs a maxGlobalBatchSize"),
        ({"autoscale": {"threshold": 2}}, "threshold is a share in [0, 1]"),
        ({"template": {"spec": {"containers": [{}], "restartPolicy": "Always"}}}, "restartPolicy must be Never"),
        ({"template": {"spec": {"containers": [{}], "hostNetwork": True}}}, "hostNetwork is not supported"),
    ],
)
def test_job_that_makes_no_sense_is_read_as_such(change: dict[str, Any], text: str) -> None:
    assert text in job_of(job(**change), [], [node()], priorities={}).problem


@pytest.mark.parametrize(
    "pod",
    [
        {"containers": [{"resources": {"limits": {GPU: "x"}}}]},
        {"containers": [{"resources": {"limits": {"cpu": "1e9999999"}}}]},
        {"containers": [{"resources": {"limits": {"cpu": "-1"}}}]},
        {"containers": [{"resources": "x"}]},
        {"containers": [{"resources": {"limits": 1}}]},
        {"containers": [{}], "priorityClassName": ["x"]},
        {"containers": [{}], "priorityClassName": 1},
        "x",
    ],
    ids=str,
)
def test_template_that_cannot_be_read_is_wrong(pod: Any) -> None:
    read = job_of(job(template={"spec": pod}), [], [node()], priorities={})
    assert "the template cannot be read" in read.problem


def test_job_with_a_name_that_is_too_long_is_read_as_such() -> None:
    assert "at most 52 small letters" in job_of(job("a" * 53), [], [], priorities={}).problem
    assert job_of(job("a" * 52), [], [], priorities={}).problem == ""


@pytest.mark.parametrize("name", ["llama-3.1-8b", "a-"])
def test_job_after_which_no_service_can_be_named_is_read_as_such(name: str) -> None:
    assert "hyphens, of which none is" in job_of(job(name), [], [], priorities={}).problem


def test_job_whose_name_begins_with_a_digit_is_for_the_api_server_to_judge() -> None:
    assert job_of(job("3d-unet"), [], [], priorities={}).problem == ""


RECORD = Record(
    JobPhase.RUNNING,
    starts=2,
    leaving=frozenset({"u1"}),
    counted=frozenset({"u2"}),
    crashes=3,
    crashed_at=1e9 + 0.25,
    lost="a-1 ended with status 137",
    cap=2,
    refusal=Refusal(2, 1e9 + 7.5, "no node", tries=3),
    asked=3,
    asked_at=1e9 + 0.5,
    ended_at=1e9,
    cause=Cause.POD_LOST,
    why="because",
)


def test_record_is_read_as_it_was_written() -> None:
    thing = job()
    read = replace(job_of(thing, [made_pod("Running")], [node()], priorities={}), record=RECORD)
    status = writing.status_of(thing, read, Decision(RECORD, wanted=3), now=1e9)
    assert reading.record_of(status) == RECORD
    assert (status["wanted"], status["workers"], status["running"]) == (3, 1, 1)
    assert status["selector"] == f"{JOB_LABEL}=a"
    again = writing.status_of({**thing, "status": status}, read, Decision(RECORD, wanted=3), now=2e9)
    assert again == status  # so it is not written again
    known = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    assert status.keys() <= known.keys()  # the API server drops others


def test_refusal_counts_until_the_job_is_changed() -> None:
    thing = job()
    thing["status"] = writing.status_of(thing, job_of(thing, [], [], priorities={}), Decision(RECORD), now=1e9)
    assert job_of(thing, [], [], priorities={}).record == RECORD
    thing["metadata"]["generation"] += 1
    assert job_of(thing, [], [], priorities={}).record == replace(RECORD, refusal=None)


def test_what_is_told_of_the_training_is_read_as_it_was_written() -> None:
    thing = job()
    read = job_of(thing, [made_pod("Running")], [node()], priorities={})
    told = WorkerReport(
        1e9 + 0.5, workers=3, generation=7, step=40, samples_per_s=51.5, slow=("10.0.0.1",), checkpoint=30
    )
    decision = Decision(Record(JobPhase.RUNNING))
    status = writing.status_of(thing, read, decision, now=1e9, told=told)
    assert (status["training"], status["samplesPerSecond"]) == (3, 51.5)
    assert reading.report_of(status) == told
    unknown = replace(told, workers=None, samples_per_s=None)
    assert reading.report_of(writing.status_of(thing, read, decision, now=1e9, told=unknown)) == unknown
    assert reading.report_of(writing.status_of(thing, read, decision, now=1e9)) is None


def test_pod_is_slow_if_a_worker_says_so_of_its_address() -> None:
    pods = [made_pod("Running"), made_pod("Running")]
    for number, pod in enumerate(pods, 1):
        pod["status"]["podIP"] = f"10.0.0.{number}"
    report = WorkerReport(1e9, workers=2, generation=1, step=1, samples_per_s=1.0, slow=("10.0.0.2", "10.0.0.3"))
    read = job_of(job(), pods, [node()], priorities={}, report=report)
    assert [pod.slow for pod in read.pods] == [False, True]


def test_pod_is_idle_if_it_did_not_train_when_it_was_asked() -> None:
    pods = [made_pod("Running"), made_pod("Running"), made_pod("Running")]
    for number, pod in enumerate(pods[1:], 1):
        pod["status"]["podIP"] = f"10.0.0.{number}"
    read = job_of(job(), pods, [node()], priorities={}, idle={"10.0.0.2", "10.0.0.3"})
    assert [pod.idle for pod in read.pods] == [False, False, True]


def test_pod_says_when_its_training_has_ended() -> None:
    assert pod_of(made_pod("Running")).ended_at == 0.0
    pod = made_pod("Running", status=0)
    assert pod_of(pod).ended_at == 0.0
    pod["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = "1970-01-01T00:01:00Z"
    assert pod_of(pod).ended_at == 60.0


def test_job_knows_since_when_its_workers_are_asked() -> None:
    assert job_of(job(), [], [], priorities={}, heard_since=7.0).heard_since == 7.0


def test_spares_are_told_apart_from_workers() -> None:
    read = job_of(job(spares=2), [made_pod("Running")], [node()], priorities={})
    assert (read.takes, read.spares) == (4, 2)
    three = replace(read, pods=tuple(replace(read.pods[0], uid=f"p{number}") for number in range(3)))
    for wanted, spares, told in ((3, 1, (2, 2, 3, 1)), (3, 2, (1, 1, 3, 2)), (5, 1, (4, 3, 3, None))):
        decision = Decision(Record(JobPhase.RUNNING), wanted=wanted, spares=spares)
        status = writing.status_of(job(), three, decision, now=1e9)
        assert (status["wanted"], status["workers"], status["running"], status.get("spares")) == told


def test_nobody_trains_where_there_are_no_pods() -> None:
    told = WorkerReport(1e9, workers=3, generation=7, step=40, samples_per_s=51.5)
    read = job_of(job(), [], [node()], priorities={})
    status = writing.status_of(job(), read, Decision(Record(JobPhase.SUCCEEDED)), now=1e9, told=told)
    assert (status["training"], status["step"], "samplesPerSecond" in status) == (0, 40, False)


def test_last_changes_of_who_trains_are_told() -> None:
    thing = job()
    read = job_of(thing, [made_pod("Running")], [node()], priorities={})
    for second, (generation, workers) in enumerate([(1, 2), (1, 2), (2, None), (2, 3), (3, 3), (4, 2), (5, 3), (6, 4)]):
        told = WorkerReport(float(second), workers=workers, generation=generation, step=10 * second, samples_per_s=1.0)
        thing["status"] = writing.status_of(thing, read, Decision(Record(JobPhase.RUNNING)), now=0.0, told=told)
        if second == 3:  # nobody knew who trained in view 2, until somebody did
            assert [one.get("training") for one in thing["status"]["changes"]] == [2, 3]
    changes = thing["status"]["changes"]
    assert [(one["generation"], one["training"], one["step"]) for one in changes] == [
        *((2, 3, 30), (3, 3, 40), (4, 2, 50)),
        *((5, 3, 60), (6, 4, 70)),
    ]
    assert changes[0]["time"] == "1970-01-01T00:00:03.000000Z"


def test_condition_has_the_time_since_when_it_is_so() -> None:
    thing = job()
    read = job_of(thing, [], [], priorities={})
    first = writing.status_of(thing, read, Decision(Record(JobPhase.PENDING)), now=0.0)
    then = writing.status_of({**thing, "status": first}, read, Decision(Record(JobPhase.RUNNING)), now=60.0)
    found = {one["type"]: (one["status"], one["lastTransitionTime"]) for one in then["conditions"]}
    assert found["Running"] == ("True", "1970-01-01T00:01:00.000000Z")
    assert found["Failed"] == ("False", "1970-01-01T00:00:00.000000Z")


@pytest.mark.parametrize("phase", JobPhase)
def test_job_has_a_condition_for_each_phase_of_which_one_is_true(phase: JobPhase) -> None:
    read = job_of(job(), [], [], priorities={})
    decision = Decision(Record(phase, cause=Cause.POD_LOST, why="because"))
    made = writing.status_of(job(), read, decision, now=0.0)["conditions"]
    assert {one["type"] for one in made} == {*(each.value for each in JobPhase), "Resizing"}
    assert [one["type"] for one in made if one["status"] == "True"] == [phase.value]
    assert [(one["type"], one["message"]) for one in made if "message" in one] == [(phase.value, "because")]
    assert [one["type"] for one in made if one["reason"] == "PodLost"] == [phase.value]
    assert all(re.fullmatch("[A-Z][A-Za-z]+", one["reason"]) for one in made)


@pytest.mark.parametrize(
    ("phase", "wanted", "status", "reason"),
    [
        (JobPhase.RUNNING, 3, "True", "PodsStarting"),
        (JobPhase.RUNNING, 1, "False", "PodsAsWanted"),
        (JobPhase.PENDING, 3, "False", "Pending"),
        (JobPhase.SUCCEEDED, 0, "False", "Succeeded"),
    ],
)
def test_job_that_trains_is_resized_until_as_many_pods_run_as_it_shall_have(
    phase: JobPhase, wanted: int, status: str, reason: str
) -> None:
    read = job_of(job(spares=1), [made_pod("Running")], [node()], priorities={})
    made = writing.status_of(job(), read, Decision(Record(phase), wanted=wanted, spares=1), now=0.0)
    (found,) = [one for one in made["conditions"] if one["type"] == "Resizing"]
    assert (found["status"], found["reason"]) == (status, reason)
    assert found.get("message", "1 of 3 pods run") == "1 of 3 pods run"


def resizing(
    num_pods: int, nodes: int | None, *, wanted: int = 2, spares: int = 0, before: Any = None, heard: bool = True
) -> tuple[str, str, str]:
    """The condition `Resizing` of a job with so many pods that run, of which so many train; as it is kept then, too."""
    pods = [made_pod("Running") for _ in range(num_pods)]
    said = WorkerReport(1.0, workers=nodes or 1, generation=1, step=1, samples_per_s=1.0, nodes=nodes)
    read = job_of(job(), pods, [node()], priorities={}, report=said if heard else None)
    read = replace(read, pods=tuple(replace(pod, uid=f"p{number}") for number, pod in enumerate(read.pods)))
    thing = {**job(), "status": before or {}}
    decision = Decision(Record(JobPhase.RUNNING), wanted=wanted + spares, spares=spares)
    told = said if heard else reading.report_of(thing["status"])
    made = writing.status_of(thing, read, decision, now=0.0, told=told)
    (found,) = [one for one in made["conditions"] if one["type"] == "Resizing"]
    if before is not None:
        before.clear()
        before.update(made)
    return found["status"], found["reason"], found.get("message", "")


@pytest.mark.parametrize(
    ("num_pods", "nodes", "more", "found"),
    [
        (2, 2, {}, ("False", "PodsAsWanted", "")),
        (2, 1, {}, ("True", "PodsJoining", "1 of 2 pods train")),
        (2, 3, {}, ("True", "PodsLeaving", "3 pods train, and 2 are wanted")),
        (1, 2, {}, ("True", "PodsStarting", "1 of 2 pods run")),
        (2, None, {}, ("False", "PodsAsWanted", "")),
        (3, 2, {"spares": 1}, ("False", "PodsAsWanted", "")),
        (2, 2, {"spares": 1}, ("True", "PodsStarting", "2 of 3 pods run")),
    ],
)
def test_job_is_resized_until_it_trains_in_as_many_pods_as_it_shall(
    num_pods: int, nodes: int | None, more: dict[str, int], found: tuple[str, str, str]
) -> None:
    assert resizing(num_pods, nodes, **more) == found


def test_what_the_workers_have_said_of_a_change_holds_until_a_new_controller_has_heard_them() -> None:
    status: Any = {}
    joining = resizing(2, 1, before=status)
    assert joining[1] == "PodsJoining"
    assert resizing(2, None, before=status, heard=False) == joining
    assert status["conditions"][-1]["lastTransitionTime"] == "1970-01-01T00:00:00.000000Z"
    del status["training"]  # nobody has been heard for long
    assert resizing(2, None, before=status, heard=False)[1] == "PodsAsWanted"
    assert resizing(1, None, before=status, heard=False)[1] == "PodsStarting"
    assert resizing(2, None, before=status, heard=False)[1] == "PodsAsWanted"


def test_training_that_nobody_has_heard_of_for_long_is_not_told_to_be_resized() -> None:
    said = WorkerReport(1.0, workers=1, generation=1, step=1, samples_per_s=1.0, nodes=5)
    read = job_of(job(), [made_pod("Running")], [node()], priorities={}, report=said)
    decision = Decision(Record(JobPhase.RUNNING), wanted=1)
    made = writing.status_of(job(), read, decision, now=0.0, told=replace(said, workers=None))
    assert [one["reason"] for one in made["conditions"] if one["type"] == "Resizing"] == ["PodsAsWanted"]


# ---------------------------------------------------------------- what a job consists of


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in pod["spec"]["containers"][0]["env"]}


def test_pod_knows_how_to_find_the_others() -> None:
    pod = writing.pod_of(job(low=2, checkpoint="s3://b/a", nprocPerNode="gpu", priorityClassName="low"), 0)
    found = variables(pod)
    assert found["PET_RDZV_ENDPOINT"] == "a-uid-of-a.here.svc:29400"
    assert (found["PET_NNODES"], found["PET_NPROC_PER_NODE"]) == ("2:4", "gpu")
    assert found["ELASTICFLOW_TOKEN"] == {"secretKeyRef": {"name": "a-uid-of-a", "key": "token"}}
    assert found["ELASTICFLOW_CHECKPOINT"] == "s3://b/a"
    assert pod["spec"]["priorityClassName"] == "low"
    assert (pod["spec"]["restartPolicy"], pod["spec"]["automountServiceAccountToken"]) == ("Never", False)
    assert pod["metadata"]["labels"] == {**OURS, INDEX_LABEL: "0"}
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "uid-of-a"


def test_pod_of_a_job_that_chooses_its_size_knows_how() -> None:
    settings = {"policy": "cost", "pricePerWorkerHour": 2.5, "budget": 100, "everySteps": 50, "retrySeconds": 60}
    found = variables(writing.pod_of(job(low=2, autoscale=settings), 0))
    read = read_environment({name: value for name, value in found.items() if isinstance(value, str)})
    cost = Autoscale(min=2, max=4, policy="cost", price_per_worker_hour=2.5, budget=100, every_steps=50, retry_s=60)
    assert read.autoscale == cost
    assert (read.metrics_port, found["ELASTICFLOW_CONTROLLER"]) == (METRICS_PORT, "1")
    assert job_of(job(autoscale={}), [], [node()], priorities={}).autoscales
    alone = variables(writing.pod_of(job(), 0))
    assert not {"ELASTICFLOW_AUTOSCALE", "ELASTICFLOW_CONTROLLER"} & set(alone)
    assert not job_of(job(), [], [node()], priorities={}).autoscales


def test_what_the_user_has_set_stays() -> None:
    thing = job()
    spec = thing["spec"]["template"]["spec"]
    own = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 5}
    spec.update(tolerations=[own], terminationGracePeriodSeconds=7, automountServiceAccountToken=True)
    spec["containers"][0]["env"] = [
        {"name": "PET_NNODES", "value": "3:3"},
        {"name": "PET_RDZV_CONF", "value": "last_call_timeout=9"},
    ]
    thing["spec"]["template"]["metadata"] = {"labels": {"team": "x", JOB_LABEL: "z"}, "annotations": {"b": "c"}}
    before = copy.deepcopy(thing)
    pod = writing.pod_of(thing, 0)
    assert thing == before
    assert variables(pod)["PET_NNODES"] == "3:3"
    assert variables(pod)["PET_RDZV_CONF"] == f"last_call_timeout=9,is_group=1,doors_file={DOORS_FILE}"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 7
    assert pod["spec"]["automountServiceAccountToken"] is True
    assert [one["key"] for one in pod["spec"]["tolerations"]] == [own["key"], "node.kubernetes.io/not-ready"]
    assert pod["metadata"]["labels"] == {"team": "x", **OURS, INDEX_LABEL: "0"}
    assert pod["metadata"]["annotations"] == {"b": "c"}


def test_pod_has_a_file_of_the_addresses_that_it_is_told_and_those_of_now_at_first() -> None:
    thing = job()
    spec = thing["spec"]["template"]["spec"]
    spec["volumes"] = [{"name": "data", "emptyDir": {}}]
    spec["containers"][0]["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    spec["containers"].append({"name": "beside"})
    thing["spec"]["template"]["metadata"] = {"annotations": {"b": "c"}}
    told = DoorList(("10.0.0.1", "fd00::1"))
    pod = writing.pod_of(thing, 0, told)
    assert pod["metadata"]["annotations"] == {"b": "c", DOORS_ANNOTATION: told.text()}
    _, volume = pod["spec"]["volumes"]
    (item,) = volume["downwardAPI"]["items"]
    assert item == {"path": "doors", "fieldRef": {"fieldPath": f"metadata.annotations['{DOORS_ANNOTATION}']"}}
    first, beside = pod["spec"]["containers"]
    assert [one["mountPath"] for one in first["volumeMounts"]] == ["/data", "/run/elasticflow-doors"]
    assert "volumeMounts" not in beside
    options = RendezvousOptions.parse(
        GivenParameters(variables(pod)["PET_RDZV_ENDPOINT"], 1, 4, config_of(variables(pod)["PET_RDZV_CONF"]))
    )
    assert options.doors_file == f"{first['volumeMounts'][1]['mountPath']}/{item['path']}"
    assert "annotations" not in writing.pod_of(job(), 0, DoorList())["metadata"]


def test_address_of_a_pod_and_what_it_was_told_are_read() -> None:
    told = DoorList(("10.0.0.1",), ("10.0.0.2",), "4f")
    pod = writing.pod_of(job(), 0)
    pod["metadata"].update(uid="x", annotations={DOORS_ANNOTATION: told.text()})
    pod["status"] = {"phase": "Running", "podIP": "FD00:0::7"}
    assert pod_of(pod).address == "fd00::7"
    seeking = pod_of(pod, seekers={"fd00::7": "5a"})
    assert (seeking.told, seeking.seeks) == (told, "5a")
    for one in (pod_of(pod), pod_of(pod, seekers={"fd00::8": "5a"})):
        assert (one.told, one.seeks) == (DoorList(), ""), "what it was told is of interest to nobody any more"
    pod["metadata"]["annotations"][DOORS_ANNOTATION] = "nonsense"
    assert pod_of(pod, seekers={"fd00::7": "5a"}).told == DoorList()
    for text in ("", "nonsense"):
        pod["status"]["podIP"] = pod["metadata"]["annotations"][DOORS_ANNOTATION] = text
        assert (pod_of(pod).address, pod_of(pod).told, pod_of(pod, seekers={"": "5a"}).seeks) == ("", DoorList(), "")


def test_pod_is_changed_only_if_it_is_still_as_it_was_read() -> None:
    told = DoorList(("10.0.0.1",), (), "4f")
    patch = writing.doors_patch({"metadata": {"resourceVersion": "7"}}, told)
    assert patch == {"metadata": {"resourceVersion": "7", "annotations": {DOORS_ANNOTATION: told.text()}}}


def test_pods_find_each_other_before_they_are_ready_and_nobody_else_reaches_them() -> None:
    service, policy, secret = (
        writing.service_of(job()),
        writing.network_policy_of(job(), "ops"),
        writing.secret_of(job()),
    )
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == OURS
    ours, metrics = policy["spec"]["ingress"]
    assert ours == {"from": [{"podSelector": {"matchLabels": OURS}}]}
    assert metrics["ports"] == [{"protocol": "TCP", "port": METRICS_PORT}]
    (controller,) = metrics["from"]
    assert controller["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "ops"}}
    (deployment,) = [one for one in manifests(image="x") if one["kind"] == "Deployment"]
    label, value = next(iter(controller["podSelector"]["matchLabels"].items()))
    assert deployment["spec"]["template"]["metadata"]["labels"][label] == value
    assert len(secret["stringData"]["token"]) == 32
    assert secret["stringData"] != writing.secret_of(job())["stringData"]
    for thing in (service, policy, secret):
        assert thing["metadata"]["ownerReferences"][0]["name"] == "a"
