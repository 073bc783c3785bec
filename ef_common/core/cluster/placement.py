"""Where pods are, and where others would fit."""

from __future__ import annotations

from collections.abc import Iterable

from ef_common.core.cluster.state import Job, Node, Pod, Resources

_Left = dict[str, dict[str, int]]


class Room:
    """What is left of the nodes while jobs are given their shares.

    Two things are counted: what is left of a node if only those pods stay that have been kept so far (`kept`), and what
    is left of it besides all pods that are there now (`vacant`), those that are to go included.

    Args:
        nodes: The nodes.
        pods: All pods of all jobs that take room now.
    """

    def __init__(self, nodes: Iterable[Node], pods: Iterable[Pod]) -> None:
        self._kept: _Left = {node.name: dict(node.free) for node in nodes}
        self._vacant: _Left = {name: dict(free) for name, free in self._kept.items()}
        for pod in pods:
            if pod.node in self._vacant:
                _take(self._vacant[pod.node], pod.request)
        self._log: list[tuple[dict[str, int], Resources]] = []

    def among(self, names: Iterable[str]) -> list[str]:
        """Those of these nodes that there are, in an order that is always the same."""
        return sorted(name for name in names if name in self._kept)

    def keep(self, pod: Pod) -> bool:
        """Keep a pod where it is; False if others need the room."""
        left = self._kept.get(pod.node)
        if left is None or not fits(pod.request, left):
            return False
        self._use(left, pod.request)
        return True

    def place(self, request: Resources, nodes: list[str]) -> bool | None:
        """Find room for one more pod, at best where nobody has to go for it.

        Args:
            request: What it needs.
            nodes: Where it may be.

        Returns:
            Whether there is room now; False if others have to go first. None if there is no room.
        """
        for name in nodes:
            if fits(request, self._vacant[name]) and fits(request, self._kept[name]):
                self._use(self._vacant[name], request)
                self._use(self._kept[name], request)
                return True
        for name in nodes:
            if fits(request, self._kept[name]):
                self._use(self._kept[name], request)
                return False
        return None

    def mark(self) -> int:
        """A moment to which one may return."""
        return len(self._log)

    def undo(self, mark: int) -> None:
        """Give back all that was used since then."""
        while len(self._log) > mark:
            left, request = self._log.pop()
            for name, amount in request.items():
                left[name] = left.get(name, 0) + amount

    def _use(self, left: dict[str, int], request: Resources) -> None:
        _take(left, request)
        self._log.append((left, request))


def fits(request: Resources, left: Resources) -> bool:
    """Whether there is enough of all that is needed."""
    return all(left.get(name, 0) >= amount for name, amount in request.items() if amount)


def _take(left: dict[str, int], request: Resources) -> None:
    for name, amount in request.items():
        left[name] = left.get(name, 0) - amount


def could_ever_fit(job: Job, nodes: Iterable[Node]) -> bool:
    """Whether its minimum would fit if it had the cluster for itself."""
    room = Room(nodes, ())
    places = room.among(job.nodes)
    return all(room.place(job.request, places) is not None for _ in range(job.minimum))
