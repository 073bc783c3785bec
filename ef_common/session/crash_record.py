"""What a worker records of its current work, for its launcher to read when the worker has died."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ef_common.files import write_whole

MAX_RANGES = 16
"""Maximal number of ranges of positions in a record; only the first ones fit."""
_STATE = struct.Struct("<8sQBBqqddQQQ")  # magic, changes, in a step, excused, epoch, step, first and newest time,
# number of positions, number of ranges, changes again
_COUNTER = struct.Struct("<Q")
_RANGE = struct.Struct("<QQ")
_COUNTER_AT, _IN_STEP_AT, _EXCUSED_AT = 8, 16, 17
_MAGIC = b"EFNOTE01"
_LIFE = struct.Struct("<QQH512s")  # heartbeats, process id, length of the id in bytes, id
_LIFE_AT = _STATE.size + MAX_RANGES * _RANGE.size
_TRAINS_AT = _LIFE_AT + _LIFE.size
SIZE = _TRAINS_AT + 1
_FAILED, _LEFT, _ASKED = "failed", "left", "asked"
_MAX_FAILED_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Crash:
    """The content of a worker's crash record.

    Args:
        epoch: Epoch of its newest step; -1 if it has made none.
        step: Number of the update.
        in_step: Whether it was in the step, and not after it.
        ranges: Half-open ranges of the positions that it worked on, at most `MAX_RANGES`.
        num_positions: How many there were.
        trained_s: From the beginning of its first step to that of its newest.
        excused: Whether it has ended because of a fault elsewhere.
    """

    epoch: int
    step: int
    in_step: bool
    ranges: tuple[tuple[int, int], ...]
    num_positions: int
    trained_s: float
    excused: bool


@dataclass(frozen=True, slots=True)
class Life:
    """A worker's sign of life.

    Args:
        worker: Its id.
        pid: Id of its process.
        beats: Heartbeats so far.
    """

    worker: str
    pid: int
    beats: int


class CrashRecord:
    """A worker's crash record, which its launcher reads.

    Args:
        directory: Where it is kept; by default in memory, where nobody reads it.
        local_rank: Index of the worker on its node.
        clock: Monotonic time in seconds.

    Raises:
        OSError: The directory has no room, or cannot be written.

    Attributes:
        epoch: Epoch of the newest step; -1 before the first.
        step: Number of the update.
    """

    def __init__(
        self, directory: Path | None = None, local_rank: int = 0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._buffer: bytearray | mmap.mmap = bytearray(SIZE)
        if directory is not None:
            descriptor = os.open(path_of(directory, local_rank), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, SIZE)  # a page that finds no room later on is a SIGBUS
                self._buffer = mmap.mmap(descriptor, SIZE)
            finally:
                os.close(descriptor)
        self._clock = clock
        self._changes = 0
        self._beats = 0
        self._first = -1.0
        self.epoch = -1
        self.step = 0
        self.begin(-1, 0, [])
        self._first = -1.0

    @property
    def is_read(self) -> bool:
        """Whether anybody may read the record."""
        return self._directory is not None

    def at(self, epoch: int, step: int) -> None:
        """Note that a step begins; used where nobody reads the record."""
        self.epoch, self.step = epoch, step

    def begin(self, epoch: int, step: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Note that a step begins on these positions."""
        now = self._clock()
        if self._first < 0:
            self._first = now
        self.epoch, self.step = epoch, step
        self._changes += 1
        _COUNTER.pack_into(self._buffer, _COUNTER_AT, self._changes)  # who dies from here on leaves no valid record
        kept, total = ranges[:MAX_RANGES], sum(stop - start for start, stop in ranges)
        for number, one in enumerate(kept):
            _RANGE.pack_into(self._buffer, _STATE.size + number * _RANGE.size, *one)
        _STATE.pack_into(
            self._buffer, 0, _MAGIC, self._changes, 1, 0, epoch, step, self._first, now, total, len(kept), self._changes
        )

    def end(self) -> None:
        """Note that the step has ended."""
        self._buffer[_IN_STEP_AT] = 0

    def begin_training(self) -> None:
        """Note that the program has come to a training: an end of the process is not that of the training now."""
        self._buffer[_TRAINS_AT] = 1

    def end_training(self) -> None:
        """Note that the training has ended normally. The program may do anything now, or end in any way."""
        self._buffer[_TRAINS_AT] = 0

    def excuse(self) -> None:
        """Note that this worker ends because of a fault elsewhere."""
        self._buffer[_EXCUSED_AT] = 1

    def introduce(self, worker: str) -> None:
        """Note which worker this process is; `beat` follows."""
        name = worker.encode()
        _LIFE.pack_into(self._buffer, _LIFE_AT, 0, os.getpid(), len(name), name)

    def beat(self) -> None:
        """Note that the heartbeat thread runs. If these times stop, the whole process stands still."""
        self._beats += 1
        _COUNTER.pack_into(self._buffer, _LIFE_AT, self._beats)

    def rest(self) -> None:
        """Note that no more heartbeats are to be expected."""
        _COUNTER.pack_into(self._buffer, _LIFE_AT, 0)

    def fail(self, why: str) -> None:
        """Note that the job has failed."""
        if self._directory is not None:
            write_failure(self._directory, why)

    def leave(self) -> None:
        """Note that this worker leaves the job, which goes on or has a checkpoint: its program is not at its end."""
        if self._directory is not None:
            write_left(self._directory)

    def finish(self) -> None:
        """Note that nothing is left for this worker to train, whichever others of its node have left before."""
        self.end_training()
        if self._directory is not None:
            with contextlib.suppress(OSError):
                (self._directory / _LEFT).unlink(missing_ok=True)


