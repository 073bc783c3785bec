"""What the controller has decided, as the status of a job and as the objects of its pods."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ef_common.core.cluster import Cause, Decision, Job, JobPhase, WorkerReport
from ef_common.core.door_list import DoorList
from ef_common.kubernetes.reading import METRICS_VARIABLE, Object, time_of
from ef_common.kubernetes.resource import (
    API_VERSION,
    CONTROLLER_LABELS,
    DOORS_ANNOTATION,
    DOORS_VOLUME,
    INDEX_LABEL,
    JOB_LABEL,
    KIND,
    METRICS_PORT,
    NAMESPACE_LABEL,
    PORT,
    UID_LABEL,
    Json,
    autoscale_text,
)

TOKEN_KEY = "token"
_DRAIN_S = 60
"""Grace of a pod whose template says nothing: a step, and what a checkpoint takes."""
_KEPT_CHANGES = 5
_JOINING, _LEAVING = "PodsJoining", "PodsLeaving"
"""Reasons of `Resizing` that only the workers know."""
_DOORS_FOLDER, _DOORS_FILE = "/run/elasticflow-doors", "doors"
_TOLERATION_S = 30
"""How long a pod stays on a node that does not answer. The others of the job go on without it."""


def status_of(thing: Object, job: Job, decision: Decision, *, now: float, told: WorkerReport | None = None) -> Json:
    """The status of a job after a decision.

    Args:
        thing: The job, as the API server has it.
        job: The same, as it was decided upon.
        decision: What was decided.
        now: Time in seconds.
        told: What it says of the training; None for nothing.
    """
    record = decision.record
    alive = [pod for pod in job.pods if pod.alive and pod.uid not in record.leaving]
    wanted = decision.wanted - decision.spares
    spares = min(decision.spares, max(0, len(alive) - wanted))
    status: Json = {
        "phase": record.phase.value,
        "wanted": wanted,
        "workers": len(alive) - spares,
        "running": sum(pod.running for pod in alive),
        "starts": record.starts,
        "crashes": record.crashes,
        "leaving": sorted(record.leaving),
        "counted": sorted(record.counted),
        "selector": f"{JOB_LABEL}={thing['metadata']['name']}",
        "observedGeneration": thing["metadata"].get("generation", 0),
    }
    # Without empty texts: API servers up to 1.20 take them for null, which is no text.
    status.update({name: text for name, text in (("reason", record.why), ("lost", record.lost)) if text})
    if spares:
        status["spares"] = spares
    status.update(_training(told, has_pods=bool(alive)))
    if changes := _changes((thing.get("status") or {}).get("changes") or (), status):
        status["changes"] = changes
    if record.cap is not None:
        status["cap"] = record.cap
    if record.asked:
        status["asked"] = record.asked
    if record.asked_at:
        status["askedAt"] = time_of(record.asked_at)
    if record.crashed_at:
        status["crashedAt"] = time_of(record.crashed_at)
    if record.ended_at is not None:
        status["endedAt"] = time_of(record.ended_at)
    if record.refusal is not None:
        refusal = record.refusal
        until = time_of(refusal.until)
        status["refusal"] = {"limit": refusal.limit, "until": until, "why": refusal.why, "tries": refusal.tries}
    before = (thing.get("status") or {}).get("conditions") or ()
    training = None if job.report is None or told is None or told.workers is None else job.report.nodes
    resizing = _resizing(decision, status["running"], training, _said_by_workers(told, before))
    facts = [*_phases(status, record.cause), resizing]
    status["conditions"] = _conditions(before, facts, now)
    return status


def _training(told: WorkerReport | None, *, has_pods: bool) -> Json:
    """What a worker has said; where there are no pods, nobody trains."""
    if told is None:
        return {}
    workers, speed = (told.workers, told.samples_per_s) if has_pods else (0, None)
    said: Json = {"generation": told.generation, "step": told.step, "heardAt": time_of(told.at)}
    slow = {"slow": [*told.slow]} if told.slow else {}
    return {**said, **slow, **_known(training=workers, samplesPerSecond=speed, checkpointStep=told.checkpoint)}


def _changes(before: Sequence[Json], status: Json) -> list[Json]:
    """The last changes of the workers that train, oldest first. Several since the last answer are one."""
    seen: Json = {name: status[name] for name in ("generation", "step", "training") if name in status}
    changes = [*before]
    if "training" in seen and _who_trains(seen) != _who_trains(changes[-1] if changes else {}):
        changes.append({"time": status["heardAt"], **seen})
    return changes[-_KEPT_CHANGES:]


def _who_trains(change: Json) -> tuple[object, object]:
    return change.get("generation"), change.get("training")


def _known(**values: float | None) -> Json:
    return {name: value for name, value in values.items() if value is not None}


def _phases(status: Json, cause: Cause) -> list[Json]:
    """One condition for each phase, for those who wait for it as `kubectl wait --for=condition=Succeeded` does."""
    phase = status["phase"]
    facts = [{"type": one.value, "status": str(one.value == phase), "reason": phase} for one in JobPhase]
    why = {"reason": cause.value or phase, **({"message": status["reason"]} if "reason" in status else {})}
    return [{**fact, **why} if fact["type"] == phase else fact for fact in facts]


def change_text(change: Json) -> str:
    """A change of the workers that train, in words."""
    return f"workers that train: {change['training']} (view {change['generation']}, step {change['step']})"


def _resizing(decision: Decision, running: int, training: int | None, before: Json | None) -> Json:
    """Whether a job that trains has fewer running pods than it shall have, or does not train in as many.

    Args:
        decision: What was decided.
        running: Pods that run.
        training: Pods that train; None if that is not known.
        before: What was said before, and counts if it is not known how many train; None for nothing.
    """
    phase, wanted = decision.record.phase, decision.wanted - decision.spares
    if phase is JobPhase.RUNNING and running < decision.wanted:
        return _resizes("PodsStarting", f"{running} of {decision.wanted} pods run")
    if phase is JobPhase.RUNNING and training is None and before is not None:
        return {name: value for name, value in before.items() if name != "lastTransitionTime"}
    if phase is JobPhase.RUNNING and training is not None and training != wanted:
        if training < wanted:
            return _resizes(_JOINING, f"{training} of {wanted} pods train")
        return _resizes(_LEAVING, f"{training} pods train, and {wanted} are wanted")
    reason = "PodsAsWanted" if phase is JobPhase.RUNNING else phase.value
    return {"type": "Resizing", "status": "False", "reason": reason}


def _said_by_workers(told: WorkerReport | None, before: Sequence[Json]) -> Json | None:
    """What they have told another controller of a change that is under way, unless nobody has heard of them lately."""
    is_known = told is not None and told.workers is not None
    return next((one for one in before if is_known and one.get("reason") in (_JOINING, _LEAVING)), None)


def _resizes(reason: str, message: str) -> Json:
    return {"type": "Resizing", "status": "True", "reason": reason, "message": message}


def _conditions(before: Any, facts: list[Json], now: float) -> list[Json]:
    """The facts, with the time since when each of them has been so."""
    old = {condition["type"]: condition for condition in before}
    made = []
    for fact in facts:
        same = old.get(fact["type"], {}).get("status") == fact["status"]
        since = old[fact["type"]]["lastTransitionTime"] if same else time_of(now)
        made.append({**fact, "lastTransitionTime": since})
    return made


# ------------------------------------------------------------ what a job consists of


def _metadata(job: Object, name: str, **labels: str) -> Json:
    meta = job["metadata"]
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": meta["name"], "uid": meta["uid"], "controller": True}
    return {
        "name": name,
        "namespace": meta["namespace"],
        "labels": {JOB_LABEL: meta["name"], **labels},
        "ownerReferences": [{**owner, "blockOwnerDeletion": True}],
    }


def own_name(job: Object) -> str:
    """Name of what belongs to a job.

    What belonged to a deleted job of the same name stays for a while. A new job that took it for its own would lose it.
    """
    meta = job["metadata"]
    return f"{meta['name']}-{meta['uid'][:8]}"


def _own_pods(job: Object) -> dict[str, str]:
    return {JOB_LABEL: job["metadata"]["name"], UID_LABEL: job["metadata"]["uid"]}


def service_of(job: Object) -> Json:
    """The name under which its pods find each other, also before they are ready."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _own_pods(job),
        "ports": [{"name": "elasticflow", "port": PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(job, own_name(job)), "spec": spec}


def secret_of(job: Object) -> Json:
    """The token of its pods."""
    meta = _metadata(job, own_name(job))
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": meta,
        "type": "Opaque",
        "immutable": True,
        "stringData": {TOKEN_KEY: secrets.token_hex(16)},
    }


