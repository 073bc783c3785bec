"""The invariants, which are checked at every change and therefore after every event.

* A coordinator forgets whom no rule asks for any more.
* One view per generation; generations grow; a worker is in the view or out of it; a loss admits nobody.
* An update has one content: the same epoch, positions, contributors and weights in all who confirm it.
* In each epoch every position is committed exactly once.
* A worker trains only with a state; once a new history has begun, the old one is not continued, but by workers that
  hear nothing.
* A demand leaves as many nodes as are wanted, and never fewer than `min_nodes`; it admits nobody beyond. Nobody is
  asked to leave that is about to.
* If all members leave, one of them saves the newest state, once, and nobody goes on with it.
* Once an exception has ended the job, nobody finishes, and nobody trains on.
* In a gentle run (workers come, and leave, and no harm is done) every sample is computed once, no collective is run
  again, and nobody begins anew before a state has been saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from ef_common.core.membership import (
    Active,
    Event,
    Gathering,
    Gone,
    Idle,
    Membership,
    Phase,
    Returned,
    Serving,
    Settings,
    Silent,
    Tick,
)
from ef_common.core.quorum import generation_of
from ef_common.core.sharding import Range
from ef_common.core.view import View

_HARM = ("returned", "rerun", "replayed", "made up", "loss", "all lost", "out of time")
"""What does not happen in a gentle run, before the end of the training."""
HUNG = "hung"
"""End of a worker that its agent ends, since the others go on without it."""
_IN = (Phase.MEMBER, Phase.LEAVING)


class Violation(Exception):
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True)
class Record:
    """One update, as a worker logs it when it is confirmed.

    Args:
        life: Id of the worker whose initial weights the history began with.
        update: Number of the update in this life.
        epoch: Epoch of the positions.
        view: View of the contributors.
        committed: Ranges of positions made final.
        fingerprint: Depends on the weights after this update and on all before.
        made_at: When this worker made it.
    """

    life: str
    update: int
    epoch: int
    view: tuple[int, tuple[str, ...]]
    committed: tuple[Range, ...]
    fingerprint: int
    made_at: float = field(compare=False)


@dataclass(slots=True)
class Result:
    """What a worker has when it has finished."""

    worker: str
    life: str
    updates: int
    weights: int
    expected: int
    fingerprint: int


def lost_in(event: Event) -> tuple[str, ...]:
    """Ids of the workers that are lost by an event."""
    match event:
        case Gone(worker):
            return (worker,)
        case Silent(workers):
            return workers
    return ()


def has_hung(event: Gone) -> bool:
    """Whether a worker is gone because it has kept the others waiting."""
    return " hung: " in event.why


def is_deaf(event: Gone) -> bool:
    """Whether a worker is gone because it does not read, so that it cannot be told that others go on without it."""
    return event.why.startswith("slow reader")


def most_nodes(state: Active, settings: Settings) -> int:
    """How many nodes may train."""
    wanted = state.demand.nodes
    return settings.max_nodes if not wanted else max(settings.min_nodes, min(wanted, settings.max_nodes))


def _check_memory(state: Membership) -> None:
    """A coordinator knows of nobody but those who are here, and of members of views that may matter yet."""
    if not isinstance(state, Active):
        return
    named = {worker for link in state.chain for worker in link.view.ids}
    told, claims = state.stores.told.keys(), state.stores.claims
    strange = told - named - state.workers.keys()
    strange = (
        strange - state.returned.keys() if isinstance(state, Gathering) else strange | (state.dead | state.gone) - named
    )
    generations = {link.view.generation for link in state.chain}
    if strange or any(generation_of(claim) not in generations for claim in claims):
        raise Violation(f"{', '.join(sorted(strange))} should be forgotten, or one of the claims {sorted(claims)}")


@dataclass(slots=True)
class Invariants:
    """Everything that has been seen of a run.

    Args:
        length: Positions of an epoch.
        epochs: Number of epochs.
        gentle: No fault does harm.
        failover: Coordinators may be lost. If one dies while it tells all members that they are out, a member that was
            not told yet asks another one, and may save the same state again.
        settings: Settings of the membership.
        deaf: Workers that may not have been told that others go on without them, as they did not read, or their
            connection had broken.
    """

    length: int
    epochs: int
    gentle: bool = False
    failover: bool = False
    settings: Settings = field(default_factory=Settings)
    views: dict[tuple[int, tuple[str, ...]], View] = field(default_factory=dict)
    formed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    history: dict[str, dict[int, Record]] = field(default_factory=dict)
    committed: dict[tuple[str, int], int] = field(default_factory=dict)
    evaluations: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    evicted: set[str] = field(default_factory=set)
    deaf: set[str] = field(default_factory=set)
    goodbyes: set[str] = field(default_factory=set)
    newest: dict[str, int] = field(default_factory=dict)
    samples: dict[tuple[str, int], int] = field(default_factory=dict)
    saves: dict[str, int] = field(default_factory=dict)
    failed_at: float | None = None

    def decided(self, before: Membership, event: Event, after: Membership) -> None:
        """The coordinator has decided."""
        _check_memory(after)
        if isinstance(after, Serving):
            self._check_size(before, after)
        view = after.view
        members = () if view is None else view.ids
        phases = {worker for worker, stands in after.workers.items() if stands.phase in _IN}
        if isinstance(event, Gone) and event.goodbye:
            self.goodbyes.add(event.worker)
        gathers = isinstance(after, Serving) and after.due < inf  # the lost are in the view yet
        incomplete = after.held or isinstance(after, Gathering) or (gathers and phases <= set(members))
        present = phases if incomplete else set(members) - self.goodbyes
        # One that stood still has not heard of all goodbyes.
        complete = present <= phases <= set(members) if self.failover and not incomplete else phases == present
        if len(set(members)) != len(members) or not complete:
            raise Violation(f"view {members}, but the members are {sorted(phases)}")
        if isinstance(event, Silent) or (isinstance(event, Gone) and has_hung(event)):
            self.evicted.update(lost_in(event))
        if isinstance(event, Gone) and is_deaf(event):
            self.evicted.add(event.worker)
        if view is None or view is before.view or (view.generation, view.ids) in self.views:
            return
        learns = isinstance(event, Returned) or isinstance(before, (Gathering, Idle))
        follows = view.generation == before.generation + 1 or learns
        if not follows or view.generation <= before.generation or view.generation != after.generation:
            raise Violation(f"generation {view.generation} follows {before.generation}")
        old = set() if before.view is None else set(before.view.ids)
        lost = lost_in(event) or (isinstance(before, Serving) and before.due < inf and isinstance(event, Tick))
        if lost and old & set(members) and not set(members) <= old:
            raise Violation(f"a loss admits somebody: {sorted(old)} -> {members}. Received: {event}")
        self.views[view.generation, view.ids] = view

    def _check_size(self, before: Membership, after: Serving) -> None:
        """Who is asked to leave, and who is admitted, is within what is wanted. Each worker has a node of its own."""
        led = isinstance(before, Serving)
        asked = after.asked - before.asked if isinstance(before, Serving) else after.asked
        staying = [w for w in after.view.ids if w in after.workers and after.workers[w].phase is Phase.MEMBER]
        most = most_nodes(after, self.settings)
        if strange := asked.difference(staying):
            raise Violation(f"{', '.join(sorted(strange))} should stay, or be about to leave, and is asked to")
        left = len(set(staying) - after.asked)
        if asked - {after.replacement.straggler} and left != most:
            raise Violation(f"{', '.join(sorted(asked))} are asked to leave, so that {left} nodes stay of {most}")
        if asked and not left:
            raise Violation(f"all are asked to leave: {', '.join(sorted(asked))}")
        admitted = led and before.view is not None and not set(after.view.ids) <= set(before.view.ids)
        if admitted and len(staying) > most + bool(after.replacement.spare):
            raise Violation(f"{len(staying)} nodes are in view {after.view.generation}, and {most} are wanted")

    def entered(self, worker: str, generation: int, members: list[str], rank: int) -> None:
        """A session has entered a view."""
        ids = tuple(members)
        if self.formed.setdefault(generation, ids) != ids:
            raise Violation(f"two groups in generation {generation}: {self.formed[generation]} and {ids}")
        if (generation, ids) not in self.views or members[rank] != worker:
            raise Violation(f"{worker} takes {members} for view {generation} and {rank} for its rank")
        if generation <= self.generations.get(worker, 0):
            raise Violation(f"{worker} enters view {generation} after {self.generations[worker]}")
        self.generations[worker] = generation

    def confirmed(self, worker: str, record: Record) -> None:
        """A worker logs an update."""
        history = self.history.setdefault(record.life, {})
        known = history.get(record.update)
        if known is not None:
            if known != record:
                raise Violation(f"two contents of one update: {known} and, of {worker}, {record}")
            return
        if record.update >= self.saves.get(record.life, record.update + 1):
            raise Violation(f"{worker} goes on with a history that was saved when all had left: {record}")
        for life, others in self.history.items():
            first = record if life == record.life else others[min(others)]
            goes_on = first.view[0] > record.view[0] and first.made_at < record.made_at
            if goes_on and worker not in self.deaf:
                raise Violation(f"{worker} goes on with a history that others began anew: {record}")
        generation, contributors = record.view
        if (generation, contributors) not in self.views:
            raise Violation(f"{contributors} commit in view {generation}, which is not theirs")
        history[record.update] = record
        key = (record.life, record.epoch)
        self.committed[key] = add_once(self.committed.get(key, 0), record.committed, what=f"epoch {record.epoch}")

    def counted(self, what: str, *, closed: bool) -> None:
        """Something has happened, before or after the end of the training."""
        if self.gentle and what in _HARM and not closed:
            raise Violation(f"no harm was done, and yet: {what}")
        if self.gentle and what == "restart" and not self.saves:
            raise Violation("the job begins anew, and nothing has been saved")

    def computed(self, life: str, epoch: int, positions: list[int]) -> None:
        """A worker computes the gradients of these samples."""
        if self.gentle:
            key, ranges = (life, epoch), tuple((position, position + 1) for position in positions)
            self.samples[key] = add_once(self.samples.get(key, 0), ranges, what=f"computed in epoch {epoch}")

    def made(self, life: str, updates: int) -> None:
        """A worker has made so many updates."""
        self.newest[life] = max(self.newest.get(life, 0), updates)

    def saved(self, worker: str, life: str, updates: int) -> None:
        """A worker has saved its state, as the last members have left."""
        if life in self.saves and not (self.failover and updates == self.saves[life]):
            raise Violation(f"{worker} saves what has been saved")
        confirmed = max(self.history.get(life, {}), default=-1) + 1
        newest = max(confirmed, self.newest.get(life, 0) if self.gentle else 0)
        if updates < newest:
            raise Violation(f"{worker} saves update {updates}, and somebody has made {newest}")
        self.saves[life] = updates

    def evaluated(self, worker: str, life: str, epoch: int, covered: list[int], num_samples: int) -> None:
        """A worker has the results of an evaluation."""
        if sorted(covered) != list(range(num_samples)):
            raise Violation(f"{worker} evaluates {covered} of {num_samples} samples")
        if self.evaluations.setdefault((life, epoch), covered) != covered:
            raise Violation(f"{worker} evaluates {covered}, others {self.evaluations[life, epoch]}")

    def finished(self, result: Result) -> None:
        """A worker has trained to the end."""
        if result.weights != result.expected:
            raise Violation(f"{result.worker} ends with {result.weights}, expected {result.expected}")
        self.results.append(result)

    def ended(self) -> None:
        """The job is over."""
        # Whoever was frozen in its last collective may find it complete: it has finished, and is evicted.
        results = [result for result in self.results if result.worker not in self.evicted | self.deaf]
        if not results:
            return
        first = results[0]
        for other in results:
            if (first.life, first.updates, first.fingerprint) != (
                other.life,
                other.updates,
                other.fingerprint,
            ):
                raise Violation(f"survivors differ: {first} and {other}")
        history = self.history.get(first.life, {})
        if sorted(history) != list(range(first.updates)):
            raise Violation(f"{first.updates} updates, confirmed are {sorted(history)}")
        for epoch in range(self.epochs):
            if self.committed.get((first.life, epoch), 0) != (1 << self.length) - 1:
                raise Violation(f"epoch {epoch} is not complete: {self.committed}")


def add_once(done: int, ranges: tuple[Range, ...], *, what: str) -> int:
    """Add ranges of positions to a set (bits of an integer) that must not hold them yet."""
    for start, stop in ranges:
        bits = ((1 << stop) - 1) ^ ((1 << start) - 1)
        if done & bits:
            raise Violation(f"{what}: some of the positions {start}..{stop - 1} are committed twice")
        done |= bits
    return done
