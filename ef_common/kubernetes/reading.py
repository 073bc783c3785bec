"""What the API server says of jobs, pods and nodes, as the values with which the rules of `core/cluster` work.

Of what keeps a pod from a node, this knows resources, cordons, taints and `nodeSelector`. The rest (affinity,
spreading, volumes, quotas) is found out by trying: a pod that finds no node is taken back after a while.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from ipaddress import ip_address
from math import inf
from typing import Any

from ef_common.core.cluster import Cause, Job, JobPhase, Node, Pod, Record, Refusal, WorkerReport
from ef_common.core.door_list import DoorList
from ef_common.kubernetes.quantities import thousandths
from ef_common.kubernetes.resource import DEFAULT_BACKOFF_LIMIT, DOORS_ANNOTATION, DOORS_VOLUME, JOB_LABEL, problem

METRICS_VARIABLE = "ELASTICFLOW_METRICS_PORT"
"""Its name is that of `ef_common.launch.environment`, of which this layer knows nothing."""
Object = Mapping[str, Any]
Version = tuple[str, int]
_ENDED = ("Succeeded", "Failed")
_MALFORMED = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError)
"""Templates are not checked before a pod is made of them."""
_CANNOT_START = (
    *("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"),
    *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
)
"""Reasons why a container waits, without those that pass by themselves."""
_MAX_MESSAGE = 200
_KEEPS_AWAY = ("NoSchedule", "NoExecute")


def key_of(thing: Object) -> str:
    """Namespace and name."""
    return f"{thing['metadata']['namespace']}/{thing['metadata']['name']}"


def job_key_of(pod: Object) -> str:
    """Of the job to which a pod may belong; "" for none."""
    name = (pod["metadata"].get("labels") or {}).get(JOB_LABEL)
    return f"{pod['metadata']['namespace']}/{name}" if name else ""


def version_of(job: Object) -> Version:
    """Which job this is (uid), and which version of what its user wants."""
    return job["metadata"]["uid"], int(job["metadata"].get("generation", 0))


def belongs(pod: Object, job: Object) -> bool:
    """Whether a pod belongs to this job, and not to one before it that had the same name."""
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(owner["uid"] == job["metadata"]["uid"] and owner.get("controller") for owner in owners)


def seconds(text: str | None) -> float:
    """A time of Kubernetes's, in seconds; 0 for none."""
    if not text:
        return 0.0
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def time_of(at: float) -> str:
    """The same the other way round."""
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


# ------------------------------------------------------------ pods


def request_of(spec: Object) -> dict[str, int]:
    """What a pod needs of a node, in thousandths of each resource's unit.

    Its containers run together with its sidecars, which are the init containers that are restarted. The other init
    containers run before, one after the other, each beside the sidecars that come before it. What the pod as a whole
    asks for of a resource replaces that.
    """
    together: Counter[str] = Counter({"pods": 1000})
    for container in spec.get("containers") or ():
        together.update(_requested(container))
    sidecars: Counter[str] = Counter()
    before: list[Counter[str]] = []
    for container in spec.get("initContainers") or ():
        amounts = _requested(container)
        if container.get("restartPolicy") == "Always":
            together.update(amounts)
            sidecars.update(amounts)
        else:
            before.append(Counter(amounts))
            before[-1].update(sidecars)
    for one in before:
        for name, amount in one.items():
            together[name] = max(together[name], amount)
    whole = spec.get("resources") or {}
    limits = {name: amount for name, amount in (whole.get("limits") or {}).items() if name not in together}
    for name, amount in {**limits, **(whole.get("requests") or {})}.items():
        together[name] = thousandths(amount)
    together.update({name: thousandths(amount) for name, amount in (spec.get("overhead") or {}).items()})
    return dict(together)


def _requested(container: Object) -> dict[str, int]:
    resources = container.get("resources") or {}
    amounts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: thousandths(amount) for name, amount in amounts.items()}


