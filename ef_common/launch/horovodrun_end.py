"""The end of horovodrun, as a notice to its workers.

horovodrun ends its own ssh clients, and sshd sends no signal to the processes of a session without a terminal. Plain
Horovod's workers then end one after the other, as their connections break. Ours would train to the end without a
launcher, beside those of the job that the user starts next.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ef_common.horovod.store import RendezvousStore, StoreLost
from ef_common.launch.notice_sources import TIMEOUT_S
from ef_common.protocol.addresses import Address

REFUSED_S = 30.0
"""A machine that refuses connections for so long has no horovodrun any more."""
SILENT_S = 300.0
"""An outage of the network, in which the training can go on, may last for a while."""
_PAUSE_S = 10.0
_ASKS_PER_S = 100  # of all workers together
_KEY = "end"


class HorovodrunEnd:
    """A source of notices, which asks horovodrun's store. N processes send N/10 requests per second, 100 at most.

    Args:
        store: Host and port of horovodrun's server.
        size: Number of processes of the job.
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, store: Address, *, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = RendezvousStore(store)
        self._pause_s = max(_PAUSE_S, size / _ASKS_PER_S)
        self._clock = clock
        self._next = 0.0
        self._lost_since: float | None = None

    def ask(self) -> str:
        """See the port."""
        now = self._clock()
        if now < self._next:
            return ""
        try:
            self._store.get(_KEY, timeout_s=TIMEOUT_S)
        except StoreLost as error:
            if self._lost_since is None:
                self._lost_since = now
            patience_s = REFUSED_S if isinstance(error.__cause__, ConnectionRefusedError) else SILENT_S
            return str(error) if now >= self._lost_since + patience_s else ""
        self._lost_since, self._next = None, now + self._pause_s
        return ""