def network_policy_of(job: Object, controllers: str) -> Json:
    """Nobody but its pods reaches its pods; the controller reaches their metrics.

    Args:
        job: The job.
        controllers: Namespace of the controller.
    """
    ours = {"matchLabels": _own_pods(job)}
    theirs = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: controllers}},
        "podSelector": {"matchLabels": CONTROLLER_LABELS},
    }
    metrics = {"from": [theirs], "ports": [{"protocol": "TCP", "port": METRICS_PORT}]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(job, own_name(job)),
        "spec": {
            "podSelector": ours,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": ours}]}, metrics],
        },
    }


def disruption_budget_of(job: Object, api_version: str) -> Json | None:
    """Draining a node leaves the job its minimum; None if that would never let a node be drained, or is not wanted.

    Args:
        job: The job.
        api_version: The version of the resource that the API server has.
    """
    spec = job["spec"]
    low = spec.get("minWorkers", 1)
    if not spec.get("disruptionBudget", True) or low >= spec["maxWorkers"]:
        return None
    return {
        "apiVersion": api_version,
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(job, own_name(job)),
        "spec": {"minAvailable": low, "selector": {"matchLabels": _own_pods(job)}},
    }


def pod_name(job: str, index: int) -> str:
    """Name of a pod."""
    return f"{job}-{index}"