def pod_of(
    pod: Object,
    slow: Collection[str] = (),
    *,
    seekers: Mapping[str, str] | None = None,
    idle: Collection[str] = (),
) -> Pod:
    """A worker pod. The container that trains decides whether it has ended: others may run for ever.

    Args:
        pod: It.
        slow: Addresses of those that are slower than the others.
        seekers: What those have shown that look for their job, by their addresses; None for nobody.
        idle: Addresses of those that did not train when they were asked.
    """
    meta, status = pod["metadata"], pod.get("status") or {}
    phase, over = status.get("phase", "Pending"), _end_of_training(pod)
    ended = phase in _ENDED or over is not None
    address = _address_of(status)
    seeks = (seekers or {}).get(address, "") if address else ""
    waits = "" if ended else _waits_for(status)
    told = (meta.get("annotations") or {}).get(DOORS_ANNOTATION, "") if seeks else ""  # it stays, and may be long
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        index=_index_of(meta["name"]),
        request=request_of(pod["spec"]),
        node=pod["spec"].get("nodeName") or "",
        running=phase == "Running" and not ended,
        ended=ended,
        lingers=ended and phase not in _ENDED,
        status=None if over is None else int(over["exitCode"]),
        ended_at=0.0 if over is None else seconds(over.get("finishedAt")),
        gone_by=seconds(meta["deletionTimestamp"]) if meta.get("deletionTimestamp") else None,
        unschedulable_since=_unschedulable_since(status),
        created=seconds(meta.get("creationTimestamp")),
        problem=_problem_of(status),
        waits=waits,
        waits_since=_waits_since(pod) if waits else 0.0,
        slow=status.get("podIP") in slow,
        idle=address in idle,
        address=address,
        seeks=seeks,
        told=DoorList.of(told),
    )


