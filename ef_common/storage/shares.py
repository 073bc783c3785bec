"""Shares: several workers write one file of a checkpoint, some pieces each.

Until the file is published, these lie beside it::

    lightning.ckpt.shared           where files can be written in ranges: all write into it; it is renamed at last
    lightning.ckpt.part-001         elsewhere: the first piece, an object of its own; the store joins them at last
    lightning.ckpt.part-001.json    the first piece is written, or cannot be; created exclusively

The file has another name while it is written, so a worker that was cut off and continues later writes into nothing that
anybody reads. Only one worker publishes: the one that waits for the others.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from ef_common.errors import InvalidCheckpoint, NotFound, ShareMissing
from ef_common.storage import manifest as manifests
from ef_common.storage.manifest import StoredFile
from ef_common.storage.store import Store, Way, Writer

MOST_WORKERS = 32
"""Maximal number of workers that share a file; some stores join no more parts at once."""

PAGE_BYTES = 65536
"""Pieces end at multiples of it: caches of file systems are written back in pages. It is the largest page of a system
that runs trainings; some of ARM and POWER have it."""

_LEAST_PART = (5 << 20) + PAGE_BYTES
LEAST_BYTES: dict[Way, int] = {"ranges": PAGE_BYTES, "parts": _LEAST_PART, "few parts": _LEAST_PART}
"""Minimal size of a worker's share. Object stores join no parts smaller than 5 MiB."""

MOST_BYTES: dict[Way, int] = {"ranges": 4 << 30, "parts": 4 << 30, "few parts": 5 << 40}
"""Maximal size of a piece. S3 copies no parts larger than 5 GiB; Google's objects have 5 TiB at most."""

_SHARED = ".shared"
_LEFTOVER = re.compile(r"(.+)\.(?:shared|part-[0-9]{3,}(?:\.json)?)")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 2.0


class SharePiece(NamedTuple):
    """A range of a file, and the worker that writes it."""

    start: int
    stop: int
    worker: str

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


