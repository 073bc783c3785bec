"""Where pods are, and where others would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ef_common.core.cluster.state import Job, Node, Pod, Resources

_Left = dict[str, dict[str, int]]


class FreeCapacity:
    """What is left of the nodes while jobs are given their shares.

    Three things are counted: what is left of a node besides the pods that have been kept so far (`kept`), besides all
    pods that may be kept (`calm`), and besides all pods that are there now, those that are to go included (`vacant`).

    A pod that is on a node has its room there, whatever else is said of the node: if it gets no more pods, if it does
    not answer, or if pods of others need the room. Who has to go for those is for the scheduler to choose.

    Args:
        nodes: The nodes.
        taking: All pods of all jobs that take room now.
        depths: Of each pod (uid) that may be kept, the tier of its job, and how many of its job are kept before it.
    """

    def __init__(self, nodes: Iterable[Node], taking: Iterable[Pod], depths: Mapping[str, tuple[int, int]]) -> None:
        self._kept: _Left = {node.name: dict(node.free) for node in nodes}
        self._calm: _Left = {name: dict(free) for name, free in self._kept.items()}
        self._vacant: _Left = {name: dict(free) for name, free in self._kept.items()}
        self._depths: dict[str, list[tuple[int, int]]] = {name: [] for name in self._kept}
        self._log: list[Callable[[], object]] = []
        for pod in taking:
            if pod.node in self._vacant:
                _take(self._vacant[pod.node], pod.request)
                if pod.uid in depths:
                    _take(self._calm[pod.node], pod.request)
                    self._depths[pod.node].append(depths[pod.uid])
        for name, calm in self._calm.items():
            self._depths[name].sort()
            lacks = {what: -amount for what, amount in calm.items() if amount < 0}
            for left in (self._kept[name], calm):
                _give(left, lacks)

    def among(self, names: Iterable[str]) -> list[str]:
        """Those of these nodes that there are, in an order that is always the same."""
        return sorted(name for name in names if name in self._kept)

    def can_keep(self, pod: Pod) -> bool:
        """Whether a pod can stay where it is: no other job has got the room."""
        return pod.node not in self._kept or fits(pod.request, self._kept[pod.node])

    def keep(self, pod: Pod) -> bool:
        """Keep a pod where it is; False if another job has got the room."""
        if not self.can_keep(pod):
            return False
        if pod.node in self._kept:
            self._use(self._kept[pod.node], pod.request)
        return True

    def place(self, request: Resources, nodes: list[str]) -> bool | None:
        """Find room for one more pod, at best where nobody has to go for it, and else where it costs others least.

        Args:
            request: What it needs.
            nodes: Where it may be.

        Returns:
            Whether there is room now; False if others have to go first. None if there is no room.
        """
        places = [name for name in nodes if fits(request, self._kept[name])]
        for left in (self._vacant, self._calm):
            for name in places:
                if fits(request, left[name]):
                    self._put(request, name)
                    return left is self._vacant
        if not places:
            return None
        # The deepest pods are given up first anyway: whoever has them has more than others, or comes after them.
        name = max(places, key=lambda name: self._depths[name][-1:])
        self._put(request, name)
        if found := self._depths[name]:
            depth = found.pop()
            self._log.append(lambda: found.append(depth))
        return False

    def _put(self, request: Resources, name: str) -> None:
        for left in (self._vacant, self._calm, self._kept):
            self._use(left[name], request)

    def _use(self, left: dict[str, int], request: Resources) -> None:
        _take(left, request)
        self._log.append(lambda: _give(left, request))

    def mark(self) -> int:
        """A moment to which one may return."""
        return len(self._log)

    def undo(self, mark: int) -> None:
        """Give back all that was used since then."""
        while len(self._log) > mark:
            self._log.pop()()


def fits(request: Resources, left: Resources) -> bool:
    """Whether there is enough of all that is needed."""
    return all(left.get(name, 0) >= amount for name, amount in request.items() if amount)


def without(nodes: Iterable[Node], pods: Iterable[Pod]) -> list[Node]:
    """The nodes, less what these pods take of them. Cost: O(nodes + pods)."""
    left = {node.name: dict(node.free) for node in nodes}
    for pod in pods:
        if pod.node in left:
            _take(left[pod.node], pod.request)
    return [Node(name, free) for name, free in left.items()]


def _take(left: dict[str, int], request: Resources) -> None:
    for name, amount in request.items():
        left[name] = left.get(name, 0) - amount


def _give(left: dict[str, int], request: Resources) -> None:
    for name, amount in request.items():
        left[name] = left.get(name, 0) + amount


def could_ever_fit(job: Job, nodes: Iterable[Node]) -> bool:
    """Whether its minimum would fit if it had the cluster for itself."""
    room = FreeCapacity(nodes, (), {})
    places = room.among(job.nodes)
    return all(room.place(job.request, places) is not None for _ in range(job.minimum))
