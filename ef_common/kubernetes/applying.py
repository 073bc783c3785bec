"""Objects of an installation, applied by the server, so that what others have set of them stays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ef_common.kubernetes.kinds import Kind
from ef_common.kubernetes.resource import Json

if TYPE_CHECKING:
    from ef_common.kubernetes.api import Api

_CLUSTERWIDE = ("CustomResourceDefinition", "Namespace", "ClusterRole", "ClusterRoleBinding")


def apply_all(api: Api, things: Iterable[Json]) -> Iterator[str]:
    """Apply them, one after the other; what has been applied, in words."""
    for thing in things:
        kind = thing["kind"]
        where = Kind(thing["apiVersion"], kind, f"{kind.lower()}s", namespaced=kind not in _CLUSTERWIDE)
        api.apply(where, thing)
        yield f"{kind} {thing['metadata']['name']} is applied"
