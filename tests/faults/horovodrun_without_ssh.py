"""A horovodrun with fixed hosts whose end does not reach its workers, as on other hosts. The arguments are theirs."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.horovodrun_store import horovodrun_store

SIZE = 2

if __name__ == "__main__":
    with horovodrun_store() as (host, port):
        workers = [
            subprocess.Popen(
                sys.argv[1:],
                env={
                    **os.environ,
                    "HOROVOD_RANK": str(rank),
                    "HOROVOD_SIZE": str(SIZE),
                    "HOROVOD_HOSTNAME": f"node{rank}",
                    "HOROVOD_LOCAL_RANK": "0",
                    "HOROVOD_LOCAL_SIZE": "1",
                    "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
                    "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
                },
                start_new_session=True,
            )
            for rank in range(SIZE)
        ]
        for worker in workers:
            worker.wait()
