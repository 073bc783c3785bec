"""Streams of shards: reading against files split by hand, steps and losses against map-style data, the plan at scale.

Two workers read the same files of lines, once as a stream and once under `DDPStrategy` with a data set that each of
them splits by its rank. A step of a stream is compared with one of a map-style data set, both ours, and so is the time
from the SIGKILL of a node to the survivors' next step. The plan of ten million shards is measured with the real core,
without processes: its memory, and the processor time of a change among 1,000 workers.
"""

from __future__ import annotations

import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ef_common.core.streams import stream as streams
from ef_common.core.streams.order import ShardOrder
from ef_common.core.streams.pieces import LaneFindings
from ef_common.core.streams.stream import Plan, Stream
from tests.benchmarks.elastic_job import OURS
from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.loss_recovery import Loss, measure
from tests.benchmarks.pair import run_pair

TARGET_READING = 1 / 0.98
TARGET_STEP = 1.02
TARGET_LOSS = 1.10
BUDGET_MIB = 100.0
BUDGET_MS = 10.0
NUM_SHARDS = 10_000_000
NUM_WORKERS = 1_000
STREAMED = replace(OURS, name="streamed", worker="tests.benchmarks.streamed_loss_worker")
_WORKER = "tests.benchmarks.streams_worker"
_TIMEOUT_S = 1200.0


def reading(num_turns: int) -> Figure:
    """Microseconds per sample of all workers together."""
    from tests.benchmarks.streams_worker import LINES_PER_FILE, NUM_FILES

    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(NUM_FILES):
            lines = (" ".join(f"{draw.random():.6f}" for _ in range(16)) for _ in range(LINES_PER_FILE))
            (Path(folder) / f"{number:03}.txt").write_text("\n".join(lines) + "\n")
        found = run_pair(_WORKER, ["files", str(num_turns), folder], timeout_s=_TIMEOUT_S)[0]
    times = {side: [1e6 * seconds for seconds in found[side]] for side in found}
    return of_samples(times["ours"], times["peer"], target=TARGET_READING, unit="µs/sample")


def step(num_turns: int) -> Figure:
    """Milliseconds of a step of the small MLP."""
    found = run_pair(_WORKER, ["map", str(num_turns), "."], timeout_s=_TIMEOUT_S)[0]
    times = {side: [1e3 * seconds for seconds in found[side]] for side in found}
    return of_samples(times["ours"], times["peer"], target=TARGET_STEP, unit="ms")


def loss(num_jobs: int) -> Figure:
    """Seconds from the SIGKILL of a node to the survivors' next step, of jobs of four nodes which lose all but one."""
    dice = random.Random(0)
    found: dict[str, list[Loss]] = {STREAMED.name: [], OURS.name: []}
    for turn in range(num_jobs):
        for side in (STREAMED, OURS) if turn % 2 == 0 else (OURS, STREAMED):
            found[side.name] += measure(side, dice)
    times = {name: [one.recovery_s for one in losses] for name, losses in found.items()}
    lost = {name: max(one.num_lost for one in losses) for name, losses in found.items()}
    return of_samples(times[STREAMED.name], times[OURS.name], target=TARGET_LOSS, unit="s", steps_lost=lost)


def plan_memory() -> Figure:
    """What a worker holds of ten million shards among 1,000 workers, at most."""
    tracemalloc.start()
    streams.admit(Stream(NUM_SHARDS), _plan(), _members())
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    return Figure(peak, BUDGET_MIB, 1.0, "MiB")


def changes() -> Figure:
    """Processor time of the dearest change: a loss, a join, the end of a shard, or the beginning of the epoch."""
    plan, members = _plan(), _members()
    stream = streams.admit(Stream(NUM_SHARDS), plan, members)
    lost = streams.admit(stream, plan, members[1:])
    first = stream.held[members[0]].lanes[0][0]
    ended = {member: LaneFindings() for member in members} | {members[0]: LaneFindings({first.shard: first.start + 7})}
    acts: dict[str, Callable[[], object]] = {
        "begin": lambda: streams.admit(Stream(NUM_SHARDS), plan, members),
        "loss": lambda: streams.admit(stream, plan, members[1:]),
        "join": lambda: streams.admit(lost, plan, (*members[1:], "newcomer")),
        "end": lambda: streams.deal(streams.settle(stream, plan, ended)[0], plan),
    }
    found = {name: _milliseconds(act) for name, act in acts.items()}
    ordinary = _milliseconds(lambda: streams.deal(stream, plan))
    return Figure(max(found.values()), BUDGET_MS, 1.0, "ms", {**found, "ordinary_step": ordinary})


def _milliseconds(act: Callable[[], object]) -> float:
    times = []
    for _ in range(9):
        begin = time.process_time()
        act()
        times.append(1e3 * (time.process_time() - begin))
    return round(sorted(times)[len(times) // 2], 3)


def _plan() -> Plan:
    order = ShardOrder(NUM_SHARDS, seed=0, epoch=0, shuffled=True)
    return Plan(order, batch_size=32, num_lanes=1, ahead=128)


def _members() -> tuple[str, ...]:
    return tuple(f"worker-{number}" for number in range(NUM_WORKERS))


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure all."""
    num_turns = 2 if quick else 12
    return {
        "stream_reading": reading(num_turns),
        "stream_step": step(num_turns),
        "stream_loss": loss(1 if quick else 5),
        "stream_plan_10m_shards": plan_memory(),
        "stream_change_1000_workers": changes(),
    }


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
