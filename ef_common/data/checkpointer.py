"""Checkpoints of one training: the one that it starts from, and when the next one is taken.

Rank 0 takes them, and a new rank 0 continues. All members know the run, so any of them can do so.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ef_common.collectives import operations
from ef_common.core.cadence import Cadence, Pace
from ef_common.core.checks import is_count
from ef_common.core.lineage import CheckpointId
from ef_common.core.retention import Retention
from ef_common.core.view import View
from ef_common.data.sharing import Sharing, SharingPlan
from ef_common.data.source import Release, Source, SourceState
from ef_common.errors import UsageError
from ef_common.events import EventLog
from ef_common.session import Session
from ef_common.storage.checkpoints import Checkpoint, Checkpoints, Content
from ef_common.storage.layout import FileLayout
from ef_common.storage.retries import Retries
from ef_common.storage.saver import Saver, Snapshot
from ef_common.storage.store import Store

logger = logging.getLogger(__name__)

_LAST_WRITE_S = 10.0
_FINAL_WRITE_S = 1200.0
"""A store that hangs longer than this at the end of a training is an error: nobody would notice otherwise."""
_TOLD_S = 60.0
"""Rank 0 tells the others this often that it still saves, or they would take it for hung (`core.progress`)."""
_START = Retries(total=timedelta(minutes=5)).warning(logger)
"""Without knowing what lies in the store, nobody can say where to begin."""
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0)
"""Between two looks of workers that find different checkpoints: a network file system may cache for a minute."""
_MOST_TOLD = 4

Turn = Literal["alone", "together"]
"""How a checkpoint is taken."""


@dataclass(frozen=True)
class Checkpointing:
    """Where checkpoints go, and when they are taken.

    Args:
        url: Anything that fsspec can reach: ``s3://bucket/run``, ``gs://bucket/run``, ``/mnt/shared/run``. A
            `Path` becomes text.
        every_steps: Number of updates between two checkpoints.
        every: Take a checkpoint at this interval. Without both, the interval is computed from what a checkpoint costs
            and how often workers are lost; see :mod:`ef_common.core.cadence`.
        retention: Which checkpoints are kept.
        storage_options: Options of fsspec's filesystem.
        share_bytes: States of at least this size are written by all workers together, where the framework's plugin and
            the store support it.

    Raises:
        UsageError: A value is of another type or out of range, or values contradict each other.
    """

    url: str | Path
    every_steps: int | None = None
    every: timedelta | None = None
    retention: Retention = field(default_factory=Retention)
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    share_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        Cadence(self.every_steps, self.every)
        if not is_count(self.share_bytes, least=0):
            raise UsageError(f"expected a size. Received: share_bytes={self.share_bytes!r}")
        if isinstance(self.url, Path):
            if (first := self.url.parts[:1]) and len(first[0]) > 2 and first[0].endswith(":"):
                raise UsageError(f"pass a URL as text: a Path drops a slash of it. Received: checkpoint={self.url!r}")
            object.__setattr__(self, "url", str(self.url))
        if not isinstance(self.url, str) or not self.url.strip():
            raise UsageError(f"checkpoints need a URL, or the path of a folder. Received: checkpoint={self.url!r}")
        if not isinstance(self.retention, Retention | None):
            raise UsageError(f"expected Retention(keep_last=…). Received: retention={self.retention!r}")
        if not isinstance(self.storage_options, Mapping | None):  # which may have secrets, so it is not shown
            raise UsageError(
                "expected a dict of options for fsspec. "
                f"Received: storage_options of the type {type(self.storage_options).__name__}"
            )

    @classmethod
    def of(cls, value: Checkpointing | str | Path | None, *, default: str | None = None) -> Checkpointing | None:
        """The settings from what a user has passed, or from the environment's URL."""
        if value is None and default:
            return cls(default)
        if not isinstance(value, Checkpointing | str | Path | None):
            raise UsageError(
                f"expected a URL, or what `Checkpointing` makes of one and more. Received: checkpoint={value!r}"
            )
        return value if isinstance(value, Checkpointing) or value is None else cls(value)

    def of_training(self, number: int) -> Checkpointing:
        """The settings for the n-th training (from 0) of a program, which has a place of its own."""
        return self if number == 0 else replace(self, url=f"{str(self.url).rstrip('/')}/training-{number + 1:03d}")


