"""`ElasticJob`: what a user writes, as a definition for the API server.

Its rules are checked twice: by the API server (CEL, since Kubernetes 1.25), which refuses a wrong job with a sentence,
and by the controller (:func:`problem`), which fails it with the same sentence where the API server is older.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ef_common.core.autoscale import Autoscale
from ef_common.errors import UsageError

GROUP, VERSION, KIND, PLURAL = "elasticflow.dev", "v1alpha1", "ElasticJob", "elasticjobs"
API_VERSION = f"{GROUP}/{VERSION}"
JOB_LABEL, INDEX_LABEL, UID_LABEL = f"{GROUP}/job", f"{GROUP}/index", f"{GROUP}/job-uid"
PORT, METRICS_PORT = 29400, 29401
DOORS_ANNOTATION = f"{GROUP}/doors"
"""Where a pod has the addresses of others of its job, of which its kubelet makes a file."""
DOORS_VOLUME = "elasticflow-doors"
"""The volume with that file. Only the container that trains has it, so it is known among those of the pod by it."""
MAX_NAME = 52
"""A pod's name is that of its job and a number, and a label holds 63 characters."""
NAME_FORM = f"[a-z0-9]([a-z0-9-]{{0,{MAX_NAME - 2}}}[a-z0-9])?"
"""What a service may be named after, for Python and for CEL. Older API servers refuse one that begins with a digit."""
DEFAULT_BACKOFF_LIMIT = 6
UNLIMITED = 2**31 - 1
"""The default of `workers`: the largest number that the field holds, which no `maxWorkers` exceeds.

A default has to be a constant, and autoscalers cannot read `/scale` of a job that has no value.
"""
CONTROLLER = "elasticflow-controller"
"""Name of the controller, of its lease, and of what is installed for it."""
CONTROLLER_LABELS = {"app.kubernetes.io/name": CONTROLLER}
"""Labels of the controller's pods, by which network policies let it read the metrics of workers."""
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""The label with which each namespace has its name."""

Json = dict[str, Any]

_SIZES = "minWorkers must not be greater than maxWorkers"
_CONTAINER = "template needs a container"
_RESTARTS = "template.spec.restartPolicy must be Never: the controller replaces pods"
_HOST_NETWORK = "template.spec.hostNetwork is not supported: the pods of a job have one port each"
_WORKERS = "nprocPerNode must be a number from 1 on, or gpu, cpu or auto"
_CHECKPOINT = "checkpoint must be a URL, such as s3://bucket/run, or an absolute path"
_SUSPENDED = (
    "minWorkers, maxWorkers, autoscale, template, nprocPerNode and checkpoint can be changed only while the job is "
    "suspended and its phase is Suspended: its pods would differ. workers, which kubectl scale sets, can be changed at "
    "any time"
)
_WORKERS_FORM, _CHECKPOINT_FORM = "gpu|cpu|auto|[1-9][0-9]*", "/|[a-z][a-z0-9+.-]*:(:|//)."
"""Regular expressions for Python and for CEL: of the whole text, and of its beginning."""
_GOALS = "autoscale with policy cost needs exactly one of valuePerHour, deadlineSeconds and budget"
_PRICE = "autoscale with valuePerHour or budget needs pricePerWorkerHour, in the same unit"
_ONLY_COST = "autoscale has a price, a value, a deadline or a budget only with policy cost"
_BATCH = "autoscale with minGlobalBatchSize needs a maxGlobalBatchSize that is not smaller"
_NAME = (
    f"the name of an ElasticJob has at most {MAX_NAME} small letters, digits and hyphens, of which none is at its ends"
)


def problem(job: Mapping[str, Any]) -> str:
    """What is wrong with a job; "" for nothing. A job that makes no sense never gets a pod."""
    spec = job.get("spec") or {}
    low, high = spec.get("minWorkers", 1), spec.get("maxWorkers")
    pod = (spec.get("template") or {}).get("spec") or {}
    if not re.fullmatch(NAME_FORM, job["metadata"]["name"]):
        return _NAME
    if not isinstance(high, int) or not isinstance(low, int) or not 1 <= low <= high:
        return f"{_SIZES}. Received: minWorkers={low}, maxWorkers={high}"
    if not pod.get("containers"):
        return _CONTAINER
    if pod.get("restartPolicy", "Never") != "Never":
        return f"{_RESTARTS}. Received: {pod['restartPolicy']}"
    if pod.get("hostNetwork"):
        return _HOST_NETWORK
    workers, checkpoint = spec.get("nprocPerNode", "1"), spec.get("checkpoint", "")
    if not isinstance(workers, str) or not re.fullmatch(_WORKERS_FORM, workers):
        return f"{_WORKERS}. Received: {workers}"
    if not isinstance(checkpoint, str) or (checkpoint and not re.match(_CHECKPOINT_FORM, checkpoint)):
        return f"{_CHECKPOINT}. Received: {checkpoint}"
    return _problem_of_autoscale(spec.get("autoscale"))


def _problem_of_autoscale(given: Mapping[str, Any] | None) -> str:
    if given is None:
        return ""
    goals = [name for name in ("valuePerHour", "deadlineSeconds", "budget") if name in given]
    if given.get("policy") != "cost":
        if goals or "pricePerWorkerHour" in given:
            return _ONLY_COST
    elif len(goals) != 1:
        return _GOALS
    elif goals != ["deadlineSeconds"] and "pricePerWorkerHour" not in given:
        return _PRICE
    if given.get("minGlobalBatchSize", 0) > given.get("maxGlobalBatchSize", 0):
        return _BATCH
    try:
        autoscale_text({"maxWorkers": 1, "autoscale": given})
    except (TypeError, UsageError) as error:
        return str(error)
    return ""


def autoscale_text(spec: Mapping[str, Any]) -> str:
    """How a job chooses its size, as `elasticflow run --autoscale` has it; "" if it does not.

    Raises:
        UsageError: A setting is wrong.

    Example:
        >>> autoscale_text({"minWorkers": 2, "maxWorkers": 8, "autoscale": {"everySteps": 50}})
        'min=2,max=8,policy=throughput,every_steps=50'
    """
    given = spec.get("autoscale")
    if given is None:
        return ""
    settings = {"min": spec.get("minWorkers", 1), "max": spec["maxWorkers"], "policy": "throughput"}
    settings.update({_SETTINGS[name]: value for name, value in given.items() if name in _SETTINGS})
    text = ",".join(f"{name}={value}" for name, value in settings.items())
    Autoscale.of(text)
    return text


def autoscale_in(text: str) -> Json:
    """The same the other way round: the settings of `--autoscale`, as a job has them.

    Raises:
        UsageError: They are wrong, or name limits.

    Example:
        >>> autoscale_in("policy=cost,price_per_worker_hour=2.5,budget=100")
        {'policy': 'cost', 'pricePerWorkerHour': 2.5, 'budget': 100}
    """
    settings = Autoscale.of(text)
    given = {part.partition("=")[0].strip() for part in text.split(",")}
    if given & {"min", "max"}:
        raise UsageError(
            f"a job in a cluster chooses its size between those of --workers. Received: --autoscale={text}"
        )
    return {name: getattr(settings, setting) for name, setting in _SETTINGS.items() if setting in given}


_SETTINGS = {
    "policy": "policy",
    "threshold": "threshold",
    "everySteps": "every_steps",
    "retrySeconds": "retry_s",
    "pricePerWorkerHour": "price_per_worker_hour",
    "valuePerHour": "value_per_hour",
    "deadlineSeconds": "deadline_s",
    "budget": "budget",
    "minGlobalBatchSize": "min_global_batch_size",
    "maxGlobalBatchSize": "max_global_batch_size",
}
"""Settings of :class:`~ef_common.core.autoscale.Autoscale`, by their names in a job."""


def definition() -> Json:
    """The custom resource definition."""
    root = {
        "type": "object",
        "required": ["spec"],
        "properties": {"metadata": {"type": "object"}, "spec": _spec(), "status": _status()},
        "x-kubernetes-validations": [
            {"rule": f"self.metadata.name.matches('^{NAME_FORM}$')", "message": _NAME},
            {"rule": _may_change(), "message": _SUSPENDED},
        ],
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": root},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.workers",
                "statusReplicasPath": ".status.workers",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": "Phase", "type": "string", "jsonPath": ".status.phase"},
            {"name": "Wanted", "type": "integer", "jsonPath": ".status.wanted"},
            {"name": "Running", "type": "integer", "jsonPath": ".status.running"},
            {"name": "Training", "type": "integer", "jsonPath": ".status.training"},
            {"name": "Step", "type": "integer", "jsonPath": ".status.step"},
            {"name": "Samples/s", "type": "number", "jsonPath": ".status.samplesPerSecond"},
            {"name": "Min", "type": "integer", "jsonPath": ".spec.minWorkers"},
            {"name": "Max", "type": "integer", "jsonPath": ".spec.maxWorkers"},
            {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
            {"name": "Reason", "type": "string", "jsonPath": ".status.reason"},
            {"name": "Spares", "type": "integer", "jsonPath": ".status.spares", "priority": 1},
            {"name": "View", "type": "integer", "jsonPath": ".status.generation", "priority": 1},
            {"name": "Checkpoint", "type": "integer", "jsonPath": ".status.checkpointStep", "priority": 1},
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["ej"],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }


def _may_change() -> str:
    """The rule that all pods are made alike. What a template holds, this compares, though rules cannot see into it."""
    always = ("minWorkers", "maxWorkers", "nprocPerNode", "template")
    same = [f"self.spec.{name} == oldSelf.spec.{name}" for name in always]
    checkpoint = "(has({0}.spec.checkpoint) ? {0}.spec.checkpoint : '')"
    same.append(f"{checkpoint.format('self')} == {checkpoint.format('oldSelf')}")
    same.append("has(self.spec.autoscale) == has(oldSelf.spec.autoscale)")
    same.append("(!has(self.spec.autoscale) || self.spec.autoscale == oldSelf.spec.autoscale)")
    has_phase = "has(oldSelf.status) && has(oldSelf.status.phase)"
    return f"{has_phase} && oldSelf.status.phase == 'Suspended' || {' && '.join(same)}"


def _integer(text: str, *, minimum: int = 0, **more: Any) -> Json:
    return {"type": "integer", "format": "int32", "minimum": minimum, "description": text, **more}


def _string(text: str, **more: Any) -> Json:
    return {"type": "string", "description": text, **more}


def _spec() -> Json:
    # What a template holds is for the API server to check when a pod is made of it. The rules look into a part of it
    # that they can see, which the rest of it does not have to be spelled out for.
    pod = {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
        "required": ["containers"],
        "properties": {
            "containers": {
                "type": "array",
                "minItems": 1,
                "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            },
            "restartPolicy": {"type": "string"},
            "hostNetwork": {"type": "boolean"},
        },
        "x-kubernetes-validations": [
            {"rule": "!has(self.restartPolicy) || self.restartPolicy == 'Never'", "message": _RESTARTS},
            {"rule": "!has(self.hostNetwork) || !self.hostNetwork", "message": _HOST_NETWORK},
        ],
    }
    template = {
        "type": "object",
        "required": ["spec"],
        "description": "What a worker pod is made of. Its first container runs `elasticflow run SCRIPT`.",
        "properties": {
            "metadata": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            "spec": pod,
        },
    }
    return {
        "type": "object",
        "required": ["maxWorkers", "template"],
        "properties": {
            "minWorkers": _integer("Worker pods, without which the training waits.", minimum=1, default=1),
            "maxWorkers": _integer("Worker pods, of which the training has no more.", minimum=1),
            "workers": _integer(
                "Worker pods that it may have now, which `kubectl scale` and autoscalers set; 0 suspends it. More than "
                "maxWorkers count as maxWorkers.",
                default=UNLIMITED,
            ),
            "spares": _integer("Worker pods beyond those that train, which wait in case one is lost.", default=0),
            "nprocPerNode": _string("Workers of a pod: a number, or gpu for one for each GPU.", default="1"),
            "checkpoint": _string("URL of the checkpoints, which all pods reach."),
            "priorityClassName": _string("Priority of the pods, and of the job among those that wait."),
            "autoscale": _autoscale(),
            "suspend": {"type": "boolean", "description": "The job has no pods, and goes on later."},
            "backoffLimit": _integer(
                "The job fails if pods are lost more often than this in a row.", default=DEFAULT_BACKOFF_LIMIT
            ),
            "ttlSecondsAfterFinished": _integer("How long the job stays after its end. Default: for ever."),
            "networkPolicy": {
                "type": "boolean",
                "default": True,
                "description": "Only pods of the job reach its pods; the controller reaches only their metrics. "
                "A later change has no effect.",
            },
            "disruptionBudget": {
                "type": "boolean",
                "default": True,
                "description": "Draining a node waits as long as it would leave fewer than minWorkers pods.",
            },
            "template": template,
        },
        "x-kubernetes-validations": [
            {"rule": "self.minWorkers <= self.maxWorkers", "message": _SIZES},
            {"rule": f"self.nprocPerNode.matches('^({_WORKERS_FORM})$')", "message": _WORKERS},
            {
                "rule": "!has(self.checkpoint) || self.checkpoint == '' || "
                f"self.checkpoint.matches('^({_CHECKPOINT_FORM})')",
                "message": _CHECKPOINT,
            },
        ],
    }


def _autoscale() -> Json:
    policies = {"default": "throughput", "enum": ["throughput", "cost", "goodput"]}
    share = {"type": "number", "minimum": 0, "maximum": 1}
    has = {name: f"has(self.{name})" for name in _SETTINGS}
    goals = [has[name] for name in ("valuePerHour", "deadlineSeconds", "budget")]
    number_of_goals = " + ".join(f"({one} ? 1 : 0)" for one in goals)
    is_cost, any_goal = "self.policy == 'cost'", " || ".join([*goals, has["pricePerWorkerHour"]])
    sizes = f"{has['maxGlobalBatchSize']} && self.minGlobalBatchSize <= self.maxGlobalBatchSize"
    rules = [
        (f"{is_cost} || !({any_goal})", _ONLY_COST),
        (f"!({is_cost}) || {number_of_goals} == 1", _GOALS),
        (f"!({goals[0]} || {goals[2]}) || {has['pricePerWorkerHour']}", _PRICE),
        (f"!{has['minGlobalBatchSize']} || ({sizes})", _BATCH),
    ]
    return {
        "type": "object",
        "description": "The training chooses how many worker pods it has, from minWorkers to maxWorkers.",
        "properties": {
            "policy": _string("What it weighs: throughput, cost, or goodput.", **policies),
            "threshold": {
                **share,
                "description": "What one more worker must add, as a share of what a present one adds.",
            },
            "everySteps": _integer("Number of steps over which a size is measured.", minimum=10),
            "retrySeconds": _amount("A size that was not worth it is tried again after this time."),
            "pricePerWorkerHour": _amount("What a worker costs in an hour."),
            "valuePerHour": _amount("What it is worth to end an hour earlier.", or_none=True),
            "deadlineSeconds": _amount("When the run should end, in seconds after its start."),
            "budget": _amount("What the run may cost."),
            "minGlobalBatchSize": _integer("The smallest batch that goodput asks for, in samples.", minimum=1),
            "maxGlobalBatchSize": _integer("The largest batch of all workers together, in samples.", minimum=1),
        },
        "x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in rules],
    }


def _amount(text: str, *, or_none: bool = False) -> Json:
    # The API server drops what is false, so a definition that said that would change with each `kubectl apply`.
    positive = {} if or_none else {"exclusiveMinimum": True}
    return {"type": "number", "minimum": 0, **positive, "description": text}


def _status() -> Json:
    text, number = {"type": "string"}, {"type": "integer"}
    texts = {"type": "array", "items": text}
    condition = {
        "type": "object",
        "required": ["type", "status"],
        "properties": dict.fromkeys(("type", "status", "reason", "message", "lastTransitionTime"), text),
    }
    refusal = {"type": "object", "properties": {"limit": number, "until": text, "why": text, "tries": number}}
    long = {"type": "integer", "format": "int64"}
    change = {"type": "object", "properties": {"time": text, "training": number, "generation": long, "step": long}}
    return {
        "type": "object",
        "properties": {
            "phase": text,
            "reason": text,
            "wanted": number,
            "workers": number,
            "running": number,
            "spares": {**number, "description": "Pods that are there beyond those that are to train."},
            "training": {**number, "description": "Workers that train, as one of them says."},
            "generation": {**long, "description": "Number of their view."},
            "step": {**long, "description": "Updates of the training."},
            "samplesPerSecond": {
                "type": "number",
                "description": "Samples per second of all workers together, lately.",
            },
            "checkpointStep": {**long, "description": "Updates of the training in the newest checkpoint."},
            "heardAt": {**text, "description": "When the worker that says this was asked."},
            "slow": {**texts, "description": "Addresses of pods with a worker that is slower than the others."},
            "changes": {
                "type": "array",
                "items": change,
                "description": "The last changes of the workers that train, oldest first.",
            },
            "asked": {**number, "description": "Worker pods for which the training asks, if it chooses its size."},
            "askedAt": text,
            "starts": number,
            "crashes": number,
            "crashedAt": text,
            "lost": text,
            "cap": {**number, "description": "At most so many pods, while those that are lost are not replaced."},
            "endedAt": text,
            "leaving": texts,
            "counted": texts,
            "refusal": refusal,
            "selector": text,
            "observedGeneration": long,
            "conditions": {
                "type": "array",
                "items": condition,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
        },
    }
