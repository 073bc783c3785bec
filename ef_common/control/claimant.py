"""Gets claims in a store, on behalf of the coordinator."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ef_common.core.quorum import Half
from ef_common.errors import StorageError

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0


class Claimant:
    """Tries to get claims, each in a thread of its own, until the store has said who has them.

    Args:
        claim: Asks the store: (name of the claim, sorted ids of those for whom it is) → whether they have it. Blocks.
            Raises StorageError if the store has not said.
        tell: Called with the claim and the answer.
        stopped: Set when nobody waits for answers any more.
    """

    def __init__(
        self,
        claim: Callable[[str, tuple[str, ...]], bool],
        tell: Callable[[Half, bool], None],
        *,
        stopped: threading.Event,
    ) -> None:
        self._claim = claim
        self._tell = tell
        self._stopped = stopped
        self._lock = threading.Lock()
        self._under_way: set[Half] = set()

    def get(self, half: Half) -> None:
        """Begin to try, unless that is under way: a coordinator that is asked for the answer anew gets it, too."""
        with self._lock:
            if half in self._under_way:
                return
            self._under_way.add(half)
        threading.Thread(target=self._get, args=(half,), name="elasticflow-claim", daemon=True).start()

    def _get(self, half: Half) -> None:
        try:
            won = self._ask(half)
        finally:
            with self._lock:
                self._under_way.discard(half)
        if won is not None:
            logger.warning("the claim of %s is %s", half.claim, "won: its half goes on" if won else "another one's")
            self._tell(half, won)

    def _ask(self, half: Half) -> bool | None:
        told = ""
        while not self._stopped.is_set():
            try:
                return self._claim(half.claim, half.winner)
            except StorageError as error:
                if str(error) != told:
                    logger.warning("the claim of %s is not decided, and is tried again: %s", half.claim, error)
                told = str(error)
            self._stopped.wait(_AGAIN_S)
        return None
