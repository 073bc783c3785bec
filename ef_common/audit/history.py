"""The event log as valid facts: records grouped by kind, without those that a rollback voided.

Records without a generation of their own (weights, epochs, evaluations) take that of their worker at the
time, and the number of its last step: both follow from the order of the lines in its file.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ef_common.audit.growing import log_sizes, logged_by_all
from ef_common.audit.spans import Spans, normal
from ef_common.events import EventLogError, Record, read

__all__ = ["Epoch", "Evaluation", "History", "Read", "Rest", "Rollback", "Step", "View", "Weights", "load"]


@dataclass(frozen=True, slots=True)
class View:
    """A worker's view."""

    worker: str
    generation: int
    members: tuple[str, ...]
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Step:
    """A worker's record of one update.

    `after` is the step that its log says it stood at, if it says so. With `samples`, the workers have shared so many
    samples in the batches that were committed, and `mine` are numbers of those. In a stream of shards, `parts` says
    what positions of some workers were, as (position, shard, start, stop), `ends` which shards have ended, and where,
    and `skipped` what could not be read, as (shard, start, stop).
    """

    worker: str
    step: int
    epoch: int
    generation: int
    world_size: int
    committed: Spans
    mine: Spans
    returned: Spans
    after: int | None
    samples: int | None = None
    parts: tuple[tuple[int, int, int, int], ...] = ()
    ends: tuple[tuple[int, int], ...] = ()
    skipped: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Weights:
    """A hash of the weights after a step."""

    worker: str
    step: int
    hash: str
    generation: int


@dataclass(frozen=True, slots=True)
class Epoch:
    """The start (`exact` is None) or the end of an epoch; `open` if its length at the start is an upper bound.

    `ends` and `skipped` are what was found in a stream of shards after the last step, as in a :class:`Step`.
    """

    worker: str
    epoch: int
    length: int
    exact: bool | None
    step: int
    generation: int
    open: bool = False
    shards: int | None = None
    began: int | None = None
    ends: tuple[tuple[int, int], ...] = ()
    skipped: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """Checksums of the parts of what a worker has read at a position of an epoch."""

    worker: str
    epoch: int
    position: int
    checksums: tuple[int | None, ...]
    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation pass, as one of its workers logged it: what each worker did, and what nobody could read.

    `job` differs between jobs in one run directory, each of which counts its passes from the beginning. A range of a
    share holds its start, and each `every`-th position after that.
    """

    worker: str
    stage: str
    run: int
    loader: int
    length: int
    exact: bool
    shares: dict[str, Spans]
    step: int
    generation: int
    job: int
    skipped: Spans = ()
    every: int = 1


@dataclass(frozen=True, slots=True)
class Rest:
    """What no update had used of a pass through a stream of shards, which began in an epoch.

    The first `begun` shards of the order were begun, of which parts are `unused`, as (shard, start, stop). The order is
    a function of seed and epoch, if it is not that of the numbers.
    """

    began: int
    num_shards: int
    begun: int
    order: tuple[int, int] | None
    unused: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Rollback:
    """A start from an earlier step.

    `committed` is what its epoch already held there, if known, and `rest` what was left of a stream of shards.
    """

    worker: str
    generation: int
    step: int
    epoch: int
    committed: Spans
    rest: Rest | None = None


@dataclass(slots=True)
class _Place:
    """A worker's position in its file."""

    generation: int = -1
    step: int | None = None  # None: a founder, or a process that has not been admitted yet
    training: int = 1
    job: int = 0


@dataclass(slots=True)
class History:
    """All facts of a training; every list is in file order, so in order for each worker."""

    views: list[View] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    rollbacks: list[Rollback] = field(default_factory=list)

    _limits: dict[int, float] = field(default_factory=dict)

    def limit(self, generation: int) -> float:
        """Return the last step of a generation that no later rollback made void; ask when all are loaded."""
        if generation not in self._limits:
            later = (back.step for back in self.rollbacks if back.generation > generation)
            self._limits[generation] = min(later, default=math.inf)
        return self._limits[generation]

    def era(self, generation: int) -> int:
        """Count the rollbacks up to a generation: pass numbers may begin again after each."""
        return len({back.generation for back in self.rollbacks if back.generation <= generation})

    def standing_steps(self) -> dict[int, list[Step]]:
        """Return the records of each update that stands, in order of the steps."""
        found: defaultdict[int, list[Step]] = defaultdict(list)
        for step in self.steps:
            if step.step <= self.limit(step.generation):
                found[step.step].append(step)
        return dict(sorted(found.items()))

    def standing_rollbacks(self) -> list[Rollback]:
        """Return the rollbacks that a later one did not go behind."""
        return [back for back in self.rollbacks if back.step <= self.limit(back.generation)]


def load(run_dir: Path, *, growing: bool = False) -> list[History]:
    """Read a run's history.

    Args:
        run_dir: The run directory.
        growing: The logs were gathered one after the other while the run went on; otherwise their sizes show it.

    Returns:
        One for each training of the program, in order, with what comes after it until the next one begins. Steps and
        epochs start again in each. Views do not, so the first one has those of all.

    Raises:
        EventLogError: If there are no events, or the log is malformed.
    """
    before = log_sizes(run_dir)
    records = list(read(run_dir))
    if not records:
        raise EventLogError(f"The event logs in {run_dir} hold no events")
    histories, places, offsets = {1: History()}, defaultdict[str, _Place](_Place), _offsets(records)
    if growing or log_sizes(run_dir) != before:
        records = logged_by_all(records, offsets)
    for record in records:
        if "generation" in record:
            record = {**record, "generation": record["generation"] + offsets[record["worker"]]}
        place = places[record["worker"]]
        place.job = offsets[record["worker"]]
        if record["kind"] == "training":
            place.training, place.step = record["number"], None
        _add(histories[1] if record["kind"] == "view" else _of(histories, place.training), place, record)
    return [history for _, history in sorted(histories.items())]


