"""The checkpoints of a job in a store.

::

    runs/000002.json                                            the second start, and where it started from
    claims/… markers/…                                          which workers continue; see `claims`
    checkpoints/run-000002-generation-000005-step-000000123/    one checkpoint
        lightning.ckpt …                                        data, written once
        manifest.json                                           last, created exclusively
        complete.json                                           after it, if the training had ended

A folder without a manifest is not a checkpoint. One with a manifest is used only if every file is there, with its size
and checksum. `ef_common.core.lineage` has the rules of which checkpoints may be taken and who may publish, and
`ef_common.core.retention` those of which are removed. Other names in the store are left alone.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from ef_common.core.lineage import CheckpointId, RunClaim, fence, lineage, next_run
from ef_common.core.retention import Retention, StoredFiles, removable
from ef_common.errors import (
    AlreadyExists,
    Fenced,
    InvalidCheckpoint,
    NewerFormat,
    NotFound,
    StorageFailed,
    UsageError,
)
from ef_common.storage import manifest as manifests
from ef_common.storage.manifest import Manifest, StoredFile
from ef_common.storage.memory_file import MemoryFile
from ef_common.storage.shares import PieceChecksums, SharedFile, join_shares, leftovers, write_share
from ef_common.storage.store import Entry, Store, Writer

RUNS = "runs"
FOLDER = "checkpoints"

WriteFile = Callable[[Writer], object]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that may be used.

    Args:
        id: Which one.
        manifest: Its manifest.
        kept: Its files, verified, if they were to be kept.
        complete: The training had ended with it: what was said of the end; else None.
    """

    id: CheckpointId
    manifest: Manifest
    kept: Mapping[str, memoryview] = field(default_factory=dict, repr=False)
    complete: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a new checkpoint.

    Args:
        files: By name, functions that write them. They may be called again after a failure. Or files that several
            workers write.
        progress: See `Manifest`, also for the others.
    """

    files: Mapping[str, WriteFile | SharedFile]
    progress: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    model: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


class Checkpoints:
    """Claims, publishes, finds and removes checkpoints. Operations block and can be called again after a failure.

    Args:
        store: Where they are.
        clock: Seconds since the epoch, for the manifests.
        excluded: Whether others than this worker have the claim of a view with this generation, or a newer one: then
            it publishes nothing. Raises StorageFailed if that cannot be known.

    Attributes:
        run: The run that this process is part of; set by `claim` or `join`.

    Raises:
        StorageFailed: By all operations. The store did not do it, which says nothing of what lies there.
        NewerFormat: By all operations that meet what a newer version wrote.

    Example:
        >>> checkpoints = Checkpoints(Store("memory://doctest-checkpoints"))
        >>> checkpoints.newest_valid() is None, checkpoints.claim(parent=None)
        (True, 1)
        >>> content = Content({"weights": lambda file: file.write(b"1, 2, 3")}, progress={"epoch": 4})
        >>> published = checkpoints.publish(CheckpointId(run=1, generation=1, step=10), content)
        >>> found = checkpoints.newest_valid()
        >>> found.id.step, found.manifest.progress, checkpoints.open(found, "weights").read()
        (10, {'epoch': 4}, b'1, 2, 3')
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = time.time,
        excluded: Callable[[int], bool] = lambda generation: False,
    ) -> None:
        self.store = store
        self.run: int | None = None
        self._excluded = excluded
        self._parent: CheckpointId | None = None
        self._clock = clock
        self._writer = uuid.uuid4().hex
        self._manifests: dict[CheckpointId, Manifest] = {}
        self._valid: set[CheckpointId] = set()
        self._passed_over: set[CheckpointId] = set()  # by the newest search

    # ------------------------------------------------------------ runs

    def claim(self, parent: CheckpointId | None) -> int:
        """Begin the next run, as the only worker to do so.

        Args:
            parent: The checkpoint that this start resumes from; None if it starts from nothing, which makes all
                older checkpoints things of the past.

        Returns:
            The number of the run.
        """
        claim = {"parent": parent.name if parent else None, "writer": self._writer, "created": self._clock()}
        while True:
            claims = self._claims()
            run = next_run(self._folders(), claims)
            try:
                self.store.create(_claim_name(run), manifests.sealed(claim, "run"))
            except AlreadyExists:
                continue  # somebody was faster
            self._warn_of_shared(run, claim)
            self.join(run, parent)
            return run

    def _warn_of_shared(self, run: int, claim: Mapping[str, Any]) -> None:
        """Detect a store that ignores the condition of an exclusive creation, by a second creation."""
        with contextlib.suppress(AlreadyExists):
            self.store.create(_claim_name(run), manifests.sealed({**claim, "again": True}, "run"))
            _logger.warning(
                "%s does not create exclusively: it lets one writer write over another. Make sure that never two jobs "
                "use this URL at once",
                self.store,
            )

    def join(self, run: int, parent: CheckpointId | None = None) -> None:
        """Join a run that another worker has claimed."""
        self.run, self._parent = run, parent

    # ------------------------------------------------------------ write

    def publish(self, id: CheckpointId, content: Content, *, pause: Callable[[float], object] = time.sleep) -> Manifest:
        """Write a checkpoint: data first, then the manifest. What older writes that did not end have left goes before.

        Args:
            id: Which one.
            content: The content of the checkpoint.
            pause: How to wait for others that write shares of it; what it raises ends that.

        Raises:
            Fenced: A newer run or generation has gone on.
            ShareMissing: Another worker has not written its share.
            UsageError: A name that a file must not have.
            Exception: What a function of `content` raised.
        """
        bad = [name for name in content.files if not manifests.is_file_name(name)]
        if bad:
            raise UsageError(f"Expected plain names of files, other than {manifests.NAME}. Received: {bad}")
        if self._published(id):
            return self._manifests[id]
        self._make_room(id, shared=any(isinstance(write, SharedFile) for write in content.files.values()))
        files = {name: self._write(f"{_folder(id)}/{name}", write, pause) for name, write in content.files.items()}
        manifest = Manifest(
            id=id,
            files=files,
            writer=self._writer,
            created=self._clock(),
            parent=self._parent.name if self._parent else None,
            progress=content.progress,
            metrics={name: manifests.finite(value) for name, value in content.metrics.items()},
            model=content.model,
            versions=content.versions,
        )
        self._check_fence(id)  # again: writing took a while
        try:
            self.store.create(f"{_folder(id)}/{manifests.NAME}", manifest.encode())
        except AlreadyExists:
            raise Fenced(f"{id.name} was published by another worker", final=False) from None
        self._remember(manifest)
        return manifest

    def mark_complete(self, id: CheckpointId, end: Mapping[str, Any]) -> None:
        """Record that the training has ended with this published checkpoint.

        Args:
            id: Which one.
            end: What to say of the end, as JSON.
        """
        try:
            self.store.create(f"{_folder(id)}/{manifests.COMPLETE}", manifests.sealed(end, "end"))
        except AlreadyExists:
            _logger.warning("%s: checkpoint %s is marked as the end of another training", self.store, id.name)

    def contribute(self, id: CheckpointId, content: Content) -> int:
        """Write this worker's shares of a checkpoint that another worker publishes.

        Returns:
            How many bytes they have.

        Raises:
            Fenced: A newer run or generation has gone on.
            Exception: What a function of `content` raised.
        """
        self._check_fence(id)
        shared = {name: file for name, file in content.files.items() if isinstance(file, SharedFile)}
        for name, file in shared.items():
            write_share(self.store, f"{_folder(id)}/{name}", file)
        return sum(p.size for file in shared.values() for p in file.pieces if p.worker == file.worker)

    def _published(self, id: CheckpointId) -> bool:
        """Whether an attempt that was reported as failed has published the checkpoint after all."""
        if id not in self._check_fence(id):
            return False
        try:
            writer = self._manifest(id).writer
        except InvalidCheckpoint:  # an attempt that failed in the middle, and could not clean up
            self.store.delete(f"{_folder(id)}/{manifests.NAME}")
            return False
        if writer != self._writer:
            raise Fenced(f"{id.name} was published by another worker", final=False)
        self._valid.add(id)
        return True

    def _check_fence(self, id: CheckpointId) -> list[CheckpointId]:
        claims = {run: RunClaim(None, readable=False) for run in self._claimed()}  # their numbers are all that matters
        newer = [one for one in self._folders() if one == id or one[:2] > id[:2]]  # (run, generation)
        published = [one for one in newer if self._has_manifest(one)]
        found = fence(id, published, claims)
        if found is not None:
            raise Fenced(f"{id.name} must not be published: {found.reason}", final=found.final)
        if self._excluded(id.generation):
            raise Fenced(f"{id.name} must not be published: others have the claim to continue", final=False)
        return published

    def _make_room(self, id: CheckpointId, *, shared: bool) -> None:
        """Remove the folders of older checkpoints that were not published, or they might fill the store for ever.

        Only the writer of an older view could still publish one of them, if it is cut off or leaves: it then has an
        incomplete one. Costs a request for each checkpoint that this process has not seen.

        Args:
            id: The checkpoint to be written.
            shared: Whether others may have written shares of it. Otherwise an attempt to share it was given up.
        """
        try:
            for one in self._folders():
                is_over = one < id or (one == id and not shared)
                if is_over and one not in self._manifests and not self._is_published(one):
                    self.store.delete_folder(_folder(one))
        except StorageFailed as error:
            _logger.warning("%s: what is left of broken writes cannot be removed: %s", self.store, error)

    def _is_published(self, id: CheckpointId) -> bool:
        """Whether it has a manifest, by its name: a listing may be out of date."""
        try:
            self.store.read(f"{_folder(id)}/{manifests.NAME}")
        except NotFound:
            return False
        return True

    def _write(self, name: str, write: WriteFile | SharedFile, pause: Callable[[float], object]) -> StoredFile:
        if isinstance(write, SharedFile):
            write_share(self.store, name, write)
            return join_shares(self.store, name, write, pause=pause)
        with self.store.writer(name) as writer:
            write(writer)
        return StoredFile(writer.size, writer.checksum)

    # ------------------------------------------------------------ read

    def newest_valid(self, *, verify: bool = True, keep: bool = False, before: int | None = None) -> Checkpoint | None:
        """The checkpoint to start from. With `verify`, each one that is passed over gets one log line that says why.

        An older job may go on meanwhile, and remove what was listed; so the store is listed anew after each of them.

        Args:
            verify: Read all data and compare the checksums; otherwise only that the files are there, with their sizes.
            keep: Keep the files in memory, so that they need not be read again.
            before: As if this run and newer ones had not begun.

        Raises:
            NewerFormat: A newer version wrote the newest one, or a claim.
        """
        self._passed_over.clear()
        while (id := self.newest(before=before)) is not None:
            try:
                return self._checked(id, verify=verify, keep=keep)
            except InvalidCheckpoint as error:
                level = logging.WARNING if verify else logging.DEBUG
                _logger.log(level, "%s: checkpoint %s is passed over: %s", self.store, id.name, error)
                self._passed_over.add(id)
        return None

    def newest(self, *, before: int | None = None) -> CheckpointId | None:
        """The newest checkpoint that a start may take, without a look into it, and which was not passed over.

        Args:
            before: See `newest_valid`.
        """
        older = [one for one in self._folders() if before is None or one.run < before]
        claims = {run: claim for run, claim in self._claims().items() if before is None or run < before}
        chain = lineage([one for one in older if self._has_manifest(one)], claims)
        return next((one for one in chain if one not in self._passed_over), None)

    def open(self, checkpoint: Checkpoint, name: str) -> BinaryIO:
        """Open one of its files for reading, from memory if it was kept. Close it.

        Raises:
            KeyError: It has no such file.
        """
        _ = checkpoint.manifest.files[name]
        if name in checkpoint.kept:
            return cast(BinaryIO, MemoryFile(checkpoint.kept[name]))
        return self.store.open(f"{_folder(checkpoint.id)}/{name}")

    def _checked(self, id: CheckpointId, *, verify: bool, keep: bool) -> Checkpoint:
        manifest = self._manifest(id)
        entries = self.store.entries(_folder(id))
        problem = _incomplete(manifest, entries)
        if problem:
            raise InvalidCheckpoint(problem)
        kept: dict[str, memoryview] = {}
        if verify or keep:
            for name, file in manifest.files.items():
                if keep:
                    kept[name] = _memory(file.size)
                self._verify(f"{_folder(id)}/{name}", file, kept.get(name))
            self._valid.add(id)
        return Checkpoint(id, manifest, kept, self._end(id, entries))

    def _end(self, id: CheckpointId, entries: Sequence[Entry]) -> dict[str, Any] | None:
        name = f"{_folder(id)}/{manifests.COMPLETE}"
        if all(entry.name != manifests.COMPLETE for entry in entries):
            return None
        try:
            return manifests.opened(self.store.read(name), name, "end")
        except (InvalidCheckpoint, NotFound) as error:  # the training goes on for a little, and is marked again
            _logger.warning("%s: %s", self.store, error)
            return None

    def _verify(self, name: str, file: StoredFile, target: memoryview | None) -> None:
        pieces = PieceChecksums(file.pieces)
        try:
            found = self.store.copy(name, pieces.update) if target is None else self.store.read_into(name, target)
        except NotFound:
            raise InvalidCheckpoint(f"{name} is missing") from None
        if file.pieces:
            pieces.update(memoryview(b"") if target is None else target)
            found = (found[0], "" if pieces.hold else "another one")
        if found != (file.size, file.checksum):
            raise InvalidCheckpoint(f"{name} has been changed: its checksum differs")

    # ------------------------------------------------------------ remove

    def clean(self, retention: Retention) -> list[CheckpointId]:
        """Remove checkpoints that are no longer kept, and leftovers of broken writes of this run and older ones.

        Returns:
            What was removed.
        """
        if self.run is None:
            return []
        found = {id: self.store.entries(_folder(id)) for id in self._folders()}
        stored = [self._stored(id, entries) for id, entries in found.items()]
        for one in stored:
            if one.complete and one.id.run <= self.run:
                self._remove_leftovers(one.id, found[one.id])
        chain = lineage([one.id for one in stored if one.complete], self._claims())
        reasons = removable(stored, retention, chain=chain, valid=self._valid, run=self.run)
        removed = []
        for id, reason in reasons.items():
            if max(self._claimed(), default=0) > self.run:
                break  # the newer run may start from what this one would remove
            _logger.debug("%s: checkpoint %s is removed: %s", self.store, id.name, reason)
            self.store.delete_folder(_folder(id), first=manifests.NAME)  # half of a removal is no checkpoint
            self._manifests.pop(id, None)
            self._valid.discard(id)
            removed.append(id)
        return removed

    def _remove_leftovers(self, id: CheckpointId, entries: Sequence[Entry]) -> None:
        """Remove leftovers of the sharing of a published checkpoint, which nobody needs."""
        for name in leftovers([entry.name for entry in entries], self._manifest(id).files):
            self.store.delete(f"{_folder(id)}/{name}")

    def _stored(self, id: CheckpointId, entries: Sequence[Entry]) -> StoredFiles:
        if all(entry.name != manifests.NAME for entry in entries):
            return StoredFiles(id, complete=False)
        try:
            manifest = self._manifest(id)
        except InvalidCheckpoint:
            return StoredFiles(id, complete=False)
        except NewerFormat:
            return StoredFiles(id, complete=False, foreign=True)
        return StoredFiles(id, complete=_incomplete(manifest, entries) is None, metrics=manifest.metrics)

    # ------------------------------------------------------------ what lies there

    def _folders(self) -> list[CheckpointId]:
        """Identities of the folders whose names are those of checkpoints."""
        found = (CheckpointId.parse(entry.name) for entry in self.store.entries(FOLDER) if entry.size is None)
        return [id for id in found if id is not None]

    def _has_manifest(self, id: CheckpointId) -> bool:
        return any(entry.name == manifests.NAME for entry in self.store.entries(_folder(id)))

    def _manifest(self, id: CheckpointId) -> Manifest:
        """The manifest of a checkpoint, which never changes and is read once."""
        if id not in self._manifests:
            try:
                found = Manifest.decode(self.store.read(f"{_folder(id)}/{manifests.NAME}"))
            except NotFound:
                raise InvalidCheckpoint("its manifest is missing") from None
            if found.id != id:
                raise InvalidCheckpoint(f"its manifest is that of {found.id.name}")
            self._manifests[id] = found
        return self._manifests[id]

    def _remember(self, manifest: Manifest) -> None:
        self._manifests[manifest.id] = manifest
        self._valid.add(manifest.id)

    def _claimed(self) -> list[int]:
        stems = [entry.name.removesuffix(".json") for entry in self.store.entries(RUNS)]
        return [int(stem) for stem in stems if stem.isdecimal() and _claim_name(int(stem)) == f"{RUNS}/{stem}.json"]

    def _claims(self) -> dict[int, RunClaim]:
        return {run: self._claim(run) for run in self._claimed()}

    def _claim(self, run: int) -> RunClaim:
        try:
            parent = manifests.opened(self.store.read(_claim_name(run)), f"the claim of run {run}", "run")["parent"]
            found = None if parent is None else CheckpointId.parse(parent)
        except (InvalidCheckpoint, NotFound, KeyError, TypeError):
            return RunClaim(None, readable=False)
        return RunClaim(found, readable=(parent is None) == (found is None))


def _folder(id: CheckpointId) -> str:
    return f"{FOLDER}/{id.name}"


def _claim_name(run: int) -> str:
    return f"{RUNS}/{run:06d}.json"


def _memory(size: int) -> memoryview:
    """Memory that is not initialized."""
    # Not shared, though it is the default: such memory is slower to fill. Not in large pages: they are faster, except
    # where the system has to make room for them first, which takes far longer than all of the reading.
    return memoryview(mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:size]


def _incomplete(manifest: Manifest, entries: Sequence[Entry]) -> str | None:
    """The missing parts of a checkpoint, according to the listing of its folder."""
    sizes = {entry.name: entry.size for entry in entries}
    for name, file in manifest.files.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != file.size:
            return f"{name} has {sizes[name]} bytes instead of {file.size}"
    return None
