"""A toy trainer with the loop of the plugins, in exact arithmetic.

The gradient of a sample is an integer that depends on (epoch, position), and the weight is the sum of all
gradients: after each epoch it has a value in closed form. A fingerprint depends on the order of the updates
as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from zlib import crc32

from ef_common.collectives.gradients.bucket_run import Confirmation
from ef_common.collectives.gradients.pieces import Pieces
from ef_common.collectives.operations import GatherBytes
from ef_common.core import sharding
from ef_common.core.sharding import Commit, EpochProgress, GlobalBatch, Window
from ef_common.core.view import View
from ef_common.errors import TrainingOver
from ef_common.session import Session
from ef_common.session.ports import Operation
from ef_common.testing.simulation.invariants import Invariants, Record, Result, Violation, add_once
from ef_common.testing.simulation.schedule import Job
from ef_common.testing.simulation.streamed import StreamedEpoch
from ef_common.testing.simulation.toy_operations import Buffers, Callback, Reduction, Watched

_MODULUS = (1 << 61) - 1
_TOLERANCE = 1e-6


def gradient(epoch: int, position: int) -> int:
    """Gradient of one sample."""
    return (position * 7919 + epoch * 104729 + 13) % 1009 + 1


def _progress(fields: dict[str, Any]) -> EpochProgress:
    windows = tuple(Window(start, stop, tuple(ids), *rest) for start, stop, ids, *rest in fields["uncommitted"])
    return EpochProgress(**{**fields, "returned": tuple(fields["returned"]), "uncommitted": windows})


def initial_weights(worker: str) -> int:
    """Every worker begins with other weights, until they are made equal."""
    return sum(worker.encode()) * 1_000_003


def undisturbed(job: Job) -> int:
    """The fingerprint of a training with a fixed global batch: the same for every history."""
    fingerprint = 0
    for epoch in range(job.epochs):
        for start in range(0, job.length, job.global_batch):
            batch = range(start, min(start + job.global_batch, job.length))
            fingerprint = _next(fingerprint, sum(gradient(epoch, position) for position in batch))
    return fingerprint


def _next(fingerprint: int, update: int) -> int:
    return (fingerprint * 1_000_003 + update + 1) % _MODULUS


class Trainer:
    """One worker's training, and its `State`.

    Args:
        job: What to train.
        session: The worker's session.
        invariants: Told of all that is confirmed.
        sleep: Lets virtual time pass.
        now: The virtual time.
        delay: Draws a random time around a typical one.
        mark: Called with the places that are passed.
        note: Counts what is worth it.
        store: What this worker reads in its store; "" if it has none.
    """

    def __init__(
        self,
        job: Job,
        session: Session,
        *,
        invariants: Invariants,
        sleep: Callable[[float], None],
        now: Callable[[], float],
        delay: Callable[[float], float],
        mark: Callback,
        note: Callback,
        store: str = "",
    ) -> None:
        self._store = store
        self._agreed: str | None = None
        self.job = job
        self.session = session
        self.worker = session.worker.id
        self.life = self.worker
        self.base = initial_weights(self.worker)
        self.weights = self.base
        self.fingerprint = 0
        self.epoch = 0
        self.updates = 0
        self.done = 0
        self._progress = EpochProgress(0, job.length)
        self._streamed: StreamedEpoch | None = None
        self._invariants = invariants
        self._sleep = sleep
        self._now = now
        self._delay = delay
        self._mark = mark
        self._note = note
        self._buffers = [Buffers(job.num_buckets, num_values=job.num_values) for _ in range(1 if job.lends else 2)]
        self._total = 0
        self._count = 0
        self._pieces: Pieces | None = None
        self._room: list[int] = []

        if job.shards:
            self._streamed = StreamedEpoch(job, session, self._exchange_ends)

    @property
    def progress(self) -> EpochProgress:
        """How far the epoch is."""
        return self._progress if self._streamed is None else self._streamed.dealer.progress

    @progress.setter
    def progress(self, progress: EpochProgress) -> None:
        self._progress = progress

    @property
    def members(self) -> tuple[str, ...]:
        """Who shares the next samples: the same for all that stand at this place."""
        return self.session.completed_in.ids

    def train(self) -> None:
        """From the start of the session to its end."""
        session, job = self.session, self.job
        if session.start():
            self._mark("warm_up")
            self._sleep(self._delay(0.3))
        self._broadcast()
        self._agree_on_store()
        session.state = self
        while self.epoch < job.epochs:
            if job.trainings and self._begin_training():
                continue
            try:
                while self.progress.remaining:
                    self._boundary()
                    self._step()
            except TrainingOver:
                self._skip()
                continue
            if self.done != (1 << job.length) - 1:
                raise Violation(f"{self.worker} ends epoch {self.epoch} with positions {self.done:b}")
            self._evaluate()
            self.epoch += 1
            self.done = 0
            self.progress = EpochProgress(self.epoch, job.length)
            if self._streamed is not None and self.epoch < job.epochs:
                self._streamed.begin(self.epoch)
        self._mark("closing")
        self._gather("closing", None)
        session.trainings.end()
        session.close()
        session.stop()
        self._invariants.finished(self._result())

    def _result(self) -> Result:
        job = self.job
        if job.global_batch and self.fingerprint != undisturbed(job):
            raise Violation(f"{self.worker} has made other updates than one worker alone would have made")
        total = sum(gradient(epoch, position) for epoch in range(job.epochs) for position in range(job.length))
        return Result(self.worker, self.life, self.updates, self.weights, self.base + total, self.fingerprint)

    # ------------------------------------------------------------ trainings

    def _begin_training(self) -> bool:
        """Do something that takes time; whether the training that follows is over already."""
        self._mark("between")
        self._sleep(self._delay(0.1))
        self.session.trainings.begin(self.epoch + 1)
        if self.session.trainings.is_behind:
            self._skip()
            return True
        return False

    def _skip(self) -> None:
        if not self.session.newcomer or self.epoch + 1 >= self.job.epochs:
            raise Violation(f"{self.worker} skips training {self.epoch + 1} of {self.job.epochs}")
        self._note("skipped")
        self.session.trainings.skip(has_result=False)
        self.epoch += 1
        self.progress = EpochProgress(self.epoch, self.job.length)

    # ------------------------------------------------------------ the loop

    def _gather(self, label: str, value: Any) -> tuple[View, list[Any]]:
        operation = GatherBytes(json.dumps(value).encode(), label)
        view = self._run(operation, label)
        return view, list(map(json.loads, operation.parts))

    def _run(self, operation: Operation, label: str) -> View:
        watched = Watched(operation, label, mark=self._mark, note=self._note)
        view = self.session.run(watched)
        watched.end(self.session.view.generation)
        return view

    def _exchange_ends(self, value: Any) -> tuple[list[Any], View]:
        self._mark("ends")
        self._note("ends exchanged")
        view, values = self._gather(f"ends {self.epoch}/{self.progress.steps}", value)
        return values, view

    def _broadcast(self) -> None:
        """Everybody begins with the weights of rank 0; a newcomer, still alone, keeps its own."""
        _, values = self._gather("broadcast", [self.life, self.base])
        self.life, self.base = values[0]
        self.weights = self.base

    def _agree_on_store(self) -> None:
        if self.session.newcomer:
            return
        stores = self._gather("store", self._store)[1] if self._store else [""]
        if len(set(stores)) == 1:
            self._use_store(self._store)

    def _use_store(self, store: str) -> None:
        self._agreed = store
        self.session.job.use_store(store)

    def _boundary(self) -> None:
        if self._streamed is not None and self.progress.uncommitted:
            return  # as in the plugins
        self._mark("boundary")
        if self.session.newcomer:
            self._mark("join")
            self.session.join()
        else:
            self.session.boundary()
        if self.session.newcomer or not self.progress.remaining:
            raise Violation(f"{self.worker} trains without a state, or after the end of the epoch")

    def _streamed_step(self, streamed: StreamedEpoch) -> None:
        dealt = streamed.deal()
        if dealt is None:
            return
        self.session.begin_step()
        self._mark("forward")
        total, count = self._forward(dealt[1])
        self._end_step(total, count)

    def _step(self) -> None:
        job = self.job
        if self._streamed is not None:
            self._streamed_step(self._streamed)
            return
        global_batch = GlobalBatch(job.global_batch, job.piece) if job.global_batch else None
        self.progress, window = sharding.deal(
            self.progress, self.members, batch_size=job.batch_size, global_batch=global_batch
        )
        self.session.begin_step()
        self._mark("forward")
        self._pieces = Pieces(window, self.worker, batch_size=job.batch_size) if global_batch else None
        slots: Sequence[int] = range(*window.slice_of(self.worker))
        if self._pieces is not None:
            slots = self._pieces.slots(self._pieces.mine)
        total, count = self._forward(self.progress.positions_at(slots))
        self._end_step(total, count)

    def _end_step(self, total: int, count: int) -> None:
        job = self.job
        self._total += total
        self._count += count
        steps = self.progress.steps
        if steps % job.accumulate == 0 or not self.progress.remaining:
            self._reduce()
        if job.metrics_every and steps % job.metrics_every == 0:
            self._mark("metrics")
            _, values = self._gather(f"metrics {self.epoch}/{steps}", self.fingerprint)
            if any(value != self.fingerprint for value in values):
                raise Violation(f"weights differ after step {steps} of epoch {self.epoch}: {values}")

    def _forward(self, positions: list[int]) -> tuple[int, int]:
        """The sum of the gradients of these samples of the epoch, and their number."""
        self._invariants.computed(self.life, self.epoch, positions)
        self._sleep(self._delay(self.job.step_s))
        return sum(gradient(self.epoch, position) for position in positions), len(positions)

    def _make_up(self, operation: Reduction, pieces: Pieces, some: Sequence[int]) -> None:
        self._mark("make_up")
        self._note("made up")
        operation.add(*self._forward(self.progress.positions_at(pieces.slots(some))))

    def _reduction(self) -> Reduction:
        reduction = Reduction(
            self.session,
            f"reduction {self.updates}",
            buffers=self._buffers[self.updates % len(self._buffers)],
            windows=self.progress.uncommitted,
            total=self._total,
            count=self._count,
            value=self._value_of(self.worker),
            pieces=self._pieces,
            finds=self._streamed is not None and self._streamed.turns.finds(),
            mark=self._mark,
            note=self._note,
        )
        if self._pieces is not None:
            self._pieces.compute = partial(self._make_up, reduction, self._pieces)
        return reduction

    def _backward(self, operation: Reduction) -> None:
        """A backward pass: in each worker, gradients are ready in an order of its own."""
        num, turn = self.job.num_buckets, self._value_of(self.worker)
        operation.begin_backward(twice=self.job.accumulates_twice and turn % 3 == 0)
        for number in range(num):
            self._sleep(self._delay(self.job.step_s / num))
            operation.gradient_ready(self.job.num_values + (number + turn) % num)
        operation.end_backward()

    def _value_of(self, worker: str) -> int:
        """What a worker has at this update, and all take if it is rank 0."""
        return crc32(worker.encode()) + self.updates

    def _reduce(self) -> None:
        operation, label = self._reduction(), f"reduction {self.updates}"
        if self.job.overlap:
            self._backward(operation)
        view = self._run(operation, label)
        confirmation = Confirmation(self.session, [0.0]) if self.job.lends and view.world_size > 1 else None
        if confirmation is not None:
            confirmation.start()
        self._mark("reduced")
        self.session.agree(operation.flags.num_changes)
        if confirmation is not None:
            self._wait_for_all(confirmation)
        if self._streamed is not None:
            self._streamed.turns.heard(operation.flags.num_finds)
            commit = Commit(self._streamed.commit(view), ())
        else:
            self.progress, commit = sharding.commit(self.progress, view.ids)
        if commit.returned:
            self._note("returned")
        self._check(operation, commit, view)
        self._update(operation)
        record = Record(
            self.life,
            self.updates - 1,
            epoch=self.epoch,
            view=(view.generation, view.ids),
            committed=commit.committed,
            fingerprint=self.fingerprint,
            made_at=self._now(),
        )
        self.session.when_confirmed(lambda: self._invariants.confirmed(self.worker, record))

    def _wait_for_all(self, confirmation: Confirmation) -> None:
        self._run(confirmation, f"confirmation {self.updates}")

    def _check(self, operation: Reduction, commit: Commit, view: View) -> None:
        self.done = add_once(self.done, commit.committed, what=f"{self.worker}, epoch {self.epoch}")
        gradients = [
            gradient(self.epoch, position) for start, stop in commit.committed for position in range(start, stop)
        ]
        mean = sum(gradients) / len(gradients) if gradients else 0.0
        flags, here = operation.flags, f"{self.worker}, update {self.updates}"
        if operation.sums != [sum(gradients)] * self.job.num_buckets or not abs(flags.mean - mean) < _TOLERANCE:
            raise Violation(f"{here}: sums {operation.sums}, mean {flags.mean} do not belong to {commit.committed}")
        if not abs(flags.weight - bool(gradients)) < _TOLERANCE:
            raise Violation(f"{here}: the weights sum to {flags.weight}")
        if operation.values != [self._value_of(view.ids[0])] * self.job.num_values:
            raise Violation(f"{here}: {operation.values} are not of {view.ids[0]}")

    def _update(self, operation: Reduction) -> None:
        update = int(operation.sums[0])
        self.weights += update
        self.fingerprint = _next(self.fingerprint, update)
        if self.job.lends:
            self._buffers[0].spoil()
        self.updates += 1
        self._invariants.made(self.life, self.updates)
        self._total = self._count = 0

    def _evaluate(self) -> None:
        """Each its share; the shares of those that are lost are dealt again to those that are left."""
        todo = list(range(self.job.num_validation))
        covered: list[int] = []
        turn = 0
        while todo:
            self._mark("evaluate")
            members = self.members
            shares = {}
            for rank, member in enumerate(members):
                low, high = sharding.share(len(todo), len(members), rank)
                shares[member] = todo[low:high]
            self._sleep(self._delay(self.job.step_s))
            view, values = self._gather(f"evaluation {self.epoch}/{turn}", shares[self.worker])
            if values != [shares[member] for member in view.ids]:
                raise Violation(f"{self.worker} expected the shares {shares} of {view.ids}, and got {values}")
            covered += [sample for value in values for sample in value]
            todo = [sample for member in members if member not in view.ids for sample in shares[member]]
            turn += 1
        found = (self.worker, self.life, self.epoch, covered, self.job.num_validation)
        self.session.when_confirmed(lambda: self._invariants.evaluated(*found))

    def save(self) -> None:
        """Everybody leaves: keep what this worker holds."""
        self._mark("save")
        self._sleep(self._delay(0.2))
        self._invariants.saved(self.worker, self.life, self.updates)

    # ------------------------------------------------------------ state for newcomers

    def prepare(self) -> None:
        """See the port."""

    def describe(self) -> bytes:
        """See the port."""
        self._mark("send_state")
        state = {
            "life": self.life,
            "store": self._agreed,
            "base": self.base,
            "epoch": self.epoch,
            "updates": self.updates,
            "done": self.done,
            "progress": self.progress._asdict(),
            "stream": None if self._streamed is None else self._streamed.state(),
        }
        return json.dumps(state).encode()

    def tensors(self, header: bytes | None) -> Sequence[Any]:
        """See the port."""
        if header is None:
            return [[self.weights, self.fingerprint]]
        self._mark("receive_state")
        self._room = [0, 0]
        return [self._room]

    def restore(self) -> bool:
        """There are no checkpoints; but the store is there."""
        self._use_store(self._store)
        return False

    def adopt(self, header: bytes) -> None:
        """See the port."""
        state = json.loads(header)
        if state["store"] is not None and state["store"] == self._store:
            self._use_store(self._store)
        if self.job.trainings and state["epoch"] != self.epoch:
            raise Violation(f"{self.worker} comes from training {self.epoch + 1} into {state['epoch'] + 1}")
        self.weights, self.fingerprint = self._room
        self.life, self.base = state["life"], state["base"]
        self.epoch, self.updates, self.done = state["epoch"], state["updates"], state["done"]
        self.progress = _progress(state["progress"])
        if self._streamed is not None:
            self._streamed.load_state(state["stream"])
