"""The event log: what each worker saw and did, one JSON line per event.

A run directory holds ``events/<worker>.jsonl``, one file per worker and one writer per file. A line is one
``write(2)`` to an append-only descriptor: what was written before a SIGKILL stays, and only the last line of
a file can be torn. `ef_common.audit` proves the guarantees of a run from these files alone.

Position lists are half-open ranges, ``[[start, stop], ...]``.
"""

from __future__ import annotations

import heapq
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol
from urllib.parse import quote

from ef_common.errors import UsageError

__all__ = ["MAX_LINE_BYTES", "VERSION", "EventLog", "EventLogError", "Record", "expand", "path_of", "ranges", "read"]

VERSION = 1
MAX_LINE_BYTES = 1 << 20

Record = dict[str, Any]

_ENVELOPE = frozenset({"v", "time", "worker", "kind"})
_INT_LIMIT = 1 << 62  # the audit computes in int64
TIME_LIMIT_S = 1e11
"""A moment is so many seconds from the epoch at most: the year 5138. Calendars end somewhere."""
_CHUNK_BYTES = 1 << 16
_FOLDER, _ENDING = "events", ".jsonl"
_DISPENSABLE = frozenset({"stream"})
"""Fields without which an event is written if it is too long with them."""
_logger = logging.getLogger(__name__)


class EventLogError(UsageError):
    """An event log that cannot be written as requested, or cannot be read."""


def ranges(positions: Iterable[int]) -> list[list[int]]:
    """Compress positions into half-open ranges, keeping their order.

    Args:
        positions: Integers in any order; a numpy array or a tensor will do.

    Returns:
        ``[[start, stop], ...]`` such that ``expand`` gives the positions back.

    Example:
        >>> ranges([4, 5, 6, 2, 9])
        [[4, 7], [2, 3], [9, 10]]
    """
    if isinstance(positions, range) and positions.step == 1:
        return [[positions.start, positions.stop]] if positions else []
    if hasattr(positions, "tolist"):  # arrays: python integers, which are what JSON takes, and much faster
        positions = positions.tolist()
    found: list[list[int]] = []
    stop: int | None = None
    for position in positions:
        if position == stop:
            stop += 1
            found[-1][1] = stop
        else:
            stop = position + 1
            found.append([position, stop])
    return found


def expand(spans: Iterable[Sequence[int]]) -> list[int]:
    """Return the positions of half-open ranges, in order: the inverse of `ranges`.

    Example:
        >>> expand([[4, 7], [2, 3]])
        [4, 5, 6, 2]
    """
    return [position for start, stop in spans for position in range(start, stop)]


def num_samples(step: Record, name: str) -> float:
    """Number of samples that a field of an event `step` stands for.

    Args:
        step: The event.
        name: ``committed``, ``mine`` or ``returned``.
    """
    if name == "committed" and "samples" in step:
        return float(step["samples"])
    num_positions: int = sum(stop - start for start, stop in step[name])
    return num_positions * float(step.get("samples_per_position", 1))


class Listener(Protocol):
    """Receives the events of this process as they are written.

    Attributes:
        waits: It also needs those that callers prepare for a log alone, such as that of each step.
    """

    @property
    def waits(self) -> bool: ...

    def take(self, record: Record) -> None:
        """Process an event that has been written."""


