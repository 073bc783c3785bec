"""Saves, and dies by SIGKILL at each line that the storage code or fsspec runs meanwhile, in one process for each.

``python -m tests.storage.crash FOLDER STRIDE`` makes ``FOLDER/000001``, … and prints for each how its process ended.
The first checkpoint is whole; the death is while the second one is written, or the first one is removed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from ef_common.core.lineage import CheckpointId
from ef_common.core.retention import Retention
from ef_common.storage.checkpoints import Checkpoints, Content
from ef_common.storage.store import Store

FIRST, SECOND = CheckpointId(1, 1, 10), CheckpointId(1, 1, 20)
TRACED = ("ef_common/storage/", "fsspec/implementations/local")


def content(step: int) -> Content:
    def write(file: Any) -> None:
        for _ in range(20):
            file.write(bytes([step]) * 5000)

    return Content({"weights": write, "optimizer": write}, progress={"step": step})


def run(folder: Path, lines: int) -> None:
    checkpoints = Checkpoints(Store(folder))
    checkpoints.claim(parent=None)
    checkpoints.publish(FIRST, content(FIRST.step))
    left = lines

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if not any(part in frame.f_code.co_filename for part in TRACED):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    checkpoints.publish(SECOND, content(SECOND.step))
    checkpoints.clean(Retention(keep_last=1))
    sys.settrace(None)


def main(folder: Path, stride: int) -> None:
    lines, killed = 0, True
    while killed:
        lines += stride
        pid = os.fork()
        if pid == 0:
            run(folder / f"{lines:06d}", lines)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status not in (0, signal.SIGKILL):
            raise SystemExit(f"after {lines} lines: status {status}")
        killed = status == signal.SIGKILL
        sys.stdout.write(f"{lines:06d} {'killed' if killed else 'ended'}\n")
        sys.stdout.flush()  # not by the next process as well


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
