"""The manifest, written last, which makes files a checkpoint and reveals damage, including its own.

JSON: ``{"format": 1, "checksum": …, "manifest": {…}}``, where the checksum is that of the inner object in its canonical
form (sorted names, no spaces). Format 2 has checksums of pieces. A higher one is a newer version's, whatever else it
holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from ef_common.core.lineage import CheckpointId
from ef_common.errors import InvalidCheckpoint, NewerFormat

FORMAT = 2
_WITHOUT_PIECES = 1  # versions before this one read it
NAME = "manifest.json"
COMPLETE = "complete.json"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A data file as it was written.

    Args:
        size: In bytes.
        checksum: xxh3_128, in hexadecimal digits; empty if there are pieces.
        pieces: Size and checksum of each piece in order, of a file that several workers have written.
    """

    size: int
    checksum: str
    pieces: tuple[tuple[int, str], ...] = ()

    def plain(self) -> dict[str, Any]:
        """The file's record as JSON."""
        if self.pieces:
            return {"size": self.size, "pieces": [list(piece) for piece in self.pieces]}
        return {"size": self.size, "checksum": self.checksum}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> StoredFile:
        """Inverse of `plain`.

        Raises:
            KeyError, TypeError, ValueError: The value is not such a record.
        """
        if "pieces" not in plain:
            return cls(_size(plain["size"]), str(plain["checksum"]))
        pieces = tuple((_size(size), str(checksum)) for size, checksum in plain["pieces"])
        if sum(size for size, _ in pieces) != _size(plain["size"]):
            raise ValueError(f"pieces of another size: {plain}")
        return cls(_size(plain["size"]), "", pieces)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is known about a checkpoint without reading its data.

    Args:
        id: Which one it is.
        files: Its data files, by name.
        writer: Unique name of the process that wrote it.
        created: When, in seconds since the epoch.
        parent: Name of the checkpoint that its run resumed from.
        progress: How far training was: whatever JSON the caller needs to go on from there.
        metrics: By name; those that are not finite numbers are None.
        model: Fingerprint by which another model is recognized.
        versions: Versions of the packages that wrote it.
    """

    id: CheckpointId
    files: Mapping[str, StoredFile]
    writer: str
    created: float
    parent: str | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    model: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Total size of the data files in bytes."""
        return sum(file.size for file in self.files.values())

    def encode(self) -> bytes:
        """The manifest as bytes, which are the same each time.

        Raises:
            TypeError, ValueError: If the progress is not JSON.
        """
        inner = {
            **{name: getattr(self, name) for name in ("writer", "created", "parent", "progress", "model", "versions")},
            "id": self.id._asdict(),
            "files": {name: file.plain() for name, file in self.files.items()},
            "metrics": {name: finite(value) for name, value in self.metrics.items()},
        }
        has_pieces = any(file.pieces for file in self.files.values())
        return sealed(inner, "manifest", version=FORMAT if has_pieces else _WITHOUT_PIECES)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """The manifest from its bytes.

        Raises:
            InvalidCheckpoint: They are torn or changed.
            NewerFormat: A newer version wrote them.
        """
        inner = opened(data, "its manifest", "manifest")
        try:
            if not all(map(is_file_name, inner["files"])):
                raise ValueError(f"names of files: {sorted(inner['files'])}")
            return cls(
                id=CheckpointId(**{name: int(value) for name, value in inner["id"].items()}),
                files={str(name): StoredFile.of(file) for name, file in inner["files"].items()},
                writer=str(inner["writer"]),
                created=float(inner["created"]),
                parent=inner["parent"],
                progress=dict(inner["progress"]),
                metrics=dict(inner["metrics"]),
                model=inner["model"],
                versions=dict(inner["versions"]),
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise InvalidCheckpoint(
                f"its manifest lacks what it should say ({type(error).__name__}: {error})"
            ) from None


def _size(value: Any) -> int:
    if (size := int(value)) < 0:
        raise ValueError(f"a negative size: {value}")
    return size


def is_file_name(name: str) -> bool:
    """Whether a data file may have this name: one within the folder that nothing else uses.

    >>> [is_file_name(name) for name in ("model.weights.h5", "a/b", "..", "manifest.json")]
    [True, False, False, False]
    """
    plain = bool(name) and not name.startswith(".") and not set(name) & {"/", "\\", "\0"}
    return plain and name not in (NAME, COMPLETE)


def finite(value: float | None) -> float | None:
    """A number as JSON can represent it."""
    return float(value) if value is not None and math.isfinite(value) else None


def sealed(inner: Mapping[str, Any], name: str, *, version: int = _WITHOUT_PIECES) -> bytes:
    """A JSON object with its format and its checksum."""
    outer = {"format": version, "checksum": _checksum(inner), name: inner}
    return f"{json.dumps(outer, sort_keys=True, indent=1)}\n".encode()


def opened(data: bytes, what: str, name: str) -> dict[str, Any]:
    """The object in a sealed one.

    Raises:
        InvalidCheckpoint: It is torn or changed.
        NewerFormat: A newer version wrote it.
    """
    try:
        outer = json.loads(data)
        version = outer["format"]
    except (KeyError, TypeError, ValueError, RecursionError):
        raise InvalidCheckpoint(f"{what} is torn ({len(data)} bytes)") from None
    if isinstance(version, int) and version > FORMAT:
        raise NewerFormat(
            f"A newer version of ElasticFlow wrote {what}: this one reads format {FORMAT}. Received: format={version}. "
            "Use that version, or another URL: nothing is written over"
        )
    inner = outer.get(name)
    if version not in (_WITHOUT_PIECES, FORMAT) or not isinstance(inner, dict) or not _holds(outer, inner):
        raise InvalidCheckpoint(f"{what} has been changed: its checksum differs")
    return inner


def _holds(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> bool:
    try:
        return bool(outer.get("checksum") == _checksum(inner))
    except (ValueError, RecursionError):  # numbers that we do not write
        return False


def _checksum(inner: Mapping[str, Any]) -> str:
    canonical = json.dumps(inner, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return str(xxhash.xxh3_128(canonical.encode()).hexdigest())
