"""What is fuzzed: functions that take any bytes, and may only fail in the way that they promise."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ef_common.audit import audit
from ef_common.collectives.codec import ARRAYS
from ef_common.collectives.torch_codec import TENSORS
from ef_common.core.lineage import CheckpointId
from ef_common.errors import InvalidCheckpoint, NewerFormat, ProtocolError
from ef_common.events import EventLogError, read
from ef_common.protocol import wire
from ef_common.report.page import embedded
from ef_common.report.timeline import snapshot_of
from ef_common.storage import manifest as manifests
from ef_common.storage.manifest import Manifest, StoredFile
from tests.control.test_wire import FROM_COORDINATOR, FROM_WORKER
from tests.test_audit import Run

_FOLDER = tempfile.TemporaryDirectory(prefix="elasticflow-fuzz-")
_NAME = "a"


@dataclass(frozen=True)
class Target:
    """Something that reads bytes.

    Args:
        run: Reads them; whatever it raises is a finding.
        seeds: Bytes to begin with.
    """

    run: Callable[[bytes], None]
    seeds: Sequence[bytes]


def _wire(decode: Callable[..., Any]) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        try:
            message = decode(data)
        except ProtocolError:
            return
        assert decode(wire.encode(message)[:-1]) == message  # what is taken can be said again

    return run


def _manifest(data: bytes) -> None:
    """As it is, and as the inside of a manifest whose checksum holds."""
    for one in (data, _sealed(data)):
        try:
            found = Manifest.decode(one)
        except (InvalidCheckpoint, NewerFormat):
            continue
        assert all(map(manifests.is_file_name, found.files))
        assert found.size >= 0


def _sealed(data: bytes) -> bytes:
    try:
        inner = json.loads(data)
        return manifests.sealed(inner, "manifest", version=2)
    except (ValueError, RecursionError):
        return b""


def _events(data: bytes) -> None:
    """The reader, and the audit of what it has let pass."""
    folder = Path(_FOLDER.name)
    (folder / "events").mkdir(exist_ok=True)
    (folder / "events" / f"{_NAME}.jsonl").write_bytes(data)
    with contextlib.suppress(EventLogError):
        list(read(folder))
        audit(folder)


def _report(data: bytes) -> None:
    """The reader, and the page of what it has let pass."""
    folder = Path(_FOLDER.name)
    (folder / "events").mkdir(exist_ok=True)
    (folder / "events" / f"{_NAME}.jsonl").write_bytes(data)
    with contextlib.suppress(EventLogError):
        embedded(snapshot_of(folder, unaudited="It is not needed here."))


def _state(data: bytes) -> None:
    """A header, with enough behind it."""
    for codec in (ARRAYS, TENSORS):
        with contextlib.suppress(ProtocolError):
            codec.loads(len(data).to_bytes(8, "big") + data + bytes(1000))


BROKEN = "broken"


def _broken(data: bytes) -> None:
    """Shows that findings are found."""
    with contextlib.suppress(ValueError):
        json.loads(data)["step"]


# ---------------------------------------------------------------- seeds


def _log() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        run.view(_NAME, 1, "ab")
        run.step(_NAME, 1, [[0, 8]], [[0, 4]])
        run.step(_NAME, 2, [[8, 12]], [[8, 10]], returned=[[10, 12]])
        run.evaluation(_NAME)
        run.log(_NAME, "rollback", generation=1, step=1, epoch=0)
        run.log(_NAME, "weights", step=2, hash="0f")
        run.log(_NAME, "straggler", slow=True, ratio=0.5, waiting=0.5)
        run.log(_NAME, "checkpoint", id="c", step=2, seconds=0.5, bytes=10)
        run.log(_NAME, "compensation", step=2, rule="", reference_batch_size=8, global_batch_size=4, ramp_steps=0)
        return (Path(folder) / "events" / f"{_NAME}.jsonl").read_bytes()


_FOUND = Manifest(
    id=CheckpointId(1, 2, 3),
    files={"a": StoredFile(3, "0f"), "b": StoredFile(5, "", ((2, "1e"), (3, "2d")))},
    writer="w0",
    created=1.5,
    progress={"epoch": 2, "returned": [3, 4]},
    metrics={"loss": 0.5, "accuracy": None},
)
_TREE = {"a": np.arange(6.0).reshape(2, 3), "b": [1, "two", None, 3.5], "c": (True, {4, 5})}

TARGETS = {
    "from-worker": Target(_wire(wire.decode_from_worker), [wire.encode(one)[:-1] for one in FROM_WORKER]),
    "from-coordinator": Target(
        _wire(wire.decode_from_coordinator), [wire.encode(one)[:-1] for one in FROM_COORDINATOR]
    ),
    "manifest": Target(_manifest, [_FOUND.encode(), json.dumps(json.loads(_FOUND.encode())["manifest"]).encode()]),
    "events": Target(_events, [_log(), *_log().splitlines(keepends=True)]),
    "report": Target(_report, [_log(), *_log().splitlines(keepends=True)]),
    BROKEN: Target(_broken, [b'{"step": 1}']),
    "state": Target(_state, [ARRAYS.encode(_TREE)[0], TENSORS.encode({**_TREE, "d": torch.float16})[0]]),
}