class EventLog:
    """Append-only log of one worker.

    Training never dies of its log: at the first ``OSError`` (a full disk, a lost mount) it warns once and
    drops every later event. It does not try again, so that a half-written line remains the last of its file.

    Args:
        run_dir: Directory of the run, or None for a log that keeps nothing.
        worker: Id of this worker, unique in the run directory while it is alive.
        listener: Hears of each event, also if none is kept.

    Example:
        >>> with EventLog(None, "a") as log:
        ...     log.write("end", reason="done")
    """

    def __init__(self, run_dir: Path | None, worker: str, *, listener: Listener | None = None) -> None:
        if not worker:
            raise EventLogError(f"A worker id is a non-empty string. Received: worker={worker!r}")
        self.worker = worker
        self.path = None if run_dir is None else path_of(Path(run_dir), worker)
        self._fd: int | None = None
        self._dropping = run_dir is None
        self._listener = listener
        self._oversized = False
        self._lock = threading.RLock()

    @property
    def enabled(self) -> bool:
        """Whether anybody receives events; callers may otherwise skip preparing them."""
        return not self._dropping or (self._listener is not None and self._listener.waits)

    def write(self, kind: str, /, **fields: Any) -> None:
        """Append one event; its time and worker are added.

        Floats that are not finite become null, as JSON has none.

        Raises:
            EventLogError: If a field has a name of the envelope (v, time, worker, kind).
            TypeError: If a field is not JSON.
        """
        if self._dropping and self._listener is None:
            return
        if not _ENVELOPE.isdisjoint(fields):
            raise EventLogError(f"The log itself sets {sorted(_ENVELOPE)}. Received: {sorted(fields)}")
        record = {"v": VERSION, "time": time.time(), "worker": self.worker, "kind": kind, **fields}
        if self._listener is not None:
            self._listener.take(record)
            if self._dropping:
                return
        data = _line_of(record)
        if len(data) > MAX_LINE_BYTES and not _DISPENSABLE.isdisjoint(record):
            data = _line_of({name: value for name, value in record.items() if name not in _DISPENSABLE})
        if len(data) > MAX_LINE_BYTES:
            self._drop_oversized(kind, len(data))
            return
        try:
            with self._lock:  # else another thread could close the file, and its number be that of another one
                written = os.write(self._open(), data)
            if written != len(data):
                raise OSError(f"only {written} of {len(data)} bytes were written")
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            self._dropping = True
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> int:
        if self._fd is None:
            if self.path is None or self._dropping:
                raise OSError("the log is closed")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                _cut_torn_line(fd)
            except OSError:
                os.close(fd)
                raise
            self._fd = fd
        return self._fd

    def _give_up(self, error: OSError) -> None:
        if self._dropping:  # closed by another thread meanwhile: nothing is wrong
            return
        _logger.warning("Event log %s: %s. Training goes on; events are no longer logged.", self.path, error)
        self.close()

    def _drop_oversized(self, kind: str, size: int) -> None:
        if not self._oversized:
            self._oversized = True
            message = "Event log %s: dropped a %r event of %d bytes (the limit is %d); said once."
            _logger.warning(message, self.path, kind, size, MAX_LINE_BYTES)


def read(run_dir: Path) -> Iterator[Record]:
    """Yield the events of a run, of one worker after the other, checked field by field.

    What workers write after the first event has been asked for is left out.

    The last line of a file may be torn (its worker was killed while writing) and is then left out. Kinds
    that this version does not know are yielded with only their envelope checked.

    Args:
        run_dir: Directory of the run.

    Raises:
        EventLogError: If there is no event log, it cannot be read, or a line is malformed; names file and line.
    """
    files = files_of(Path(run_dir))
    if not files:
        raise no_log(run_dir)
    sizes = [file.stat().st_size for file in files]
    for file, size in zip(files, sizes, strict=True):
        yield from _read_file(file, size)


def files_of(run_dir: Path) -> list[Path]:
    """The logs of the workers of a run, sorted; none if there is no folder of them.

    Raises:
        EventLogError: The folder cannot be read.
    """
    folder = run_dir / _FOLDER
    try:
        with os.scandir(folder) as entries:  # `glob` takes a folder that cannot be read for an empty one
            return sorted(folder / entry.name for entry in entries if entry.name.endswith(_ENDING))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise EventLogError(f"{folder} cannot be read: {error.strerror}") from error


def no_log(run_dir: Path) -> EventLogError:
    """The error that says that a directory holds no event log."""
    return EventLogError(
        f"No event log in {run_dir}: expected files events/<worker>.jsonl. "
        "A job writes them when ELASTICFLOW_RUN_DIR names its run directory."
    )