def path_of(directory: Path, local_rank: int) -> Path:
    """File of the record of a worker."""
    return directory / f"worker-{local_rank}"


def read(path: Path) -> Crash | None:
    """A worker's crash record; None if there is none, or if the worker died while it wrote it."""
    data = _data(path)
    if data is None:
        return None
    _, changes, in_step, excused, epoch, step, first, newest, total, number, again = _STATE.unpack_from(data)
    if changes != again or number > MAX_RANGES:
        return None
    ranges = tuple(_RANGE.unpack_from(data, _STATE.size + index * _RANGE.size) for index in range(number))
    return Crash(epoch, step, bool(in_step) and epoch >= 0, ranges, total, newest - first, bool(excused))


def in_training(path: Path) -> bool:
    """Whether the program of the worker with this record has come to a training, and not to its end."""
    data = _data(path)
    return data is not None and data[_TRAINS_AT] == 1


def ended_early(directory: Path) -> bool:
    """Whether the workers with records in a directory, which have ended with status 0, have done so before the end.

    They have left the job, or their programs have ended in a training. Where there are no records, nothing is trained.
    """
    records = list(directory.glob("worker-*"))
    return has_left(directory) or (bool(records) and all(map(in_training, records)))


def lives(directory: Path) -> dict[Path, Life]:
    """Signs of life of all workers with records in a directory from which heartbeats are expected."""
    return {path: life for path, life in _introduced(directory).items() if life.beats}


def pids(directory: Path) -> list[int]:
    """Process ids of the workers with records in a directory, of which some may have ended."""
    return [life.pid for life in _introduced(directory).values() if life.pid]


def _introduced(directory: Path) -> dict[Path, Life]:
    found = {}
    for path in directory.glob("worker-*"):
        data = _data(path)
        if data is not None:
            beats, pid, length, name = _LIFE.unpack_from(data, _LIFE_AT)
            found[path] = Life(name[:length].decode(errors="replace"), pid, beats)
    return found


def _data(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data if len(data) == SIZE and data.startswith(_MAGIC) else None


def write_failure(directory: Path, why: str) -> None:
    """Record, for the launcher, that the job has failed. An error of writing is ignored."""
    with contextlib.suppress(OSError):
        write_whole(directory / _FAILED, why.encode(errors="replace"))


def read_failure(directory: Path) -> str:
    """Why the job has failed, as recorded here; "" if it has not."""
    try:
        with (directory / _FAILED).open("rb") as file:
            return file.read(_MAX_FAILED_BYTES).decode(errors="replace")
    except OSError:
        return ""


def has_left(directory: Path) -> bool:
    """Whether all workers with records in a directory have left the job before its end."""
    return (directory / _LEFT).exists()


def write_left(directory: Path) -> None:
    """Record that the workers with records in a directory have left the job. An error of writing is ignored."""
    with contextlib.suppress(OSError):
        write_whole(directory / _LEFT, b"")


def ask_to_leave(directory: Path) -> None:
    """Record that workers with records in a directory are told to leave: if one dies of that, none is started again.

    An error of writing is ignored.
    """
    with contextlib.suppress(OSError):
        (directory / _ASKED).touch()


def is_asked_to_leave(directory: Path) -> bool:
    """Whether workers with records in a directory were told to leave."""
    return (directory / _ASKED).exists()
