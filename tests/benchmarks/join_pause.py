"""A worker joins two others: their longest pause, against torchrun's restart and against memory speed.

The longest time between the ends of two consecutive steps of a node, from the start of the newcomer's process
until all three train; the 50 ms step itself is in it. The second target is absolute: one and a half steps,
plus a copy of the state at the speed of memory. It counts in steps of two nodes; that of three, which the pause
ends with, is longer where they share cores, and stands beside it.

Beside each pause stand its parts: the gap that ends with the first step of three nodes, which is the join itself; the
longest one before it, while the newcomer's agent and worker start, which take cores from the others here that they
would not take on a node of their own; and the longest one of the first steps after it. The first join of each job
stands apart from its later ones, so that what a process does only once is seen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from ef_common.events import Follower
from tests.benchmarks.elastic_job import OURS, PEER, ElasticJob, Side
from tests.benchmarks.figure import Figure, emit, is_quick, of_samples, spread
from tests.benchmarks.models import state_bytes
from tests.benchmarks.processes import Processes
from tests.benchmarks.step_log import Step

TARGET = 1 / 40
STEPS_OF_PAUSE = 1.5
_SIZES = ("2m", "33m")
# A newcomer takes the others for dead if their keep-alives are late, and trains alone; losses are not measured here.
_PEER = replace(PEER, options=PEER.options.replace("max_attempt=2", "max_attempt=4"))


@dataclass(frozen=True)
class Pause:
    """How long a node made no step, in seconds.

    Args:
        before: At most, while the newcomer started.
        joining: Until the first step with the newcomer.
        after: At most, in the first steps with it.
        settling: The part of `joining` from the boundary until the newcomer had the state, by our event log.
    """

    before: float
    joining: float
    after: float
    settling: float = 0.0

    @property
    def longest(self) -> float:
        """The longest time."""
        return max(self.before, self.joining, self.after)

    def __str__(self) -> str:
        joining = f"{self.joining:.3f} until the first step with it, {self.settling:.3f} of them until it had the state"
        return f"{self.longest:.3f} s ({self.before:.3f} while the newcomer started; {joining}; {self.after:.3f} later)"


@dataclass
class Joins:
    """What was seen of some joins, in seconds.

    Attributes:
        pauses: Of the node that paused longest, in each.
        steps_before: A step of two nodes, before each.
        steps_after: A step of three nodes, after each: longer, for two cores.
        firsts: Which of the pauses were those of the first joins of their jobs.
    """

    pauses: list[Pause] = field(default_factory=list)
    steps_before: list[float] = field(default_factory=list)
    steps_after: list[float] = field(default_factory=list)
    firsts: list[bool] = field(default_factory=list)

    @property
    def longest(self) -> list[float]:
        """The longest time without a step, of each."""
        return [pause.longest for pause in self.pauses]

    def add(self, others: Joins) -> None:
        """Add those of another job."""
        self.pauses += others.pauses
        self.steps_before += others.steps_before
        self.steps_after += others.steps_after
        self.firsts += others.firsts

    def parts(self) -> dict[str, Any]:
        """Their parts, of the first joins of their jobs and of later ones."""
        found = {}
        for name, is_first in (("first", True), ("later", False)):
            some = [pause for pause, first in zip(self.pauses, self.firsts, strict=True) if first is is_first]
            for part in ("before", "joining", "settling", "after") if some else ():
                found[f"{part}_of_{name}"] = spread([getattr(pause, part) for pause in some])
        return found


def measure(side: Side, *, num_joins: int, size: str = "tiny") -> Joins:
    """Let a third node join again and again."""
    joins = Joins()
    with Processes() as processes:
        job = ElasticJob(side, processes, size=size)
        job.add_nodes(2)
        for number in range(num_joins):
            job.wait_until_steady()
            time.sleep(1.0)
            joins.steps_before.append(_step_time(job))
            started = time.monotonic()
            job.add_nodes()
            job.wait_until_steady()
            pauses = [pause_of(job.steps(job.nodes[index]), started, world_size=3) for index in (0, 1)]
            pause = replace(max(pauses, key=lambda pause: pause.longest), settling=_settling(job))
            joins.pauses.append(pause)
            joins.firsts.append(number == 0)
            time.sleep(1.0)
            joins.steps_after.append(_step_time(job))
            step = f"step {joins.steps_before[-1]:.3f} → {joins.steps_after[-1]:.3f} s"
            print(f"{side.name}: {size}: join {number + 1} of the job: {pause}, {step}", flush=True)
            job.kill_last_node()
    return joins


def _step_time(job: ElasticJob) -> float:
    recent = [step for step in job.steps(job.nodes[0])[-15:] if step.world_size == len(job.nodes)]
    return median(np.diff([step.time for step in recent]))


def _settling(job: ElasticJob) -> float:
    """What the members' event logs say of their newest view; 0 for a job that has none."""
    views = [record for record in Follower(job.run_dir).news() if record["kind"] == "view"]
    newest = max((view["generation"] for view in views), default=0)
    paused = [view["pause_s"] or 0.0 for view in views if view["generation"] == newest and view["rank"] < 2]
    return float(max(paused, default=0.0))


def pause_of(steps: Sequence[Step], since: float, *, world_size: int) -> Pause:
    """How long a node paused for a join.

    Args:
        steps: Its steps.
        since: When the newcomer's process was started.
        world_size: Nodes that train in the end.
    """
    times = [step.time for step in steps]
    first = max(0, int(np.searchsorted(times, since)) - 1)
    joined = next(index for index in range(first + 1, len(steps)) if steps[index].world_size == world_size)
    gaps = [float(gap) for gap in np.diff(times[first:])]
    at = joined - first - 1
    return Pause(max(gaps[:at], default=0.0), gaps[at], max(gaps[at + 1 :], default=0.0))


def copy_speed() -> float:
    """Bytes a second that a copy in memory moves."""
    source = np.ones(1 << 28, dtype=np.uint8)
    target = np.ones_like(source)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return source.nbytes / median(times)


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure both sides, in turn."""
    sides = {OURS.name: Joins(), _PEER.name: Joins()}
    for _ in range(1 if quick else 3):
        for side in (OURS, _PEER):
            sides[side.name].add(measure(side, num_joins=2))
    ours, peer = sides[OURS.name], sides[_PEER.name]
    figures = {
        "join_pause": of_samples(ours.longest, peer.longest, target=TARGET, unit="s", parts=ours.parts()),
    }
    for size in _SIZES:
        speed = copy_speed()
        joins = measure(OURS, num_joins=2 if quick else 5, size=size)
        transfer = state_bytes(size) / speed
        budget = STEPS_OF_PAUSE * median(joins.steps_before) + transfer
        details = {
            "ours": spread(joins.longest),
            **joins.parts(),
            "step_before": spread(joins.steps_before),
            "step_after": spread(joins.steps_after),
            "budget_by_steps_after": STEPS_OF_PAUSE * median(joins.steps_after) + transfer,
            "state_bytes": state_bytes(size),
            "copy_bytes_per_s": round(speed),
            "peer": f"{STEPS_OF_PAUSE} steps + a copy of the state in memory",
        }
        figures[f"join_pause_{size}"] = Figure(median(joins.longest), budget, 1.0, "s", details)
    return figures


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
