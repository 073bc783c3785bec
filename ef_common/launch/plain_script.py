"""Notices a script that does not use ElasticFlow, and trains on each node by itself under its rendezvous.

Each agent of ours is told that the world is its own node. With such a world, a script of plain DDP trains on one
machine as under torchrun's own rendezvous. But if there are more nodes, they know nothing of each other.

Such a script is recognized when it builds its process group: a worker then listens at ``MASTER_PORT``, which no worker
of ours does, and none has left a crash record.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ef_common.terminal import say

_LOOK_S = 1.0
_LISTENS = "0A"


class PlainScript:
    """An agent's look at what its workers run; tells once what is wrong with it.

    Args:
        directory: Where workers of ours keep their crash records.
        clock: Monotonic time in seconds.
    """

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._looked = clock()
        self._is_known = False

    def look(self, port: int) -> None:
        """Look, at most once a second, and no longer once it is known what runs here.

        Args:
            port: `MASTER_PORT` of the workers.
        """
        if self._is_known or self._clock() - self._looked < _LOOK_S:
            return
        self._looked = self._clock()
        self._is_known = any(self._directory.glob("worker-*"))
        if not self._is_known and is_listened_at(port):
            self._is_known = True
            say(
                "the workers of this node have built a process group of this node alone: under ElasticFlow's "
                "rendezvous, a script that does not use ElasticFlow trains on each node by itself. "
                "torchrun's own rendezvous for such a script is --rdzv-backend=c10d",
                color="yellow",
                event="plain_script",
            )


def is_listened_at(port: int) -> bool:
    """Whether a process of this machine listens at a TCP port."""
    end = f":{port:04X}"
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:  # without IPv6
            continue
        if any(fields[1].endswith(end) and fields[3] == _LISTENS for fields in map(str.split, lines)):
            return True
    return False
