"""What happens to the pods of a cluster, as its API server tells it, and who has how many slots at which time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from ef_common.kubernetes.api import Api
from ef_common.kubernetes.kinds import JOBS, PODS
from ef_common.kubernetes.resource import JOB_LABEL, Json
from ef_common.kubernetes.watching import Copy

Steps = list[tuple[float, int]]
"""Times, and the number from each time on."""


@dataclass
class Life:
    """When which things were seen of a pod, by the time of the day in seconds; None for those that were not.

    Args:
        name: Its name.
        job: The job to which it belongs; "" for a serving pod.
        node: Where it is.
        created: The pod was there.
        bound: It had a node.
        running: Its container ran.
        told: It was told to go.
        ended: It had ended, or was gone.
    """

    name: str
    job: str
    node: str = ""
    created: float | None = None
    bound: float | None = None
    running: float | None = None
    told: float | None = None
    ended: float | None = None


class Lives:
    """Watches pods and jobs, in threads, between `start` and `stop`.

    Args:
        api: The cluster.

    Attributes:
        lives: Of each pod, by its uid.
        changed_at: When a pod or a job was seen to change last.
    """

    def __init__(self, api: Api) -> None:
        self.lives: dict[str, Life] = {}
        self.changed_at = time.time()
        self._lock = threading.Lock()
        self._pods = Copy(api, PODS, on_change=self._look)
        self._jobs = Copy(api, JOBS, on_change=self._note)

    def start(self) -> Lives:
        """Begin."""
        self._pods.start()
        self._jobs.start()
        return self

    def stop(self) -> None:
        """End."""
        self._pods.stop()
        self._jobs.stop()

    def as_rows(self, since: float) -> list[dict[str, Any]]:
        """All lives, with times that count from this one."""
        with self._lock:
            rows = [asdict(life) for life in self.lives.values()]
        return [{name: _since(value, since) for name, value in row.items()} for row in rows]

    def _note(self) -> None:
        self.changed_at = time.time()

    def _look(self) -> None:
        now = self.changed_at = time.time()
        with self._lock:
            pods = {pod["metadata"]["uid"]: pod for pod in self._pods.objects()}
            for uid, pod in pods.items():
                self._see(uid, pod, now)
            for uid in self.lives.keys() - pods.keys():
                _first(self.lives[uid], "ended", now)

    def _see(self, uid: str, pod: Json, now: float) -> None:
        meta, phase = pod["metadata"], pod["status"].get("phase")
        life = self.lives.setdefault(
            uid, Life(meta["name"], (meta.get("labels") or {}).get(JOB_LABEL, ""), created=now)
        )
        life.node = pod["spec"].get("nodeName") or ""
        for what, happened in (
            ("bound", bool(life.node)),
            ("running", phase == "Running"),
            ("told", bool(meta.get("deletionTimestamp"))),
            ("ended", phase in ("Succeeded", "Failed")),
        ):
            if happened:
                _first(life, what, now)


def _first(life: Life, what: str, now: float) -> None:
    if getattr(life, what) is None:
        setattr(life, what, now)


def _since(value: Any, since: float) -> Any:
    return round(value - since, 3) if isinstance(value, float) else value


# ------------------------------------------------------------ who has waited for whom


WAITS = ("told", "gone", "bound", "started")
"""Until a pod was told to go, until it had ended, until the new one had its node, and until that one ran."""


def waits_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """What each pod that serves has waited for after its creation, one wait after the other, in seconds.

    Those for which no pod of a training had to go are left out.
    """
    return [waits for row in rows if not row["job"] and (waits := _waits_of(row, rows))]


def _waits_of(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    if row["running"] is None:
        return None
    on_its_node = [one for one in rows if one["job"] and one["node"] == row["node"]]
    ended = [one for one in on_its_node if None not in (one["told"], one["ended"]) and one["told"] >= row["created"]]
    went = [(one["ended"], one["told"]) for one in ended if one["ended"] <= row["bound"]]
    if not went:
        return None
    ended_at, told_at = max(went)
    times = row["created"], told_at, ended_at, row["bound"], row["running"]
    return {what: round(after - before, 3) for what, (before, after) in zip(WAITS, pairwise(times), strict=True)}


# ------------------------------------------------------------ slots over time


def held(lives: Iterable[dict[str, Any]]) -> Steps:
    """How many of these pods have a slot: from when they are bound to when they have ended."""
    bound = [life for life in lives if life["bound"] is not None]
    changes = [(life["bound"], 1) for life in bound]
    changes += [(life["ended"], -1) for life in bound if life["ended"] is not None]
    return _added(changes)


def steps_of(events: Iterable[dict[str, Any]], since: float) -> Steps:
    """When the first worker had made each step of a training, and how many workers made it."""
    first: dict[int, tuple[float, int]] = {}
    for event in events:
        if event["kind"] == "step":
            at = (round(event["time"] - since, 3), event["world_size"])
            first[event["step"]] = min(first.get(event["step"], at), at)
    return sorted(first.values())


def training(events: Iterable[dict[str, Any]], since: float) -> Steps:
    """How many workers have made the newest step of a training, by its events; 0 after the last one."""
    found = steps_of(events, since)
    sizes: Steps = []
    for at, size in found:
        if not sizes or sizes[-1][1] != size:
            sizes.append((at, size))
    return [*sizes, (found[-1][0], 0)] if found else []


def difference(more: Steps, less: Steps) -> Steps:
    """By how much the one number exceeds the other, at each time."""
    times = sorted({at for at, _ in (*more, *less)})
    return [(at, max(0, value_at(more, at) - value_at(less, at))) for at in times]


def _added(changes: Iterable[tuple[float, int]]) -> Steps:
    total, found = 0, []
    for at, change in sorted(changes):
        total += change
        found.append((at, total))
    return found


def integral(steps: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Slot-seconds between two times."""
    points = [(begin, value_at(steps, begin)), *((at, value) for at, value in steps if begin < at < end), (end, 0)]
    return sum((after[0] - before[0]) * before[1] for before, after in pairwise(points))


def value_at(steps: Sequence[tuple[float, int]], when: float) -> int:
    """The number at a time."""
    return next((value for at, value in reversed(steps) if at <= when), 0)
