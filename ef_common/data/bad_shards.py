"""Shards that cannot be read, and whose rest is left out."""

from __future__ import annotations

import logging
from typing import Any

from ef_common.events import EventLog
from ef_common.session import Session

logger = logging.getLogger(__name__)


def note_bad_shard(
    session: Session, log: EventLog, *, epoch: int, shard: int, name: Any, offset: int, reason: str
) -> None:
    """Report a shard whose rest a worker could not read. All workers call this.

    Args:
        session: The worker's session; rank 0 warns.
        log: Event log of the worker, which notes the shard.
        epoch: Index of the epoch of the training, or of the one after which an evaluation is made.
        shard: Index of the shard.
        name: The shard, as the stream names it.
        offset: Offset of the first sample that is left out.
        reason: Why it could not be read.
    """
    if session.rank == 0:
        logger.warning("shard %s is left out from sample %d on, because it cannot be read: %s", name, offset, reason)
    log.write("bad_shard", epoch=epoch, shard=shard, name=str(name), offset=offset, reason=reason)
