"""Objects of an installation, applied by the server, so that what others have set of them stays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ef_common.errors import ClusterFailed, ClusterNotFound
from ef_common.kubernetes.kinds import BUDGETS, OLD_BUDGETS, Kind
from ef_common.kubernetes.resource import Json

if TYPE_CHECKING:
    from ef_common.kubernetes.api import Api

_CLUSTERWIDE = ("CustomResourceDefinition", "Namespace", "ClusterRole", "ClusterRoleBinding")
_RULES = "x-kubernetes-validations"


def apply_all(api: Api, things: Iterable[Json]) -> Iterator[str]:
    """Apply them, one after the other; what has been applied, in words."""
    for thing in things:
        kind = thing["kind"]
        where = Kind(thing["apiVersion"], kind, f"{kind.lower()}s", namespaced=kind not in _CLUSTERWIDE)
        try:
            _apply(api, where, thing)
        except ClusterFailed as error:
            if _RULES not in str(error):
                raise
            api.apply(where, without_rules(thing))
            yield f"this API server is older than its rules ({_RULES}): the controller alone checks jobs"
        yield f"{kind} {thing['metadata']['name']} is applied"


def _apply(api: Api, kind: Kind, thing: Json) -> None:
    try:
        api.apply(kind, thing)
    except ClusterNotFound:
        if kind != BUDGETS:
            raise
        api.apply(OLD_BUDGETS, {**thing, "apiVersion": OLD_BUDGETS.api_version})


def without_rules(thing: Any) -> Any:
    """A definition without rules between its fields, which Kubernetes has since 1.25."""
    if isinstance(thing, dict):
        return {name: without_rules(one) for name, one in thing.items() if name != _RULES}
    return [without_rules(one) for one in thing] if isinstance(thing, list) else thing