class Follower:
    """Continues to read a run's event log where it stopped, while the run goes on.

    Args:
        run_dir: Directory of the run.
        checked: Check events field by field, as `read` does.
    """

    def __init__(self, run_dir: Path, *, checked: bool = False) -> None:
        self._run_dir = Path(run_dir)
        self._parse = _checked if checked else _unchecked
        self._read: dict[Path, int] = {}

    def news(self) -> Iterator[Record]:
        """Yield events that were not yielded before.

        Each worker's come in the order of its file, and all of them in the order of time. They are read as they are
        asked for, so that the log of a long run needs little memory: 64 KiB for each worker. A line that is still being
        written comes the next time.

        Raises:
            EventLogError: A file or their folder cannot be read, or a line is malformed or no JSON object with this
                version and a time; names the file.
        """
        return heapq.merge(*map(self._read_on, files_of(self._run_dir)), key=_time_of)

    def _read_on(self, path: Path) -> Iterator[Record]:
        size = _CHUNK_BYTES
        while True:
            try:
                with path.open("rb") as file:
                    file.seek(self._read.get(path, 0))
                    data = file.read(size)
            except FileNotFoundError:  # removed since it was listed
                return
            except OSError as error:
                raise EventLogError(f"{path} cannot be read: {error.strerror}") from error
            whole, newline, _ = data.rpartition(b"\n")
            if not newline:
                if len(data) > MAX_LINE_BYTES:
                    raise EventLogError(f"{path}: a line is longer than {MAX_LINE_BYTES} bytes")
                if len(data) < size:
                    return
                size *= 2  # one line is longer
                continue
            for line in whole.split(b"\n"):
                self._read[path] = self._read.get(path, 0) + len(line) + 1
                yield self._parse(line, path)


def _time_of(record: Record) -> float:
    return float(record["time"])


def _checked(line: bytes, path: Path) -> Record:
    try:
        return _parse(line, path)
    except (ValueError, RecursionError) as error:
        raise EventLogError(f"{path}: {error}") from error


def _unchecked(line: bytes, path: Path) -> Record:
    try:
        record: Record = json.loads(line)
        _time_of(record)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise EventLogError(f"{path}: a line is no event: {line[:100]!r}") from error
    try:
        _require_version(record)
    except ValueError as error:
        raise EventLogError(f"{path}: {error}") from error
    return record


def path_of(run_dir: Path, worker: str) -> Path:
    """The log of a worker in the directory of a run."""
    return run_dir / _FOLDER / _name_of(worker)


def _name_of(worker: str) -> str:
    # Ids may hold ':' or '/': quoting keeps one file per id, inside the directory.
    return quote(worker, safe="") + _ENDING


def _cut_torn_line(fd: int) -> None:
    """Remove the unfinished line of a killed predecessor with the same id, so that only last lines are torn."""
    size = os.fstat(fd).st_size
    tail = os.pread(fd, MAX_LINE_BYTES, max(0, size - MAX_LINE_BYTES))
    torn = len(tail) - (tail.rfind(b"\n") + 1)
    if torn:
        os.ftruncate(fd, size - torn)


def _plain(value: object) -> object:
    """Turn an array or a scalar of numpy or torch into plain numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"An event holds only JSON. Received: {value!r} of type {type(value).__name__}")


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False, default=_plain)
_encode = _ENCODER.encode


def _line_of(record: Record) -> bytes:
    try:
        line = _encode(record)
    except ValueError:
        line = _encode(finite(record))
    return f"{line}\n".encode()


def finite(value: Any) -> Any:
    """Copy a record with null for every float that is not finite."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if hasattr(value, "tolist"):
        return finite(value.tolist())
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def _read_file(file: Path, size: int) -> Iterator[Record]:
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(min(size, MAX_LINE_BYTES + 1)):
            number += 1
            size -= len(line)
            if len(line) > MAX_LINE_BYTES:
                raise EventLogError(f"{file}:{number}: the line is longer than {MAX_LINE_BYTES} bytes")
            if not line.endswith(b"\n"):
                return  # torn: only the last line of a file can lack its end
            try:
                yield _parse(line, file)
            except (ValueError, RecursionError) as error:
                raise EventLogError(f"{file}:{number}: {error}") from error