def _index_of(name: str) -> int:
    """The number of a pod with this name. Its label says it, too, but anybody may change that."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _address_of(status: Object) -> str:
    """The address of a pod in the usual form; "" if it has none."""
    try:
        return str(ip_address(status["podIP"]))
    except (KeyError, ValueError):
        return ""


def door_of(pod: Object) -> tuple[str, int] | None:
    """Address and port at which the first worker of a pod answers with metrics; None if it does not, or not now."""
    status = pod.get("status") or {}
    if status.get("phase") != "Running" or pod["metadata"].get("deletionTimestamp") or _end_of_training(pod):
        return None
    variables = _container_that_trains(pod).get("env") or ()
    texts = [one.get("value") for one in variables if one.get("name") == METRICS_VARIABLE]
    try:
        address, port = _address_of(status), int(texts[0])
    except (IndexError, TypeError, ValueError):
        return None
    return (address, port) if address and 0 < port < 65536 else None


def _end_of_training(pod: Object) -> Object | None:
    """How the container that trains has ended; None if it has not, or nobody knows."""
    name = _container_that_trains(pod)["name"]
    for container in (pod.get("status") or {}).get("containerStatuses") or ():
        if container["name"] == name:
            ended: Object | None = (container.get("state") or {}).get("terminated")
            return ended
    return None


def _container_that_trains(pod: Object) -> Object:
    """It is the first one of the template. A service mesh may have put its proxy before it."""
    containers: list[Object] = pod["spec"]["containers"]
    with_doors = (
        one for one in containers if any(mount["name"] == DOORS_VOLUME for mount in one.get("volumeMounts") or ())
    )
    return next(with_doors, containers[0])


def _problem_of(status: Object) -> str:
    """Why a container of a pod cannot be started; "" for nothing."""
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _CANNOT_START:
            message = " ".join(str(waiting.get("message") or "").split())
            said = f"{message[:_MAX_MESSAGE]}…" if len(message) > _MAX_MESSAGE else message
            return f"{waiting['reason']}: {said}" if said else str(waiting["reason"])
    return ""


def _waits_for(status: Object) -> str:
    """What the containers of a pod wait for on a node; "" if one runs, as an init container that loads data."""
    states = [
        container.get("state") or {}
        for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    ]
    if status.get("phase", "Pending") != "Pending" or any("running" in state for state in states):
        return ""
    return next((str(reason) for state in states if (reason := (state.get("waiting") or {}).get("reason"))), "")


def _waits_since(pod: Object) -> float:
    """Since when a pod waits on its node: since it came there, or since the last of its init containers has ended."""
    status = pod.get("status") or {}
    came = seconds(status.get("startTime")) or seconds(pod["metadata"].get("creationTimestamp"))
    states = [container.get("state") or {} for container in status.get("initContainerStatuses") or ()]
    ends = [seconds((state.get("terminated") or {}).get("finishedAt")) for state in states]
    return max([came, *ends])


def _unschedulable_since(status: Object) -> float | None:
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return seconds(condition.get("lastTransitionTime"))
    return None


# ------------------------------------------------------------ nodes


def nodes_of(nodes: Iterable[Object], others: Iterable[Object]) -> list[Node]:
    """The nodes on which pods may be started.

    Args:
        nodes: Nodes.
        others: Pods that are no worker pods.
    """
    taken: dict[str, Counter[str]] = {}
    for pod in others:
        status = pod.get("status") or {}
        where = pod["spec"].get("nodeName") or status.get("nominatedNodeName")
        if where and status.get("phase") not in _ENDED:
            taken.setdefault(where, Counter()).update(request_of(pod["spec"]))
    return [_node_of(node, taken.get(node["metadata"]["name"], Counter())) for node in nodes if _is_usable(node)]


def _node_of(node: Object, taken: Mapping[str, int]) -> Node:
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    free = {name: thousandths(amount) - taken.get(name, 0) for name, amount in allocatable.items()}
    return Node(node["metadata"]["name"], free)


def _is_usable(node: Object) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or ()
    is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return is_ready and not bool((node.get("spec") or {}).get("unschedulable"))


def places_of(spec: Object, nodes: Iterable[Object], *, are_added: bool = True) -> frozenset[str]:
    """Names of the nodes that a pod may be put on.

    Args:
        spec: What its template says.
        nodes: The nodes.
        are_added: It gets tolerations for the resources that it asks for when it is created.
    """
    added = _tolerations_for_resources(spec) if are_added else ()
    tolerations = (*(spec.get("tolerations") or ()), *added)
    return frozenset(node["metadata"]["name"] for node in nodes if _suits(spec, tolerations, node))


def _tolerations_for_resources(spec: Object) -> list[Object]:
    """Those that a pod gets when it is created, for the resources that it asks for (`ExtendedResourceToleration`).

    Not all clusters do that: :func:`lacks_tolerations` tells it of a pod that was created. None is for a resource of
    Kubernetes itself.
    """
    names = [name for name in request_of(spec) if "/" in name and "kubernetes.io/" not in name]
    return [{"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in names]


def lacks_tolerations(spec: Object) -> bool:
    """Whether a pod, as it was created, has not got a toleration for each resource that it asks for."""
    given = spec.get("tolerations") or ()
    taints = [{"key": added["key"], "effect": added["effect"]} for added in _tolerations_for_resources(spec)]
    return not all(any(_tolerates(toleration, taint) for toleration in given) for taint in taints)


def _suits(spec: Object, tolerations: Collection[Object], node: Object) -> bool:
    labels = node["metadata"].get("labels") or {}
    taints = [one for one in (node.get("spec") or {}).get("taints") or () if one["effect"] in _KEEPS_AWAY]
    return all(labels.get(name) == value for name, value in (spec.get("nodeSelector") or {}).items()) and all(
        any(_tolerates(toleration, taint) for toleration in tolerations) for taint in taints
    )


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return (toleration.get("key"), toleration.get("value", "")) == (taint["key"], taint.get("value", ""))


# ------------------------------------------------------------ jobs


def job_of(
    job: Object,
    pods: Iterable[Object],
    nodes: Iterable[Object],
    *,
    priorities: Mapping[str, int],
    report: WorkerReport | None = None,
    seekers: Mapping[str, str] | None = None,
    idle: Collection[str] = (),
    heard_since: float = -inf,
    are_tolerations_added: bool = True,
) -> Job:
    """A job.

    Args:
        job: It.
        pods: Its pods.
        nodes: The nodes.
        priorities: Those of the classes, by name; "" is the default one.
        report: What a worker has said last; None if nobody has.
        seekers: What those have shown that look for their job, by their addresses; None for nobody.
        idle: Addresses of pods that did not train when they were asked.
        heard_since: Since when workers are asked.
        are_tolerations_added: Its pods get tolerations for the resources that they ask for when they are created.
    """
    spec = job["spec"]
    try:
        wrong = problem(job)
        template: Object = {} if wrong else spec["template"]["spec"]
        request = request_of(template)
        places = places_of(template, nodes, are_added=are_tolerations_added)
        priority = priorities.get(_class_of(spec, template), 0)
    except _MALFORMED as error:
        wrong, request, places, priority = f"the template cannot be read: {error!r}", {}, frozenset(), 0
    high = spec.get("maxWorkers", 1)
    workers = spec.get("workers", high)
    low = spec.get("minWorkers", 1)
    slow = () if report is None else report.slow
    return Job(
        key=key_of(job),
        minimum=low,
        maximum=max(low, min(high, workers)),
        request=request,
        nodes=places,
        priority=priority,
        created=seconds(job["metadata"].get("creationTimestamp")),
        suspended=bool(spec.get("suspend")) or workers == 0,
        backoff_limit=spec.get("backoffLimit", DEFAULT_BACKOFF_LIMIT),
        ttl_s=spec.get("ttlSecondsAfterFinished"),
        problem=wrong,
        takes=high,
        spares=spec.get("spares", 0),
        autoscales=spec.get("autoscale") is not None,
        report=report,
        heard_since=heard_since,
        pods=tuple(sorted((pod_of(pod, slow, seekers=seekers, idle=idle) for pod in pods), key=lambda pod: pod.index)),
        record=_without_old_refusal(job, record_of(job.get("status") or {})),
    )


def _class_of(spec: Object, template: Object) -> str:
    """Name of the priority class; "" for the default one."""
    name = spec.get("priorityClassName") or template.get("priorityClassName") or ""
    if not isinstance(name, str):
        raise TypeError(f"priorityClassName must be a string. Received: {name}")
    return name


def _without_old_refusal(job: Object, record: Record) -> Record:
    """What was refused may be allowed if its user has changed the job since."""
    is_same = (job.get("status") or {}).get("observedGeneration") == job["metadata"].get("generation", 0)
    return record if is_same else replace(record, refusal=None)


def record_of(status: Object) -> Record:
    """What is on record of a job."""
    return Record(
        phase=JobPhase(status.get("phase") or "Pending"),
        starts=status.get("starts", 0),
        leaving=frozenset(status.get("leaving") or ()),
        counted=frozenset(status.get("counted") or ()),
        crashes=status.get("crashes", 0),
        crashed_at=seconds(status.get("crashedAt")),
        lost=status.get("lost", ""),
        cap=status.get("cap"),
        refusal=_refusal_of(status["refusal"]) if status.get("refusal") else None,
        asked=status.get("asked", 0),
        asked_at=seconds(status.get("askedAt")),
        ended_at=seconds(status["endedAt"]) if status.get("endedAt") else None,
        cause=_cause_of(status),
        why=status.get("reason", ""),
    )


def _refusal_of(refusal: Object) -> Refusal:
    return Refusal(refusal["limit"], seconds(refusal["until"]), refusal["why"], refusal.get("tries", 1))


def _cause_of(status: Object) -> Cause:
    """What the condition of its phase gives as reason."""
    reasons = (one.get("reason") for one in status.get("conditions") or () if one.get("type") == status.get("phase"))
    known = {cause.value: cause for cause in Cause}
    return known.get(next(reasons, ""), Cause.NONE)


def report_of(status: Object) -> WorkerReport | None:
    """What the status of a job says of its training; None if it says nothing."""
    if not status.get("heardAt"):
        return None
    return WorkerReport(
        at=seconds(status["heardAt"]),
        workers=status.get("training"),
        generation=status.get("generation", 0),
        step=status.get("step", 0),
        samples_per_s=status.get("samplesPerSecond"),
        slow=tuple(status.get("slow") or ()),
        checkpoint=status.get("checkpointStep"),
    )
