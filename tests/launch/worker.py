"""A worker without a framework: follows the membership, and writes down what it sees.

Everything goes by files in the directory EF_TEST_DIR: `<pid>.jsonl` holds this worker's records; the tests
create `crash-<pid>` to make it fail, `quit-<pid>` to make it end in the training, and `end` or `end-<pid>` to make it
finish the training.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

from ef_common.control.client import CoordinatorClient
from ef_common.errors import JobFinished
from ef_common.launch.environment import read_environment
from ef_common.session.crash_record import CrashRecord

ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: to kill an agent is to kill its node
DIRECTORY = Path(os.environ["EF_TEST_DIR"])
PID = os.getpid()


def record(**fields: object) -> None:
    with (DIRECTORY / f"{PID}.jsonl").open("a") as file:
        file.write(json.dumps({"pid": PID, "node": os.environ.get("ELASTICFLOW_NODE"), **fields}) + "\n")


def told(word: str) -> bool:
    return (DIRECTORY / f"{word}-{PID}").exists() or (DIRECTORY / word).exists()


def train(client: CoordinatorClient, note: CrashRecord) -> None:
    note.begin_training()
    known = [0]
    if client.start(known.append):
        record(kind="newcomer")
        client.send("ready")
    view = client.next_view(0)
    while True:
        record(
            kind="view",
            generation=view.generation,
            members=view.ids,
            nodes=[m.node for m in view.members],
            local_ranks=[m.local_rank for m in view.members],
            addresses=[m.address for m in view.members],
        )
        asked = False
        while known[-1] <= view.generation:
            if (client.change_pending or view.pending) and not asked:
                client.send("at_boundary", view.generation)
                asked = True
            if told("crash"):
                os._exit(17)
            if told("quit"):
                client.send("bye")
                return
            if told("end"):
                note.finish()
                client.send("close")
                record(kind="closed")
                while told("stay"):
                    time.sleep(0.02)
                client.send("bye")
                return
            time.sleep(0.02)
        view = client.next_view(view.generation)


def main() -> None:
    environment = read_environment()
    job = None
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    record(kind="start", has_token=environment.token is not None, restart=restart, local_rank=environment.local_rank)
    sys.stdout.write("started\n")
    note = CrashRecord(environment.crash_records, environment.local_rank)  # as a worker of ElasticFlow, for its agent
    if environment.coordinator is None:
        from ef_common.launch.c10d import host_or_find_coordinator, is_plain_torchrun

        assert is_plain_torchrun()
        job = host_or_find_coordinator(environment)
        environment = job.environment
        record(kind="c10d", hosts=job.coordinator is not None)
    client = CoordinatorClient(environment.coordinator, environment.member(), environment.token)
    try:
        train(client, note)
    except JobFinished:
        note.finish()
        record(kind="finished")
    finally:
        client.stop()
        if job is not None:
            job.close()
    record(kind="exit")


if __name__ == "__main__":
    sys.exit(main())
