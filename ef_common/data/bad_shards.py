"""Parts of shards that cannot be read, and are left out."""

from __future__ import annotations

import logging
from typing import Any

from ef_common.core.streams.pieces import OPEN, Piece
from ef_common.events import EventLog
from ef_common.session import Session

logger = logging.getLogger(__name__)


def note_bad_shard(session: Session, log: EventLog, *, epoch: int, rest: Piece, name: Any, reason: str) -> None:
    """Report the rest of a piece of a shard, which a worker could not read. All workers call this.

    Args:
        session: The worker's session; rank 0 warns.
        log: Event log of the worker, which notes the shard.
        epoch: Index of the epoch of the training, or of the one after which an evaluation is made.
        rest: What is left out. Its end is OPEN if it is the end of the shard.
        name: The shard, as the stream names it.
        reason: Why it could not be read.
    """
    shard, offset, stop = rest
    reach = "on" if stop == OPEN else f"up to sample {stop}"
    if session.rank == 0:
        logger.warning(
            "shard %s is left out from sample %d %s, because it cannot be read: %s", name, offset, reach, reason
        )
    known = {} if stop == OPEN else {"stop": stop}
    log.write("bad_shard", epoch=epoch, shard=shard, name=str(name), offset=offset, reason=reason, **known)