class Checkpointer:
    """Checkpoints of one training.

    Args:
        settings: Where, and when.
        session: The worker's session.
        source: The state to save.
        log: Event log of the worker.
        excluded: See :class:`~ef_common.storage.checkpoints.Checkpoints`.

    Attributes:
        found: The checkpoint that this training has started from.
    """

    def __init__(
        self,
        settings: Checkpointing,
        session: Session,
        source: Source,
        *,
        log: EventLog,
        excluded: Callable[[int], bool] = lambda generation: False,
    ) -> None:
        self._settings = settings
        self._session = session
        self._source = source
        self._log = log
        self._checkpoints = Checkpoints(Store(settings.url, settings.storage_options), excluded=excluded)
        self._cadence = Cadence(settings.every_steps, settings.every)
        self._pace = Pace.begin(time.monotonic(), 0)
        self._members: frozenset[str] = frozenset()
        self._saver: Saver | None = None
        self._sharing = Sharing(session, self._checkpoints.store, least_bytes=settings.share_bytes)
        self.found: Checkpoint | None = None

    # ------------------------------------------------------------ start

    def begin(self, model: str) -> Checkpoint | None:
        """Find what to start from, and claim the run. All members of a first view call this together.

        Args:
            model: Identity of the model; see `fingerprint`.

        Raises:
            UsageError: A checkpoint of another model; or the workers find different ones, as on disks of their own.
            StorageFailed: The store cannot be read.
        """
        return self._begin(partial(self._agree, model), self._claim_together)

    def _begin(
        self, find: Callable[[int | None], object], claim: Callable[[int | None], tuple[int, bool]]
    ) -> Checkpoint | None:
        """Find a checkpoint and claim a run, until no older job has gone on in between. Both get the first such run."""
        first: int | None = None
        while True:
            find(first)
            run, is_newest = claim(first)
            if is_newest:
                break
            first = first or run
            logger.warning(
                "%s: an older job has published or removed checkpoints before this one had begun, which looks again",
                self._checkpoints.store,
            )
        self._join(run)
        return self.found

    def _agree(self, model: str, before: int | None) -> None:
        """Find the same checkpoint as all other members. It is read only once all have listed the same one."""
        for pause_s in (*_PAUSES_S, None):
            listed = _START(self._checkpoints.newest_valid, verify=False, before=before)
            names, view = self._names(listed)
            if len(set(names)) == 1:
                self._find(model, before)
                names, view = self._names(self.found)
                if len(set(names)) == 1:
                    return
            if pause_s is None:
                raise UsageError(
                    f"{self._checkpoints.store} is not one place for all workers: after {sum(_PAUSES_S):.0f} s they "
                    "still find different checkpoints. Expected: a store that all nodes reach, or a shared file system "
                    f"that is mounted on each of them. Received: {_seen(names, view)}"
                )
            logger.warning("the workers find different checkpoints, and look again. Received: %s", _seen(names, view))
            time.sleep(pause_s)

    def _names(self, found: Checkpoint | None) -> tuple[list[str | None], View]:
        """What each member has found, and the view of these members."""
        mine = None if found is None else found.id.name
        return operations.gather(self._session, mine, what="name of a checkpoint")

    def _claim_together(self, before: int | None) -> tuple[int, bool]:
        """Claim a run in one of the members, whose verdict is that of all."""
        while True:
            mine = self._claim(before) if _first(self._session) == self._session.worker.id else None
            claims, _ = operations.gather(self._session, mine, what="number of a run")
            found: list[tuple[int, bool]] = [(run, is_newest) for run, is_newest in filter(None, claims)]
            if found:
                return max(found)  # else rank 0 was lost while it claimed one

    def _claim(self, before: int | None) -> tuple[int, bool]:
        """Claim a run. Returns its number, and whether what was found is the newest, now that older runs have ended.

        Args:
            before: The first run that this start has claimed; None if this is it.
        """
        found = None if self.found is None else self.found.id
        run: int = _START(self._checkpoints.claim, found)
        return run, _START(self._checkpoints.newest, before=before or run) == found

    def look(self, model: str) -> Checkpoint | None:
        """In a newcomer that skips this training: find its result, if the end of it was saved.

        Raises:
            UsageError, StorageFailed: As `begin`.
        """
        self._find(model)
        if self.found is not None and self.found.complete is None:
            self.found = None
        return self.found

    def begin_again(self, model: str) -> Checkpoint | None:
        """Like `begin`, in one worker that then hands everything on, because all who had a state are lost."""
        return self._begin(partial(self._find, model), self._claim)

    def _find(self, model: str, before: int | None = None) -> None:
        self.found = None  # its memory is needed
        found: Checkpoint | None = _START(self._checkpoints.newest_valid, keep=True, before=before)
        if found is not None and found.manifest.model not in (None, model):
            raise UsageError(
                "the checkpoints there are of another model: other names, shapes or types of parameters. Use another "
                f"URL for this one, or remove them. Received: {self._checkpoints.store}, {found.id.name}"
            )
        self.found = found

    def _join(self, run: int) -> None:
        self._checkpoints.join(run, None if self.found is None else self.found.id)
        step = 0 if self.found is None else self.found.id.step
        self._session.stats.checkpoint_step = None if self.found is None else step
        self._pace = Pace.begin(time.monotonic(), step, workers=max(1, self._session.world_size))
        where = "" if self.found is None else f", from step {step} ({self.found.id.name})"
        logger.info("run %d at %s%s", run, self._checkpoints.store, where)
        self._log.write("run", run=run, resumed=None if self.found is None else self.found.id.name)
        if self.found is None and run > 1:
            self._log.write("rollback", generation=self._session.view.generation, step=0, epoch=0)

    def open(self, name: str) -> BinaryIO:
        """Open a file of the checkpoint that was found: in memory, or in the store after `let_go`. Close it.

        Raises:
            ValueError: Nothing was found.
        """
        if self.found is None:
            raise ValueError(f"there is no checkpoint to read. Received: name={name!r}")
        return self._checkpoints.open(self.found, name)

    def let_go(self) -> None:
        """Free the memory with the files of the checkpoint that was found: they are loaded."""
        if self.found is not None:
            self.found = replace(self.found, kept={})

    # ------------------------------------------------------------ what newcomers need

    def state(self) -> dict[str, Any]:
        """The state for newcomers, as plain values."""
        parent = None if self.found is None else self.found.id.name
        return {"run": self._checkpoints.run, "parent": parent}

    def load_state(self, state: dict[str, Any]) -> None:
        """Join the run of the other workers."""
        parent = state["parent"]
        self._checkpoints.join(state["run"], None if parent is None else CheckpointId.parse(parent))

    # ------------------------------------------------------------ while it runs

    def boundary(self, step: int) -> Turn | None:
        """Between two steps: take a checkpoint if one is due. All members call this at each boundary.

        Args:
            step: Updates that were made.

        Returns:
            How it was taken.
        """
        turn = None if self._session.newcomer else self._turn(step)
        if turn == "alone":
            self.take(step)
        elif turn == "together":
            self._share(step)
        return turn

    def _turn(self, step: int) -> Turn | None:
        if self._session.agreements.take_wish(self._session.completed_in):
            return "together"
        if not self._due(step + 1):
            return None
        saver = self._saver
        if saver is None or not saver.num_held:
            self._sharing.settle(None if saver is None else saver.saved)
            if self._sharing.wish(step, self._source.num_bytes):
                return None
        return "alone" if self._due(step) else None

    def _due(self, step: int) -> bool:
        """Whether this worker takes a checkpoint now."""
        self._follow_members()
        if self._session.rank != 0 or self._checkpoints.run is None:
            return False
        if self._saver is not None and self._saver.num_held > int(self._saver.failing):
            return False  # one copy is enough, and a second one while the store fails
        return self._cadence.is_due(self._pace, time.monotonic(), step)

    def _follow_members(self) -> None:
        members = frozenset(self._session.completed_in.ids)
        if members != self._members:
            losses = len(self._members - members)
            self._pace = self._pace.with_workers(time.monotonic(), max(1, len(members)), losses=losses)
            self._members = members

    def take(self, step: int, *, complete: Mapping[str, Any] | None = None) -> None:
        """Take a checkpoint, which is written while the training continues.

        Args:
            step: Updates that were made.
            complete: The training has ended with this: what to say of the end.
        """
        begin = time.monotonic()
        saver = self._started_saver()
        id = saver.saved if saver.saved is not None and saver.saved.step == step else self._id(step)
        content, release = self._source.state(whole=True).copy()
        self._sharing.written_alone()
        self._submit(Snapshot(id, content, release, complete=complete), begin)

    def _share(self, step: int) -> None:
        """Take a checkpoint with all other members, or alone if they have agreed on that."""
        begin = time.monotonic()
        busy = self._saver is not None and self._saver.num_held > 0
        offered: list[SourceState] = []

        def offer() -> FileLayout:
            offered.append(self._source.state(whole=True))
            return offered[0].layout()

        plan = self._sharing.agree(self._id(step), offer, busy=busy)
        if plan is None:
            return
        if plan.pieces:
            content, release = _share_of(offered[0] if offered else self._source.state(whole=False), plan)
            self._submit(Snapshot(plan.id, content, release, publishes=plan.leads), begin)
        elif plan.leads:
            self.take(step)

    def _id(self, step: int) -> CheckpointId:
        return CheckpointId(self._checkpoints.run or 0, self._session.completed_in.generation, step)

    def _submit(self, snapshot: Snapshot, begin: float) -> None:
        self._started_saver().submit(snapshot)
        now = time.monotonic()
        self._pace = self._pace.with_taken(now, snapshot.id.step).with_stall(now - begin)

    def _started_saver(self) -> Saver:
        if self._saver is None:
            self._saver = Saver(
                self._checkpoints, retention=self._settings.retention, log=self._log, on_saved=self._saved
            )
            self._saver.start()
            atexit.register(self.stop)  # an error may end the process while something is written
        return self._saver

    def _saved(self, id: CheckpointId, seconds: float) -> None:
        self._session.stats.checkpoint_step = id.step
        self._pace = self._pace.with_write(seconds)

    # ------------------------------------------------------------ end

    def finish(self, step: int, *, complete: Mapping[str, Any], timeout_s: float = _FINAL_WRITE_S) -> None:
        """The training is complete, so the current rank 0 saves it. All members call this together.

        Costs one small exchange, and another one for each minute that the writing takes.

        Args:
            step: Updates that were made.
            complete: What to say of the end.
            timeout_s: The writing may take this long.

        Raises:
            StorageError: The state could not be saved.
        """
        session, saved, until = self._session, [False], 0.0
        while not any(saved):  # rank 0 still writes, or was lost
            mine = False
            if _first(session) == session.worker.id:
                if not until:
                    until = time.monotonic() + timeout_s
                    self._take_last(step, complete)
                wait_s = min(_TOLD_S, until - time.monotonic())
                mine = self._saver is None or self._saver.flush(wait_s)
                if mine or wait_s < _TOLD_S:
                    self._close(timeout_s=0.0)
            saved, _ = operations.gather(session, mine, call="last checkpoint of the training")

    def is_complete(self, end: Mapping[str, Any]) -> bool:
        """Whether the checkpoint that was found is that of a training that ended with these limits."""
        return self.found is not None and self.found.complete == end

    def save(self, step: int, *, complete: Mapping[str, Any] | None = None, timeout_s: float = _FINAL_WRITE_S) -> None:
        """Save the newest state, and wait until it is saved. Nothing is saved after that. The others do not wait.

        Raises:
            StorageError: The state could not be saved.
        """
        self._take_last(step, complete)
        self._close(timeout_s)

    def _take_last(self, step: int, complete: Mapping[str, Any] | None) -> None:
        if not self._is_saved(step, complete):
            self.take(step, complete=complete)

    def _close(self, timeout_s: float) -> None:
        atexit.unregister(self.stop)
        if self._saver is not None:
            self._saver.close(timeout_s)
            self._saver = None

    def _is_saved(self, step: int, complete: Mapping[str, Any] | None) -> bool:
        """Whether this step has a checkpoint; at an end, whether the one that was found records the same end."""
        if complete is not None:
            return self.found is not None and self.found.id.step == step and self.is_complete(complete)
        saved = None if self._saver is None else self._saver.saved
        return saved is not None and saved.step == step

    def stop(self, timeout_s: float = _LAST_WRITE_S) -> None:
        """Save nothing more; pending writes have this long to finish. May be repeated."""
        atexit.unregister(self.stop)
        if self._saver is not None:
            self._saver.stop(timeout_s)
            self._saver = None