def _parse(line: bytes, file: Path) -> Record:
    record = _DECODER.decode(line.decode("utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object. Received: {type(record).__name__}")
    _require_version(record)
    _require_fields(record)
    if _name_of(record["worker"]) != file.name:
        raise ValueError(f"a file holds the events of one worker. Received: worker={record['worker']!r}")
    return record


def _require_version(record: Record) -> None:
    if record.get("v") != VERSION or type(record["v"]) is not int:
        raise ValueError(f"expected version v={VERSION}. Received: v={record.get('v')!r}")


def _require_fields(record: Record) -> None:
    _require(record, _ENVELOPE_FIELDS)
    _require(record, _FIELDS.get(record["kind"], {}))
    _require(record, {name: _OPTIONAL_FIELDS[name] for name in record if name in _OPTIONAL_FIELDS})


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _require(record: Record, fields: Mapping[str, Check]) -> None:
    for name, check in fields.items():
        if name not in record:
            raise ValueError(f"a {record.get('kind')!r} event needs the field {name!r}")
        if not check(record[name]):
            raise ValueError(
                f"field {name!r} of a {record.get('kind')!r} event is malformed. "
                f"Received: {name}={str(record[name])[:100]}"
            )


Check = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _INT_LIMIT


def _positive(value: Any) -> bool:
    return _count(value) and value >= 1


def _training(value: Any) -> bool:
    return _positive(value) and value <= 1_000_000


def _integer(value: Any) -> bool:
    return type(value) is int and -_INT_LIMIT < value < _INT_LIMIT


def _number(value: Any) -> bool:
    return _integer(value) or (type(value) is float and math.isfinite(value))  # JSON's 1e999 becomes infinite


def _above_zero(value: Any) -> bool:
    return _number(value) and 0 < value < _INT_LIMIT


def _moment(value: Any) -> bool:
    return _number(value) and abs(value) < TIME_LIMIT_S


def _text_or_null(value: Any) -> bool:
    return value is None or _text(value)


def _number_or_null(value: Any) -> bool:
    return value is None or _number(value)


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _spans(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(span, list) and len(span) == 2 and _integer(span[0]) and _integer(span[1]) and span[0] < span[1]
        for span in value
    )


def _rows(width: int) -> Check:
    """Whether a value is a list of rows of this many integers."""
    return lambda value: (
        isinstance(value, list)
        and all(isinstance(row, list) and len(row) == width and all(map(_integer, row)) for row in value)
    )


def _rest(value: Any) -> bool:
    """Whether a value is the rest of a stream of shards."""
    names = ("began", "shards", "begun")
    if not isinstance(value, dict) or not all(_count(value.get(name)) for name in names):
        return False
    return (value.get("order") is None or _rows(2)([value["order"]])) and _rows(3)(value.get("unused"))


def _shares(value: Any) -> bool:
    return isinstance(value, dict) and all(_spans(spans) for spans in value.values())


def _checksums(value: Any) -> bool:
    return isinstance(value, list) and all(found is None or _count(found) for found in value)


_ENVELOPE_FIELDS: dict[str, Check] = {"time": _moment, "worker": _text, "kind": _text}
_OPTIONAL_FIELDS: dict[str, Check] = {
    "generation": _count,
    "samples": _count,
    "samples_per_position": _above_zero,
    "cursor_positions": _spans,
    "skipped_positions": _spans,
    "every": _positive,
    "parts": _rows(4),
    "ends": _rows(2),
    "skipped": _rows(3),
    "stop": _count,
    "stream": _rest,
    "open": _flag,
    "lr_scale": _number,
    "epochs": _count,
    "noise_scale": _number,
    "change_s": _number,
}
"""Fields that events of any kind may have."""
_FIELDS: dict[str, dict[str, Check]] = {
    # The worker process has started.
    "start": {"pid": _count, "host": _text},
    # The worker is in a new view; pause_s is how long its training paused for the change.
    "view": {
        "generation": _count,
        "members": _ids,
        "rank": _integer,
        "world_size": _count,
        "reason": _text,
        "pause_s": _number_or_null,
    },
    # The worker has become slower than the others, or is no longer slower: its throughput as a fraction of theirs, and
    # the fraction of their step time that they spend waiting.
    "straggler": {"slow": _flag, "ratio": _number, "waiting": _number},
    # A measure of the throughput with so many nodes: samples per second of all workers, the standard deviation of its
    # parts, and for how long it was measured. Told by the worker of rank 0. The optional field noise_scale is that of
    # the gradients, in samples; change_s is for how long training pauses at a change of the number of nodes.
    "throughput": {"nodes": _count, "samples_per_s": _number, "spread": _number, "seconds": _number},
    # The job has decided on the number of nodes that it wants (wanted), while it had so many (nodes), for this reason;
    # or on the replacement of a straggler. Told by the worker of rank 0. The optional field batch_size is the batch of
    # all workers that it has chosen, in samples.
    "autoscale": {"nodes": _count, "wanted": _count, "reason": _text},
    # A newcomer is about to be ready: it has read its stream up to this position.
    "walked": {"epoch": _count, "cursor": _count},
    # A newcomer has received the state; its next step is step + 1.
    "admitted": {"generation": _count, "step": _count, "epoch": _count},
    # The program begins its n-th training; steps and epochs are counted from the beginning again.
    "training": {"number": _training},
    # An epoch begins; length is its number of positions. With the optional field open, the end of the epoch is not
    # known yet, and length is an upper bound. The optional field epochs says how many there are, if that is known. The
    # optional field shards is the number of shards, if positions are given to samples of shards when they are dealt;
    # with began, the shards go on where an earlier epoch has left them, and it is the epoch in which they began.
    "epoch": {"epoch": _count, "length": _count},
    # What the worker has read at a position: a checksum of each part, or null where there is nothing to compare.
    "read": {"epoch": _count, "position": _count, "checksums": _checksums},
    # An epoch has ended; exact is false where a limit of the user (max_steps, limit_train_batches, drop_last) cut it
    # short. The optional fields ends and skipped tell what was found in a stream of shards after the last step.
    "epoch_end": {"epoch": _count, "exact": _flag, "length": _count},
    # A reduction was committed: all its positions, this worker's part, and the positions returned by lost workers. If
    # the optional field samples is present, positions are batches that the workers share, and a part is a share of
    # their samples. If a position is another number of samples than one, a batch for instance, the optional field
    # samples_per_position is that number, as far as the worker knows it; the last batch may be smaller. In a stream of
    # shards, the optional field parts says what positions of some workers were: the first position, the shard, and its
    # first and last offset; ends lists shards with the offset at which they ended; and skipped lists what could not be
    # read and is left out, as (shard, start, stop).
    "step": {
        "step": _count,
        "epoch": _count,
        "generation": _count,
        "world_size": _count,
        "committed": _spans,
        "mine": _spans,
        "returned": _spans,
        "loss": _number_or_null,
    },
    # A shard could not be read from this offset on, and is left out (on_bad_shard="skip"); with the optional field
    # stop, it is left out up to there, where another worker goes on.
    "bad_shard": {"epoch": _count, "shard": _count, "name": _text, "offset": _count, "reason": _text},
    # A worker was lost in a step that had gathered its values; this worker repeats the step.
    "repeated": {"step": _count, "epoch": _count, "generation": _count},
    # The global batch size changes with this update, or this is the first update. The optional field lr_scale is the
    # factor of the learning rate once a ramp is over, if all optimizers have the same.
    "compensation": {
        "step": _count,
        "rule": _text,
        "reference_batch_size": _count,
        "global_batch_size": _count,
        "ramp_steps": _count,
    },
    # Hash of all weights after a step (with ELASTICFLOW_AUDIT=1).
    "weights": {"step": _count, "hash": _text},
    # A pass over an evaluation loader is complete: which positions each worker evaluated, equal in the records of all.
    # The optional field skipped_positions tells which could not be read. With the optional field every, workers took
    # turns, and a range of a share holds every so many-th position from its start on.
    "evaluation": {
        "stage": _text,
        "run": _count,
        "loader": _count,
        "length": _count,
        "shares": _shares,
        "exact": _flag,
    },
    # The n-th start of the job, counted in its checkpoint store; resumed names the checkpoint, or is null.
    "run": {"run": _count, "resumed": _text_or_null},
    # Steps after step in generations before generation are void: the job has restarted from there. The optional field
    # stream tells what was left of a stream of shards: the epoch in which the pass began, the number of shards, how
    # many were begun, the seed and epoch of which their order is a function (null if they come in the order of their
    # numbers), and the unused parts of those that were begun, as (shard, start, stop); stop is 2^50 if it is unknown.
    # It is left out if the line would be too long with it: the audit then checks only what the log itself has.
    "rollback": {"generation": _count, "step": _count, "epoch": _count},
    # An exception has come out of the training; or a test has injected a fault.
    "fault": {"what": _text},
    # A checkpoint is complete in the store; seconds and bytes describe the write.
    "checkpoint": {"id": _text, "step": _count, "seconds": _number, "bytes": _count},
    # The worker has written its share of a checkpoint that another worker publishes.
    "share": {"id": _text, "seconds": _number, "bytes": _count},
    # An attempt to save a checkpoint failed; final means that there is no further attempt.
    "checkpoint_failed": {"id": _text, "reason": _text, "final": _flag},
    # A snapshot was not saved because a newer one replaced it or saving has ended.
    "checkpoint_dropped": {"id": _text, "reason": _text},
    # Retention has removed these checkpoints.
    "checkpoint_removed": {"ids": _ids},
    # The worker was told to leave; it leaves at the next step boundary.
    "notice": {"what": _text},
    # The worker has ended as planned.
    "end": {"reason": _text},
}