def pod_of(job: Object, index: int, doors: DoorList | None = None) -> Json:
    """A worker pod: the template, and what the pod must know to find the others.

    Args:
        job: Its job.
        index: Its number.
        doors: Addresses of others; None for nobody's.
    """
    spec = job["spec"]
    template = copy.deepcopy(spec["template"])
    pod = template["spec"]
    pod["restartPolicy"] = "Never"
    pod.setdefault("terminationGracePeriodSeconds", _DRAIN_S)
    pod.setdefault("automountServiceAccountToken", False)
    if spec.get("priorityClassName"):
        pod["priorityClassName"] = spec["priorityClassName"]
    pod["tolerations"] = [*(pod.get("tolerations") or ()), *_missing_tolerations(pod.get("tolerations") or ())]
    container = pod["containers"][0]
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    container["env"] = _merged(container.get("env") or [], _variables(job))
    _mount_doors(pod)
    labels = {INDEX_LABEL: str(index), UID_LABEL: job["metadata"]["uid"]}
    meta = _metadata(job, pod_name(job["metadata"]["name"], index), **labels)
    given = template.get("metadata") or {}
    meta["labels"] = {**(given.get("labels") or {}), **meta["labels"]}
    text = "" if doors is None else doors.text()
    annotations = {**(given.get("annotations") or {}), **({DOORS_ANNOTATION: text} if text else {})}
    if annotations:
        meta["annotations"] = annotations
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod}


def doors_patch(pod: Object, doors: DoorList) -> Json:
    """What changes in a pod that is told addresses of others, if it is still as it was read."""
    version = pod["metadata"]["resourceVersion"]
    return {"metadata": {"resourceVersion": version, "annotations": {DOORS_ANNOTATION: doors.text()}}}


def _mount_doors(pod: Json) -> None:
    """Let the container that trains have a file of the annotation, which the kubelet writes anew when it changes."""
    field = {"fieldPath": f"metadata.annotations['{DOORS_ANNOTATION}']"}
    volume = {"name": DOORS_VOLUME, "downwardAPI": {"items": [{"path": _DOORS_FILE, "fieldRef": field}]}}
    mount = {"name": DOORS_VOLUME, "mountPath": _DOORS_FOLDER, "readOnly": True}
    pod["volumes"] = [*(pod.get("volumes") or ()), volume]
    container = pod["containers"][0]
    container["volumeMounts"] = [*(container.get("volumeMounts") or ()), mount]


def _missing_tolerations(given: Any) -> list[Json]:
    """The API server lets pods stay for five minutes on a node that is lost, unless they say otherwise."""
    keys = [f"node.kubernetes.io/{what}" for what in ("not-ready", "unreachable")]
    there = {toleration.get("key") for toleration in given}
    common = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _TOLERATION_S}
    return [{"key": key, **common} for key in keys if key not in there]


def _variables(job: Object) -> list[Json]:
    meta, spec = job["metadata"], job["spec"]
    low, high = spec.get("minWorkers", 1), spec["maxWorkers"]
    token = {"name": own_name(job), "key": TOKEN_KEY}
    variables: list[Json] = [
        {"name": "ELASTICFLOW_TOKEN", "valueFrom": {"secretKeyRef": token}},
        {"name": "PET_LOCAL_ADDR", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "PET_NNODES", "value": f"{low}:{high}"},
        {"name": "PET_NPROC_PER_NODE", "value": spec.get("nprocPerNode", "1")},
        {"name": "PET_RDZV_CONF", "value": f"is_group=1,doors_file={_DOORS_FOLDER}/{_DOORS_FILE}"},
        {"name": "PET_RDZV_ENDPOINT", "value": f"{own_name(job)}.{meta['namespace']}.svc:{PORT}"},
        {"name": METRICS_VARIABLE, "value": str(METRICS_PORT)},
    ]
    if text := autoscale_text(spec):
        variables.append({"name": "ELASTICFLOW_AUTOSCALE", "value": text})
        variables.append({"name": "ELASTICFLOW_CONTROLLER", "value": "1"})
    if spec.get("checkpoint"):
        variables.append({"name": "ELASTICFLOW_CHECKPOINT", "value": spec["checkpoint"]})
    return variables


def _merged(given: list[Json], ours: list[Json]) -> list[Json]:
    """The user's variables, and ours that the user has not set; of the rendezvous, both."""
    texts: Mapping[str, Json] = {variable["name"]: variable for variable in given}
    made = list(given)
    for variable in ours:
        name = variable["name"]
        if name == "PET_RDZV_CONF" and "value" in texts.get(name, {}):
            made[made.index(texts[name])] = {"name": name, "value": f"{texts[name]['value']},{variable['value']}"}
        elif name not in texts:
            made.append(variable)
    return made