def _of(histories: dict[int, History], training: int) -> History:
    return histories.setdefault(training, History())


def _offsets(records: Sequence[Record]) -> dict[str, int]:
    """What to add to the generations that each worker has logged, so that they grow from one job to the next.

    A job that is started again has another coordinator, which counts from the beginning. The job that began first comes
    first.
    """
    begins: dict[str, float] = {}
    newest: defaultdict[str, int] = defaultdict(int)
    for record in records:
        begins.setdefault(record["worker"], record["time"])
        newest[record["worker"]] = max(newest[record["worker"]], record.get("generation", 0))
    jobs = _jobs(records, newest)
    jobs.sort(key=lambda job: min(begins[worker] for worker in job))
    offsets: dict[str, int] = {}
    offset = 0
    for job in jobs:
        offsets |= dict.fromkeys(job, offset)
        offset += 1 + max(newest[worker] for worker in job)
    return offsets


def _jobs(records: Sequence[Record], newest: Mapping[str, int]) -> list[set[str]]:
    """Workers by job: those that have met in a view are of one.

    Who is alone, without a coordinator, knows no generation above 0. The others that tell of no view are taken for one
    job.
    """
    found: dict[str, set[str]] = {}
    lonely = {worker for worker in newest if not newest[worker]}
    viewless = newest.keys() - lonely - {record["worker"] for record in records if record["kind"] == "view"}
    views = {frozenset({*record["members"], record["worker"]}) for record in records if record["kind"] == "view"}
    for together in (viewless, *({worker} for worker in lonely), *map(set, views)):
        for worker in list(together):
            together |= found.get(worker, set())
        found.update(dict.fromkeys(together, together))
    logged = [frozenset(job & newest.keys()) for job in found.values()]
    return [set(job) for job in dict.fromkeys(logged) if job]


def _add(history: History, place: _Place, record: Record) -> None:
    kind = record["kind"]
    if kind == "step":
        history.steps.append(_step(record, place))
        place.generation, place.step = record["generation"], record["step"]
    elif kind == "weights":
        history.weights.append(Weights(record["worker"], record["step"], record["hash"], place.generation))
    elif kind == "view":
        place.generation = record["generation"]
        members = tuple(record["members"])
        history.views.append(View(record["worker"], place.generation, members, record["rank"], record["world_size"]))
    elif kind in ("epoch", "epoch_end"):
        history.epochs.append(_epoch(record, place))
    elif kind == "read":
        checksums = tuple(record["checksums"])
        where = record["worker"], record["epoch"], record["position"], checksums
        history.reads.append(Read(*where, place.step or 0, place.generation))
    elif kind == "evaluation":
        history.evaluations.append(_evaluation(record, place))
    elif kind == "rollback":
        history.rollbacks.append(_rollback(record))
        place.generation, place.step = record["generation"], record["step"]
    elif kind == "admitted":
        place.generation, place.step = record["generation"], record["step"]
    elif kind == "start":
        place.generation, place.step, place.training = -1, None, 1


def _step(record: Record, place: _Place) -> Step:
    return Step(
        worker=record["worker"],
        step=record["step"],
        epoch=record["epoch"],
        generation=record["generation"],
        world_size=record["world_size"],
        committed=normal(record["committed"]),
        mine=normal(record["mine"]),
        returned=normal(record["returned"]),
        after=place.step,
        samples=record.get("samples"),
        parts=_rows(record, "parts"),
        ends=_rows(record, "ends"),
        skipped=_rows(record, "skipped"),
    )


def _rows(record: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    return tuple(map(tuple, record.get(name, ())))


def _epoch(record: Record, place: _Place) -> Epoch:
    return Epoch(
        worker=record["worker"],
        epoch=record["epoch"],
        length=record["length"],
        exact=record["exact"] if record["kind"] == "epoch_end" else None,
        step=place.step or 0,
        generation=place.generation,
        open=record.get("open", False),
        shards=record.get("shards"),
        began=record.get("began"),
        ends=_rows(record, "ends"),
        skipped=_rows(record, "skipped"),
    )


def _evaluation(record: Record, place: _Place) -> Evaluation:
    every = record.get("every", 1)
    return Evaluation(
        worker=record["worker"],
        stage=record["stage"],
        run=record["run"],
        loader=record["loader"],
        length=record["length"],
        exact=record["exact"],
        shares={worker: _share(spans, every) for worker, spans in record["shares"].items()},
        step=place.step or 0,
        generation=place.generation,
        job=place.job,
        skipped=normal(record.get("skipped_positions", ())),
        every=every,
    )


def _share(spans: Sequence[Sequence[int]], every: int) -> Spans:
    return normal(spans) if every == 1 else tuple(sorted((start, stop) for start, stop in spans))


def _rollback(record: Record) -> Rollback:
    return Rollback(
        worker=record["worker"],
        generation=record["generation"],
        step=record["step"],
        epoch=record["epoch"],
        committed=normal(record.get("cursor_positions", ())),
        rest=_rest(record["stream"]) if "stream" in record else None,
    )


def _rest(stream: Mapping[str, Any]) -> Rest:
    order = stream["order"]
    return Rest(
        began=stream["began"],
        num_shards=stream["shards"],
        begun=stream["begun"],
        order=None if order is None else (order[0], order[1]),
        unused=_rows(stream, "unused"),
    )
