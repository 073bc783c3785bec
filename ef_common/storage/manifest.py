"""The manifest: what makes files a checkpoint. It is written last, and says how to recognize damage, its own included.

JSON: ``{"format": 1, "checksum": …, "manifest": {…}}``, where the checksum is that of the inner object in its canonical
form (sorted names, no spaces). A higher format is a newer version's, whatever else is in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from ef_common.core.lineage import CheckpointId
from ef_common.errors import InvalidCheckpoint, NewerFormat

FORMAT = 1
NAME = "manifest.json"
COMPLETE = "complete.json"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A data file as it was written.

    Args:
        size: In bytes.
        checksum: xxh3_128, in hexadecimal digits.
    """

    size: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is known of a checkpoint without reading its data.

    Args:
        id: Which one it is.
        files: Its data files, by name.
        writer: Unique name of the process that wrote it.
        created: When, in seconds since the epoch.
        parent: Name of the checkpoint that its run resumed from.
        progress: How far training was: whatever JSON the caller needs to go on from there.
        metrics: By name; those that are not finite numbers are None.
        model: Fingerprint by which another model is recognized.
        versions: Of the packages that wrote it.
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
        """Bytes of all data files."""
        return sum(file.size for file in self.files.values())

    def encode(self) -> bytes:
        """As bytes; the same ones each time.

        Raises:
            TypeError, ValueError: If the progress is not JSON.
        """
        inner = {
            **{name: getattr(self, name) for name in ("writer", "created", "parent", "progress", "model", "versions")},
            "id": self.id._asdict(),
            "files": {name: asdict(file) for name, file in self.files.items()},
            "metrics": {name: finite(value) for name, value in self.metrics.items()},
        }
        return sealed(inner, "manifest")

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """From bytes.

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
                files={
                    str(name): StoredFile(int(file["size"]), str(file["checksum"]))
                    for name, file in inner["files"].items()
                },
                writer=str(inner["writer"]),
                created=float(inner["created"]),
                parent=inner["parent"],
                progress=dict(inner["progress"]),
                metrics=dict(inner["metrics"]),
                model=inner["model"],
                versions=dict(inner["versions"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidCheckpoint(
                f"its manifest lacks what it should say ({type(error).__name__}: {error})"
            ) from None


def is_file_name(name: str) -> bool:
    """Whether a data file may be called this: a name within the folder that nothing else has.

    >>> [is_file_name(name) for name in ("model.weights.h5", "a/b", "..", "manifest.json")]
    [True, False, False, False]
    """
    plain = bool(name) and not name.startswith(".") and not set(name) & {"/", "\\", "\0"}
    return plain and name not in (NAME, COMPLETE)


def finite(value: float | None) -> float | None:
    """A number as JSON knows it."""
    return float(value) if value is not None and math.isfinite(value) else None


def sealed(inner: Mapping[str, Any], name: str) -> bytes:
    """A JSON object with its format and its checksum."""
    outer = {"format": FORMAT, "checksum": _checksum(inner), name: inner}
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
    except (KeyError, TypeError, ValueError):
        raise InvalidCheckpoint(f"{what} is torn ({len(data)} bytes)") from None
    if isinstance(version, int) and version > FORMAT:
        raise NewerFormat(
            f"A newer version of ElasticFlow wrote {what}: this one reads format {FORMAT}. Received: format={version}. "
            "Use that version, or another URL: nothing is written over"
        )
    inner = outer.get(name)
    if version != FORMAT or not isinstance(inner, dict) or outer.get("checksum") != _checksum(inner):
        raise InvalidCheckpoint(f"{what} has been changed: its checksum differs")
    return inner


def _checksum(inner: Mapping[str, Any]) -> str:
    canonical = json.dumps(inner, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return str(xxhash.xxh3_128(canonical.encode()).hexdigest())
