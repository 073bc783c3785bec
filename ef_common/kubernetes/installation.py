"""What a cluster needs: the resource, the controller, and no more rights for it than it uses."""

from __future__ import annotations

import copy
from typing import Any

from ef_common.core.cluster import SharePolicy
from ef_common.kubernetes.kinds import BUDGETS
from ef_common.kubernetes.resource import (
    CONTROLLER,
    CONTROLLER_LABELS,
    GROUP,
    NAMESPACE_LABEL,
    PLURAL,
    Json,
    definition,
)

NAMESPACE = "elasticflow"
PAGE_PORT = 8080
RESOURCES: Json = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}
"""What a pod of the controller asks for."""
_RBAC = "rbac.authorization.k8s.io/v1"


def manifests(
    *,
    image: str,
    namespace: str = NAMESPACE,
    replicas: int = 2,
    namespaced: bool = False,
    policy: str = SharePolicy.FAIR.value,
) -> list[Json]:
    """All objects, in the order in which they are made.

    Args:
        image: Of the controller; it has `elasticflow-training[kubernetes]`.
        namespace: Where the controller runs.
        replicas: How many controllers there are. One acts, the others take over.
        namespaced: The controller looks at the jobs of its namespace only, and has no rights in others. The namespace
            is there already.
        policy: How it divides pods among the jobs (:class:`~ef_common.core.cluster.SharePolicy`).
    """
    options = [f"--page=0.0.0.0:{PAGE_PORT}", f"--policy={policy}", *(["--namespaced"] if namespaced else [])]
    return [
        definition(),
        *([] if namespaced else [_namespace(namespace)]),
        _thing("v1", "ServiceAccount", CONTROLLER, namespace),
        *_rights(namespace, namespaced),
        _disruption_budget(namespace),
        _deployment(image, namespace, replicas=replicas, options=options),
    ]


def job_rules() -> list[Json]:
    """Rights where jobs are: in the whole cluster, or in one namespace."""
    return [
        _rule(GROUP, [PLURAL], ["get", "list", "watch", "delete"]),  # delete: after ttlSecondsAfterFinished
        _rule(GROUP, [f"{PLURAL}/status"], ["update"]),
        # Owners are set with blockOwnerDeletion, which some clusters allow only to those who may change finalizers.
        _rule(GROUP, [f"{PLURAL}/finalizers"], ["update"]),
        # Pods are patched with the addresses of the others, where no name server tells them.
        _rule("", ["pods"], ["get", "list", "watch", "create", "patch", "delete"]),
        _rule("", ["services", "secrets"], ["create"]),
        _rule("networking.k8s.io", ["networkpolicies"], ["create"]),
        _rule("policy", ["poddisruptionbudgets"], ["create", "patch"]),
        _rule("", ["events"], ["create"]),
    ]


def cluster_rules() -> list[Json]:
    """Rights to look at what is in no namespace."""
    return [
        _rule("", ["nodes"], ["get", "list", "watch"]),
        _rule("scheduling.k8s.io", ["priorityclasses"], ["get", "list", "watch"]),
    ]


def lease_rules() -> list[Json]:
    """Rights in the controller's own namespace."""
    leases = "coordination.k8s.io"
    return [
        _rule(leases, ["leases"], ["create"]),
        _rule(leases, ["leases"], ["get", "update"], names=[CONTROLLER]),
    ]


def user_rules() -> list[Json]:
    """Rights of those who train, which `edit` and `admin` of a namespace have then."""
    verbs = ["get", "list", "watch", "create", "update", "patch", "delete"]
    return [_rule(GROUP, [PLURAL, f"{PLURAL}/scale"], verbs), _rule(GROUP, [f"{PLURAL}/status"], ["get"])]


def _rights(namespace: str, namespaced: bool) -> list[Json]:
    aggregated = {f"rbac.authorization.k8s.io/aggregate-to-{role}": "true" for role in ("admin", "edit")}
    suffix = f"-{namespace}" if namespaced else ""  # there may be such a controller in several namespaces
    everywhere, here = ([], job_rules()) if namespaced else (job_rules(), [])
    return [
        *_granted(CONTROLLER + suffix, None, [*everywhere, *cluster_rules()], namespace),
        *_granted(CONTROLLER, namespace, [*here, *lease_rules()], namespace),
        {**_thing(_RBAC, "ClusterRole", f"elasticflow-user{suffix}", None, aggregated), "rules": user_rules()},
    ]


def _granted(name: str, where: str | None, rules: list[Json], namespace: str) -> list[Json]:
    """A role, and its binding to the account of the controller."""
    role = "Role" if where else "ClusterRole"
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": role, "name": name}
    account = {"kind": "ServiceAccount", "name": CONTROLLER, "namespace": namespace}
    return [
        {**_thing(_RBAC, role, name, where), "rules": rules},
        {**_thing(_RBAC, f"{role}Binding", name, where), "roleRef": reference, "subjects": [account]},
    ]


def _namespace(name: str) -> Json:
    """API servers before 1.21 do not give a namespace its name as a label, by which network policies choose it."""
    return _thing("v1", "Namespace", name, None, {**CONTROLLER_LABELS, NAMESPACE_LABEL: name})


def _disruption_budget(namespace: str) -> Json:
    """Nodes are drained one after the other, so that one controller is always there if there are two."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": CONTROLLER_LABELS}}
    return {**_thing(BUDGETS.api_version, BUDGETS.kind, CONTROLLER, namespace, CONTROLLER_LABELS), "spec": spec}


def _deployment(image: str, namespace: str, *, replicas: int, options: list[str]) -> Json:
    def probe(path: str) -> Json:
        return {"httpGet": {"path": path, "port": PAGE_PORT}, "periodSeconds": 10}

    container = {
        "name": "controller",
        "image": image,
        "command": ["elasticflow", "kubernetes", "controller", *options],
        "ports": [{"name": "metrics", "containerPort": PAGE_PORT}],
        "livenessProbe": probe("/healthz"),
        "readinessProbe": probe("/readyz"),
        "resources": copy.deepcopy(RESOURCES),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "env": [{"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}],
    }
    pod = {
        "serviceAccountName": CONTROLLER,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [_on_different_nodes()]}},
        "containers": [container],
    }
    return {
        **_thing("apps/v1", "Deployment", CONTROLLER, namespace, CONTROLLER_LABELS),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": CONTROLLER_LABELS},
            "template": {"metadata": {"labels": CONTROLLER_LABELS}, "spec": pod},
        },
    }


def _on_different_nodes() -> Json:
    term = {"labelSelector": {"matchLabels": CONTROLLER_LABELS}, "topologyKey": "kubernetes.io/hostname"}
    return {"weight": 100, "podAffinityTerm": term}


def _thing(version: str, kind: str, name: str, namespace: str | None, labels: dict[str, str] | None = None) -> Json:
    meta: Json = {"name": name}
    if namespace:
        meta["namespace"] = namespace
    if labels:
        meta["labels"] = labels
    return {"apiVersion": version, "kind": kind, "metadata": meta}


def _rule(group: str, resources: list[str], verbs: list[str], *, names: list[str] | None = None) -> dict[str, Any]:
    rule: dict[str, Any] = {"apiGroups": [group], "resources": resources, "verbs": verbs}
    return {**rule, "resourceNames": names} if names else rule
