"""Decides when all members write a checkpoint together, and what they agree on before.

Before a step, rank 0 sets a wish, which is summed with the flags of that step's reduction. All members that have
completed it take the checkpoint at the next boundary. There rank 0 distributes, in one collective, the content of the
file and the writers of its pieces. What one member knows alone decides nothing:

* If the members have changed between the wish and the boundary, or within that collective, nobody takes one.
* If a member is still busy with the previous share, rank 0 writes alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ef_common.collectives import operations
from ef_common.core.lineage import CheckpointId
from ef_common.errors import UnsupportedError
from ef_common.session import Session
from ef_common.storage.layout import FileLayout
from ef_common.storage.shares import SharedFile, SharePiece, cut
from ef_common.storage.store import Store, Writer

logger = logging.getLogger(__name__)

TIMEOUT_S = 300.0
"""How long rank 0 waits for the others' shares when its own is written."""

_MANY_FAILURES = 2
_LONGEST_ALONE = 32

MOST_LITERAL_BYTES = 8 << 20
"""What rank 0 sends to all others of a file that they write together."""

Offer = Callable[[], FileLayout]
"""Makes the layout of the file; raises `UnsupportedError` if not every member can write a piece of it."""


@dataclass(frozen=True, slots=True)
class SharingPlan:
    """The plan of a shared checkpoint, on which all members have agreed.

    Args:
        id: Identity of the checkpoint.
        worker: This worker.
        leads: Whether this worker publishes it.
        pieces: The pieces and their writers; empty if rank 0 writes alone.
        layout: The layout that rank 0 has sent.
        is_here: Whether a worker still is a member.
    """

    id: CheckpointId
    worker: str
    leads: bool
    pieces: tuple[SharePiece, ...]
    layout: FileLayout = field(repr=False)
    is_here: Callable[[str], bool]

    @property
    def mine(self) -> list[tuple[int, int]]:
        """The ranges that this worker writes."""
        return [(piece.start, piece.stop) for piece in self.pieces if piece.worker == self.worker]

    def file(self, write: Callable[[Writer, int, int], object]) -> SharedFile:
        """The file, as this worker writes it."""
        return SharedFile(self.pieces, self.worker, write, self.is_here, TIMEOUT_S)

    def no_file(self, problem: str) -> SharedFile:
        """The file, if this worker cannot write its pieces."""
        return replace(self.file(lambda *_: None), problem=problem)


class Sharing:
    """Agrees on shared checkpoints with the other members, and learns from the outcomes.

    Args:
        session: The worker's session.
        store: Where the file goes.
        least_bytes: Smaller states are not shared.
    """

    def __init__(self, session: Session, store: Store, *, least_bytes: int) -> None:
        self._session = session
        self._store = store
        self._least_bytes = least_bytes
        self._wished: tuple[int, int] | None = None
        self._open: CheckpointId | None = None
        self._num_failures = 0
        self._num_alone = 0
        self._reason = ""

    def wish(self, step: int, num_bytes: Callable[[], int]) -> bool:
        """In rank 0, before a step after which a checkpoint is due: ask all members to take it together."""
        session = self._session
        if session.world_size < 2 or self._num_alone or self._store.shares is None:
            return False
        generation = session.completed_in.generation
        if self._wished is not None and self._wished[0] == generation and self._wished[1] < step:
            return False  # it was not heard: this training reduces nothing
        if num_bytes() < self._least_bytes:
            return False
        self._wished = (generation, step)
        session.agreements.wish = True
        return True

    def agree(self, id: CheckpointId, offer: Offer, *, busy: bool) -> SharingPlan | None:
        """Agree on a plan; all members call this at the same boundary. None: nothing is taken there."""
        session = self._session
        self._wished, session.agreements.wish = None, False
        mine: dict[str, Any] = {"busy": busy, "offer": None}
        ids = session.completed_in.ids
        if ids[0] == session.worker.id:
            mine["offer"] = {"id": id.name, "members": list(ids), **self._offer(offer, list(ids))}
        values, view = operations.gather(session, mine, what="plan of a checkpoint")
        found = next((value["offer"] for value in values if value["offer"] is not None), None)
        agreed = None if found is None else CheckpointId.parse(found["id"])
        if found is None or agreed is None or found["members"] != list(view.ids):
            return None
        pieces = (
            () if any(value["busy"] for value in values) else tuple(SharePiece(*piece) for piece in found["pieces"])
        )
        leads = view.ids[0] == session.worker.id
        if leads and pieces:
            self._open = agreed
        return SharingPlan(
            agreed, session.worker.id, leads, pieces, FileLayout.of(found["layout"]), lambda id: id in session.view.ids
        )

    def _offer(self, offer: Offer, workers: list[str]) -> dict[str, Any]:
        way, reason = self._store.shares, ""
        try:
            layout = offer()
            if len(layout.literal) > MOST_LITERAL_BYTES:
                raise UnsupportedError(
                    f"{len(layout.literal) >> 20} MiB of it are no weights, buffers or states of optimizers, so only "
                    "rank 0 has them"
                )
        except UnsupportedError as error:
            reason = str(error)
        if way is None or reason:
            if reason != self._reason:
                logger.warning("rank 0 writes checkpoints alone: %s", reason)
                self._reason = reason
            return {"pieces": [], "layout": FileLayout((), b"").plain()}
        return {"pieces": [list(piece) for piece in cut(layout.size, workers, way)], "layout": layout.plain()}

    # ------------------------------------------------------------ what became of it

    def settle(self, saved: CheckpointId | None) -> None:
        """Nothing is being written any more.

        Args:
            saved: The newest one that was published.
        """
        if self._open is None:
            return
        self._num_failures = 0 if saved == self._open else self._num_failures + 1
        self._open = None
        if self._num_failures >= _MANY_FAILURES:
            self._num_alone = min(_LONGEST_ALONE, 2 ** (self._num_failures - _MANY_FAILURES))
            logger.warning("sharing has failed %d times in a row: rank 0 writes alone", self._num_failures)

    def written_alone(self) -> None:
        """Rank 0 has taken a checkpoint alone."""
        self._wished, self._session.agreements.wish = None, False
        self._num_alone = max(0, self._num_alone - 1)
