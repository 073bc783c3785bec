"""Acquires claims in a store on behalf of the coordinator."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ef_common import threads
from ef_common.core.quorum import Bid
from ef_common.errors import StorageError
from ef_common.ports import GetClaim

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0


class Claimant:
    """Acquires claims, each in its own thread, until the store has said who has them.

    Args:
        claim: Asks the store. Blocks. Raises StorageError if the store has not said. No other error is an answer
            either, and the coordinator waits for one.
        tell: Called with the name of the claim and the answer.
        stopped: Set when nobody waits for answers any more.
    """

    def __init__(
        self,
        claim: GetClaim,
        tell: Callable[[str, tuple[str, ...]], None],
        *,
        stopped: threading.Event,
    ) -> None:
        self._claim = claim
        self._tell = tell
        self._stopped = stopped
        self._lock = threading.Lock()
        self._under_way: set[Bid] = set()

    def get(self, bid: Bid) -> None:
        """Start an attempt, unless one is under way; a coordinator that asks again also gets its answer."""
        with self._lock:
            if bid in self._under_way:
                return
            self._under_way.add(bid)
        threads.start(lambda: self._get(bid), name="elasticflow-claim", job=f"gets the claim {bid.claim}")

    def _get(self, bid: Bid) -> None:
        try:
            named = self._ask(bid)
        finally:
            with self._lock:
                self._under_way.discard(bid)
        if named:
            logger.warning("the claim %s is of %s", bid.claim, ", ".join(named))
            self._tell(bid.claim, named)

    def _ask(self, bid: Bid) -> tuple[str, ...]:
        told = ""
        while not self._stopped.is_set():
            try:
                return self._claim(bid.claim, bid.members)
            except Exception as error:
                if str(error) != told:
                    trace = None if isinstance(error, StorageError) else error
                    logger.warning(
                        "the claim %s is not decided, and is tried again: %s", bid.claim, error, exc_info=trace
                    )
                told = str(error)
            self._stopped.wait(_AGAIN_S)
        return ()