def _share_of(state: SourceState, plan: SharingPlan) -> tuple[Content, Release]:
    for path, kind in plan.layout.kinds.items():
        if (found := state.kind_of(path)) != kind:
            problem = f"its state differs from rank 0's at {path}. Expected: {kind}. Received: {found}"
            return Content({state.file: plan.no_file(problem)}), lambda: None
    bytes_of, release = state.copy_parts(plan.layout.slices(plan.mine))
    file = plan.file(partial(plan.layout.write, bytes_of=bytes_of))
    return state.content(file) if plan.leads else Content({state.file: file}), release


def agree_on_place(session: Session, *, has_place: bool) -> None:
    """Find out whether all have a place for checkpoints, or none. All members of a first view call this together.

    Args:
        session: The worker's session.
        has_place: Whether this worker has one.

    Raises:
        UsageError: Some have one and others have none: these would make other calls.
    """
    places, view = operations.gather(session, "a place" if has_place else None, what="place for checkpoints")
    if len(set(places)) > 1:
        raise UsageError(
            "some workers have a place for checkpoints, and others have none. Set checkpoint= or "
            f"ELASTICFLOW_CHECKPOINT alike on all nodes. Received: {_seen(places, view)}"
        )


def _seen(names: Sequence[str | None], view: View) -> str:
    """What the nodes have found, for a message."""
    finders: dict[str, dict[str, None]] = {}
    for name, member in zip(names, view.members, strict=True):
        finders.setdefault(name or "none", {})[member.node] = None
    parts = []
    for name, nodes in finders.items():
        more = f" and {len(nodes) - _MOST_TOLD} more nodes" if len(nodes) > _MOST_TOLD else ""
        parts.append(f"{name} on {', '.join(list(nodes)[:_MOST_TOLD])}{more}")
    return "; ".join(parts)


def _first(session: Session) -> str:
    return (session.completed_in.ids or (session.worker.id,))[0]


def fingerprint(parts: Iterable[tuple[str, Iterable[int], str]]) -> str:
    """The identity of a model: names, shapes and types of its parameters."""
    digest = hashlib.blake2b(digest_size=16)
    for name, shape, kind in parts:
        digest.update(f"{name} {tuple(shape)} {kind}\n".encode())
    return digest.hexdigest()
