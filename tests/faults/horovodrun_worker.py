"""What horovodrun starts in these tests: a training of a host, and a fault for some of the first workers."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ef_common.launch import horovodrun_end
from tests.faults.faults import MARKS

FAIL = signal.SIGUSR2
"""A fault with this signal is an exception."""


GO_ON = "go-on"


class InjectedError(RuntimeError):
    """The exception."""


def main() -> None:
    directory = Path(os.environ["ELASTICFLOW_RUN_DIR"])
    spec = json.loads((directory / "spec.json").read_text())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
    signal.signal(FAIL, fail)
    if spec["gone_s"] is not None:
        horovodrun_end.REFUSED_S = horovodrun_end._PAUSE_S = spec["gone_s"]
    if any("after" in fault for fault in spec["faults"].values()):
        marks = directory / "marks"
        marks.mkdir(exist_ok=True)
        os.environ[MARKS] = str(marks)
    waits = os.environ["HOROVOD_RANK"] == spec["rank_that_waits"]
    result = train(spec, fault_of(directory, spec))
    if waits:
        while not (directory / GO_ON).exists():
            time.sleep(0.05)
    (directory / "results" / f"{os.getpid()}.json").write_text(json.dumps(result))


def fail(number: int, frame: Any) -> None:
    raise InjectedError("as the test wants it")


def fault_of(directory: Path, spec: dict[str, Any]) -> dict[str, Any] | None:
    """The fault of the first process with this rank."""
    rank = os.environ["HOROVOD_RANK"]
    if rank not in spec["faults"]:
        return None
    try:
        (directory / f"fault-of-{rank}").touch(exist_ok=False)
    except FileExistsError:
        return None
    fault: dict[str, Any] = spec["faults"][rank]
    return fault


def train(spec: dict[str, Any], fault: dict[str, Any] | None) -> dict[str, Any]:
    from tests.faults.hosts import HOSTS

    return HOSTS[spec["host"]].train(spec["options"], fault)


if __name__ == "__main__":
    main()
