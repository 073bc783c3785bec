"""Views: each generation has one member list, generations only grow, and ranks follow from the list."""

from __future__ import annotations

from ef_common.audit.history import History, View
from ef_common.audit.report import Property, Violation

__all__ = ["check"]

NAME = "views"


def check(history: History) -> Property:
    """Check each view on its own, against its worker's last one, and against the other workers'."""
    agreed: dict[int, View] = {}
    last: dict[str, int] = {}
    for view in history.views:
        first = agreed.setdefault(view.generation, view)
        message = _fault(view) or _against(view, first, last=last.get(view.worker))
        if message:
            return Property.failed(NAME, Violation(message, worker=view.worker))
        last[view.worker] = view.generation
    if not agreed:
        return Property.not_recorded(NAME, "no views recorded")
    return Property(NAME, f"{len(agreed)} generations, growing on {len(last)} workers, one member list each")


def _fault(view: View) -> str:
    where = f"in generation {view.generation}"
    if len(set(view.members)) != len(view.members):
        return f"a member is listed twice {where}: {', '.join(view.members)}"
    if view.worker not in view.members:
        return f"the worker is not a member of its own view {where}: {', '.join(view.members)}"
    if view.members.index(view.worker) != view.rank:
        return f"rank is {view.rank} {where}, but the member list says {view.members.index(view.worker)}"
    if view.world_size != len(view.members):
        return f"world size is {view.world_size} {where}, but there are {len(view.members)} members"
    return ""


def _against(view: View, first: View, *, last: int | None) -> str:
    if last is not None and view.generation <= last:
        return f"generation {view.generation} follows generation {last}"
    if view.members != first.members:
        return (
            f"members of generation {view.generation} are {', '.join(view.members)}, "
            f"but {', '.join(first.members)} on worker {first.worker}"
        )
    return ""
