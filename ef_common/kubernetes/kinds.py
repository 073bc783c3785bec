"""The kinds of objects with which the controller and the commands work."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from ef_common.kubernetes.resource import API_VERSION, KIND, PLURAL


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of objects.

    Args:
        api_version: Group and version.
        kind: Its name.
        plural: The same in addresses.
        namespaced: Its objects are in namespaces.
    """

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None = None, name: str = "", sub: str = "") -> str:
        """Where its objects are, or one of them, or a part of one."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        inside = f"/namespaces/{quote(namespace, safe='')}" if self.namespaced and namespace else ""
        one = "/".join(quote(part, safe="") for part in (name, sub) if part)
        return f"{root}{inside}/{self.plural}{'/' if one else ''}{one}"


JOBS = Kind(API_VERSION, KIND, PLURAL)
PODS = Kind("v1", "Pod", "pods")
NODES = Kind("v1", "Node", "nodes", namespaced=False)
SERVICES = Kind("v1", "Service", "services")
SECRETS = Kind("v1", "Secret", "secrets")
EVENTS = Kind("v1", "Event", "events")
LEASES = Kind("coordination.k8s.io/v1", "Lease", "leases")
POLICIES = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
BUDGETS = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
OLD_BUDGETS = Kind("policy/v1beta1", "PodDisruptionBudget", "poddisruptionbudgets")
"""Before Kubernetes 1.21."""
CLASSES = Kind("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses", namespaced=False)
