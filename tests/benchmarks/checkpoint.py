"""A checkpoint of 400 MB: how long training stands still for it, how fast it is written, and read again.

Against what users would take otherwise, in one process, in turns: Lightning's `save_checkpoint`, its AsyncCheckpointIO,
`torch.distributed.checkpoint.async_save`; a sequential write of as many bytes, and a read; boto3's upload to the same
S3 server, and its download.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.pair import run_single
from tests.storage.ceph import KEYS, Ceph, missing_programs

NUM_ROUNDS = 7
ROOM_BYTES = 64 << 20
_STORE_BYTES = 8 << 30
_BUCKET = "bench"
_TIMEOUT_S = 900.0
_PAUSES = {"sync": 0.10, "async_io": 1.0, "dcp": 1.0}


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure all; with S3, where a server can be started."""
    num = "2" if quick else str(NUM_ROUNDS)
    with tempfile.TemporaryDirectory(prefix="ef-bench-") as folder:
        arguments = [folder, num]
        if missing_programs():
            return _figures(_measure(arguments))
        with tempfile.TemporaryDirectory(prefix="ef-ceph-") as at, Ceph(Path(at), room_bytes=_STORE_BYTES) as ceph:
            import s3fs

            s3fs.S3FileSystem(**KEYS, endpoint_url=ceph.endpoint).mkdir(_BUCKET)
            return _figures(_measure([*arguments, f"s3://{_BUCKET}", ceph.endpoint]))


def _measure(arguments: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = run_single("tests.benchmarks.checkpoint_worker", arguments, timeout_s=_TIMEOUT_S)
    return found


def _figures(found: dict[str, Any]) -> dict[str, Figure]:
    pause = _milliseconds(found["local_pause"])
    figures = {
        f"checkpoint_pause_{peer}": of_samples(pause, _milliseconds(found[peer]), target=target, unit="ms")
        for peer, target in _PAUSES.items()
    }
    figures["checkpoint_write_local"] = of_samples(found["local_write"], found["sequential"], target=1 / 0.9, unit="s")
    if "boto3" in found:
        figures["checkpoint_write_s3"] = of_samples(found["s3_write"], found["boto3"], target=1 / 0.8, unit="s")
        figures["checkpoint_resume_s3"] = of_samples(found["s3_resume"], found["s3_read"], target=1.1, unit="s")
    figures["checkpoint_resume"] = of_samples(found["resume"], found["read"], target=1.1, unit="s")
    size = found["bytes"][0]
    budget = size + ROOM_BYTES
    figures["checkpoint_memory"] = Figure(median(found["extra_bytes"]) / 2**20, budget / 2**20, 1.0, "MiB")
    return figures


def _milliseconds(seconds: list[float]) -> list[float]:
    return [1e3 * value for value in seconds]


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
