"""The watermark of a training: how far it has certainly come."""

from __future__ import annotations

from typing import NamedTuple


class Watermark(NamedTuple):
    """The watermark of a training. Everything before it is committed for good, except what was returned.

    Args:
        epoch: Index of the epoch; all before it are over.
        cursor: Places of its sequence that have been dealt, and their updates made.
        returned: Positions before the cursor that were dealt in vain; see :mod:`ef_common.core.sharding`.
        training: Number of the training, as a program may have several.
    """

    epoch: int
    cursor: int
    returned: tuple[int, ...] = ()
    training: int = 1
