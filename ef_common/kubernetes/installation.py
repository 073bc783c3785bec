"""What a cluster needs: the resource, the controller, and no more rights for it than it uses."""

from __future__ import annotations

from typing import Any

from ef_common.kubernetes.resource import GROUP, PLURAL, Json, definition

NAME = "elasticflow-controller"
NAMESPACE = "elasticflow"
PAGE_PORT = 8080
_LABELS = {"app.kubernetes.io/name": NAME}


def manifests(*, image: str, namespace: str = NAMESPACE, replicas: int = 2) -> list[Json]:
    """All objects, in the order in which they are made.

    Args:
        image: Of the controller; it has `elasticflow-training[kubernetes]`.
        namespace: Where the controller runs.
        replicas: How many controllers there are. One acts, the others take over.
    """
    return [
        definition(),
        _thing("v1", "Namespace", namespace, None, _LABELS),
        _thing("v1", "ServiceAccount", NAME, namespace),
        *_rights(namespace),
        _deployment(image, namespace, replicas),
    ]


def controller_rules() -> list[Json]:
    """Rights in the whole cluster."""
    return [
        _rule(GROUP, [PLURAL], ["get", "list", "watch", "delete"]),  # delete: after ttlSecondsAfterFinished
        _rule(GROUP, [f"{PLURAL}/status"], ["update"]),
        # Owners are set with blockOwnerDeletion, which some clusters allow only to those who may change finalizers.
        _rule(GROUP, [f"{PLURAL}/finalizers"], ["update"]),
        _rule("", ["pods"], ["get", "list", "watch", "create", "delete"]),
        _rule("", ["services", "secrets"], ["create"]),
        _rule("networking.k8s.io", ["networkpolicies"], ["create"]),
        _rule("policy", ["poddisruptionbudgets"], ["create"]),
        _rule("", ["events"], ["create"]),
        _rule("", ["nodes"], ["get", "list", "watch"]),
        _rule("scheduling.k8s.io", ["priorityclasses"], ["get", "list", "watch"]),
    ]


def lease_rules() -> list[Json]:
    """Rights in the controller's own namespace."""
    leases = "coordination.k8s.io"
    return [
        _rule(leases, ["leases"], ["create"]),
        _rule(leases, ["leases"], ["get", "update"], names=[NAME]),
    ]


def user_rules() -> list[Json]:
    """Rights of those who train, which `edit` and `admin` of a namespace have then."""
    verbs = ["get", "list", "watch", "create", "update", "patch", "delete"]
    return [_rule(GROUP, [PLURAL, f"{PLURAL}/scale"], verbs), _rule(GROUP, [f"{PLURAL}/status"], ["get"])]


def _rights(namespace: str) -> list[Json]:
    rbac = "rbac.authorization.k8s.io/v1"
    aggregated = {f"rbac.authorization.k8s.io/aggregate-to-{role}": "true" for role in ("admin", "edit")}
    account = [{"kind": "ServiceAccount", "name": NAME, "namespace": namespace}]

    def binding(kind: str, role: str, where: str | None) -> Json:
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": role, "name": NAME}
        return {**_thing(rbac, kind, NAME, where), "roleRef": reference, "subjects": account}

    return [
        {**_thing(rbac, "ClusterRole", NAME, None), "rules": controller_rules()},
        binding("ClusterRoleBinding", "ClusterRole", None),
        {**_thing(rbac, "Role", NAME, namespace), "rules": lease_rules()},
        binding("RoleBinding", "Role", namespace),
        {**_thing(rbac, "ClusterRole", "elasticflow-user", None, aggregated), "rules": user_rules()},
    ]


def _deployment(image: str, namespace: str, replicas: int) -> Json:
    def probe(path: str) -> Json:
        return {"httpGet": {"path": path, "port": PAGE_PORT}, "periodSeconds": 10}

    container = {
        "name": "controller",
        "image": image,
        "command": ["elasticflow", "kubernetes", "controller", f"--page=0.0.0.0:{PAGE_PORT}"],
        "ports": [{"name": "metrics", "containerPort": PAGE_PORT}],
        "livenessProbe": probe("/healthz"),
        "readinessProbe": probe("/readyz"),
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "env": [{"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}],
    }
    pod = {
        "serviceAccountName": NAME,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
    }
    return {
        **_thing("apps/v1", "Deployment", NAME, namespace, _LABELS),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": _LABELS},
            "template": {"metadata": {"labels": _LABELS}, "spec": pod},
        },
    }


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
