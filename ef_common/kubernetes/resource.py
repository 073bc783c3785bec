"""`ElasticJob`: what a user writes, as a definition for the API server.

Its rules are checked twice: by the API server (CEL, since Kubernetes 1.25), which refuses a wrong job with a sentence,
and by the controller (:func:`problem`), which fails it with the same sentence where the API server is older.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GROUP, VERSION, KIND, PLURAL = "elasticflow.dev", "v1alpha1", "ElasticJob", "elasticjobs"
API_VERSION = f"{GROUP}/{VERSION}"
JOB_LABEL, INDEX_LABEL = f"{GROUP}/job", f"{GROUP}/index"
PORT = 29400
MAX_NAME = 52
"""A pod's name is that of its job and a number, and a label holds 63 characters."""
DEFAULT_BACKOFF_LIMIT = 6

Json = dict[str, Any]

_SIZES = "minWorkers must not be greater than maxWorkers"
_CONTAINER = "template needs a container"
_RESTARTS = "template.spec.restartPolicy must be Never: the controller replaces pods"
_HOST_NETWORK = "template.spec.hostNetwork is not supported: the pods of a job have one port each"
_NAME = f"the name of an ElasticJob has at most {MAX_NAME} characters"


def problem(job: Mapping[str, Any]) -> str:
    """What is wrong with a job; "" for nothing. A job that makes no sense never gets a pod."""
    spec = job.get("spec") or {}
    low, high = spec.get("minWorkers", 1), spec.get("maxWorkers")
    pod = (spec.get("template") or {}).get("spec") or {}
    if len(job["metadata"]["name"]) > MAX_NAME:
        return _NAME
    if not isinstance(high, int) or not isinstance(low, int) or not 1 <= low <= high:
        return f"{_SIZES}. Received: minWorkers={low}, maxWorkers={high}"
    if not pod.get("containers"):
        return _CONTAINER
    if pod.get("restartPolicy", "Never") != "Never":
        return f"{_RESTARTS}. Received: {pod['restartPolicy']}"
    if pod.get("hostNetwork"):
        return _HOST_NETWORK
    return ""


def definition() -> Json:
    """The custom resource definition."""
    root = {
        "type": "object",
        "required": ["spec"],
        "properties": {"metadata": {"type": "object"}, "spec": _spec(), "status": _status()},
        "x-kubernetes-validations": [{"rule": f"size(self.metadata.name) <= {MAX_NAME}", "message": _NAME}],
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
            {"name": "Min", "type": "integer", "jsonPath": ".spec.minWorkers"},
            {"name": "Max", "type": "integer", "jsonPath": ".spec.maxWorkers"},
            {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
            {"name": "Reason", "type": "string", "jsonPath": ".status.reason", "priority": 1},
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
                "Worker pods that it may have now, which `kubectl scale` sets; 0 suspends it. Default: maxWorkers."
            ),
            "nprocPerNode": _string("Workers of a pod: a number, or gpu for one for each GPU.", default="1"),
            "checkpoint": _string("URL of the checkpoints, which all pods reach."),
            "priorityClassName": _string("Priority of the pods, and of the job among those that wait."),
            "suspend": {"type": "boolean", "description": "The job has no pods, and goes on later."},
            "backoffLimit": _integer(
                "The job fails if more pods than this are lost in a row.", default=DEFAULT_BACKOFF_LIMIT
            ),
            "ttlSecondsAfterFinished": _integer("How long the job stays after its end. Default: for ever."),
            "networkPolicy": {
                "type": "boolean",
                "default": True,
                "description": "Only pods of the job reach each other.",
            },
            "template": template,
        },
        "x-kubernetes-validations": [{"rule": "self.minWorkers <= self.maxWorkers", "message": _SIZES}],
    }


def _status() -> Json:
    text, number = {"type": "string"}, {"type": "integer"}
    texts = {"type": "array", "items": text}
    condition = {
        "type": "object",
        "required": ["type", "status"],
        "properties": dict.fromkeys(("type", "status", "reason", "message", "lastTransitionTime"), text),
    }
    refusal = {"type": "object", "properties": {"limit": number, "until": text, "why": text}}
    return {
        "type": "object",
        "properties": {
            "phase": text,
            "reason": text,
            "wanted": number,
            "workers": number,
            "running": number,
            "starts": number,
            "crashes": number,
            "crashedAt": text,
            "lost": text,
            "endedAt": text,
            "leaving": texts,
            "counted": texts,
            "refusal": refusal,
            "selector": text,
            "observedGeneration": {"type": "integer", "format": "int64"},
            "conditions": {
                "type": "array",
                "items": condition,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
        },
    }