def cut(size: int, workers: Sequence[str], way: Way, *, most: int | None = None) -> tuple[SharePiece, ...]:
    """Divide a file among workers, equally as far as pages and the smallest share allow.

    Args:
        size: Of the file.
        workers: Who can take part, in order.
        way: What the store can do.
        most: Maximal size of a piece; by default `MOST_BYTES`.

    >>> cut(150_000, ["a", "b"], "ranges")
    (SharePiece(start=0, stop=65536, worker='a'), SharePiece(start=65536, stop=150000, worker='b'))
    """
    num_workers = max(1, min(len(workers), MOST_WORKERS, size // LEAST_BYTES[way]))
    num_each = max(1, -(-size // (num_workers * (most or MOST_BYTES[way]))))
    num = num_workers * num_each
    borders = [size * index // num // PAGE_BYTES * PAGE_BYTES for index in range(num)] + [size]
    ranges = enumerate(itertools.pairwise(borders))
    return tuple(SharePiece(start, stop, workers[index // num_each]) for index, (start, stop) in ranges)


@dataclass(frozen=True, slots=True, eq=False)
class SharedFile:
    """A file that several workers write, as one of them sees it.

    Args:
        pieces: The pieces and their writers, in order.
        worker: This worker.
        write: Writes the bytes from an offset to another one. It may be called again after a failure.
        is_here: Whether a worker still is a member.
        timeout_s: How long to wait for the others, after this worker has written.
        problem: Why this worker cannot write.
    """

    pieces: tuple[SharePiece, ...]
    worker: str
    write: Callable[[Writer, int, int], object]
    is_here: Callable[[str], bool] = lambda worker: True
    timeout_s: float = 300.0
    problem: str | None = None

    @property
    def size(self) -> int:
        """Size of the whole file."""
        return self.pieces[-1].stop


def write_share(store: Store, name: str, file: SharedFile) -> None:
    """Write this worker's pieces, and record that they are there."""
    way = store.shares
    for number, piece in enumerate(file.pieces, 1):
        told = f"{_part(name, number)}.json"
        if piece.worker != file.worker or (file.problem is None and _written(store, told, piece)):
            continue  # an attempt before this one has: what it wrote may be in its last place by now
        checksum = None
        if file.problem is None:
            part = _part(name, number)
            with store.range_writer(name + _SHARED, piece.start) if way == "ranges" else store.writer(part) as writer:
                file.write(writer, piece.start, piece.stop)
            if writer.size != piece.size:
                raise ValueError(f"expected {piece.size} bytes of {name}. Received: {writer.size}")
            checksum = writer.checksum
        record = {**piece._asdict(), "checksum": checksum, "problem": file.problem}
        store.create(told, manifests.sealed(record, "share"))


def join_shares(store: Store, name: str, file: SharedFile, *, pause: Callable[[float], object]) -> StoredFile:
    """Wait until all pieces are there, and make the file from them.

    Args:
        store: Where it is.
        name: The file's.
        file: What is expected; this worker has written its pieces.
        pause: Waits for this many seconds, or raises if waiting is useless.

    Raises:
        ShareMissing: A worker has not written what it was to.
        StorageFailed: The store has failed.
    """
    checksums = _wait(store, name, file, pause)
    if store.shares != "ranges":
        store.join([_part(name, number) for number in range(1, len(file.pieces) + 1)], name)
    elif _size(store, name + _SHARED) is not None:  # else an attempt before this one has renamed it
        store.rename(name + _SHARED, name)
    size = _size(store, name)
    if size != file.size:
        raise ShareMissing(f"{name} has {size} bytes instead of {file.size}: do all workers see the same files?")
    return StoredFile(file.size, "", tuple(zip((piece.size for piece in file.pieces), checksums, strict=True)))


def leftovers(names: Iterable[str], files: Iterable[str]) -> list[str]:
    """Leftovers of writing these files in their folder.

    >>> leftovers(["a", "a.part-001", "a.part-001.json", "a.shared", "b.shared"], ["a"])
    ['a.part-001', 'a.part-001.json', 'a.shared']
    """
    known = set(files)
    return [
        name for name in names if name not in known and (found := _LEFTOVER.fullmatch(name)) and found.group(1) in known
    ]


class PieceChecksums:
    """Checks the pieces of a file, whose bytes come in order.

    Args:
        pieces: Size and checksum of each.
    """

    def __init__(self, pieces: Sequence[tuple[int, str]]) -> None:
        self._left = list(reversed(pieces))
        self._digest, self._done, self._equal = xxhash.xxh3_128(), 0, True

    def update(self, data: bytes | memoryview) -> None:
        """Process the next bytes."""
        view = memoryview(data)
        while self._left and len(view):
            size, checksum = self._left[-1]
            room = size - self._done
            self._digest.update(view[:room])
            self._done += min(room, len(view))
            view = view[room:]
            if self._done == size:
                self._equal &= self._digest.hexdigest() == checksum
                self._left.pop()
                self._digest, self._done = xxhash.xxh3_128(), 0

    @property
    def hold(self) -> bool:
        """Whether all pieces were there, and as they were written."""
        return self._equal and not self._left


# ---------------------------------------------------------------- waiting


def _wait(store: Store, name: str, file: SharedFile, pause: Callable[[float], object]) -> list[str]:
    """Checksums of all pieces, once they are there."""
    checksums: dict[int, str] = {}
    deadline = time.monotonic() + file.timeout_s
    seconds = _FIRST_PAUSE_S
    while True:
        gone = {piece.worker for piece in file.pieces if not file.is_here(piece.worker)}  # first: they may be done
        for number, piece in enumerate(file.pieces, 1):
            if number not in checksums and (found := _written(store, f"{_part(name, number)}.json", piece)):
                checksums[number] = found
        missing = [piece.worker for number, piece in enumerate(file.pieces, 1) if number not in checksums]
        if not missing:
            return [checksums[number] for number in sorted(checksums)]
        lost = sorted(gone & set(missing))
        if lost:
            raise ShareMissing(f"{lost[0]} was lost before it had written its share of {name}")
        if time.monotonic() > deadline:
            raise ShareMissing(f"{missing[0]} has not written its share of {name} after {file.timeout_s:.0f} s")
        pause(seconds)
        seconds = min(2 * seconds, _LONGEST_PAUSE_S)


def _written(store: Store, name: str, piece: SharePiece) -> str | None:
    """Checksum of a piece, if it is there."""
    try:
        found = manifests.opened(store.read(name), name, "share")
    except (NotFound, InvalidCheckpoint):  # it may be on its way
        return None
    if found.get("problem"):
        raise ShareMissing(f"{piece.worker} cannot write its share: {found['problem']}")
    if {key: found.get(key) for key in SharePiece._fields} != piece._asdict() or not found.get("checksum"):
        raise ShareMissing(f"{name} tells of something else. Expected: {piece}. Received: {found}")
    return str(found["checksum"])


def _part(name: str, number: int) -> str:
    return f"{name}.part-{number:03d}"


def _size(store: Store, name: str) -> int | None:
    folder, _, last = name.rpartition("/")
    return next((entry.size for entry in store.entries(folder) if entry.name == last), None)
