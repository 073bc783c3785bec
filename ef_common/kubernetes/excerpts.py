"""What the controller keeps of pods and nodes that are not its own: what its decisions need, and nothing else.

A cluster has many more pods than those of jobs. Each of them takes some 30 kB of memory as a whole, and 2 kB as an
excerpt; and most of what is written to it, as the states of its containers, changes nothing for the jobs. What
:func:`ef_common.kubernetes.reading.nodes_of` and the like read of such a pod or of a node must be in here.
"""

from __future__ import annotations

from typing import Any

from ef_common.kubernetes.reading import Object, job_key_of, request_of
from ef_common.kubernetes.resource import Json

_IDENTITY = ("name", "namespace", "uid", "resourceVersion")


def of_pod(pod: Object) -> Json | None:
    """Where a pod of others is, and what it takes there; None for a pod of a job, of which everything counts.

    Example:
        >>> containers = [{"name": one, "resources": {"requests": {"cpu": "1.5"}}} for one in ("web", "proxy")]
        >>> of_pod({"metadata": {"name": "a", "annotations": {"b": "c"}}, "spec": {"containers": containers}})["spec"]
        {'containers': [{'resources': {'requests': {'cpu': '3000m'}}}]}
    """
    if job_key_of(pod):
        return None
    amounts = {name: f"{amount}m" for name, amount in request_of(pod["spec"]).items() if name != "pods"}
    spec = {**_some(pod["spec"], "nodeName"), "containers": [{"resources": {"requests": amounts}}]}
    status = _some(pod.get("status") or {}, "phase", "nominatedNodeName")
    return {"metadata": _some(pod["metadata"], *_IDENTITY), "spec": spec, "status": status}


def of_node(node: Object) -> Json:
    """What a node has, and who may use it."""
    status = node.get("status") or {}
    conditions = [_some(one, "type", "status") for one in status.get("conditions") or ()]
    return {
        "metadata": _some(node["metadata"], *_IDENTITY, "labels"),
        "spec": node.get("spec") or {},
        "status": {**_some(status, "allocatable"), "conditions": conditions},
    }


def _some(thing: Object, *names: str) -> dict[str, Any]:
    return {name: thing[name] for name in names if name in thing}
