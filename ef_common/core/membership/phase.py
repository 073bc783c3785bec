"""Where a connected worker stands.

::

    ABSENT → EARLY       `Arrived`, before the first view
    ABSENT → WARMING     `Arrived`, after it; `Returned`, as one that warms up
    ABSENT → READY       `Returned`, as one that is ready
    ABSENT → MEMBER      `Returned`, as a member
    ABSENT → LEAVING     `Returned`, as a member that leaves
    EARLY → WARMING      the first view comes about, and it has no room
    EARLY → MEMBER       the first view comes about
    WARMING → READY      `Ready`
    WARMING → MEMBER     likewise, and a view with it comes about at once
    READY → WARMING      the members are in a later training, to which it is told to go
    READY → MEMBER       a view that admits it comes about
    MEMBER → LEAVING     `Leaving`
    LEAVING → MEMBER     it is told to stay
    any → ABSENT         it has gone, or is out
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from ef_common.core.view import Member


class Phase(Enum):
    """The phase of a connected worker."""

    EARLY = "early"  # waits in its set-up for the first view
    WARMING = "warming"  # arrived after the first view, does its slow work
    READY = "ready"  # warm, waits at its first boundary
    MEMBER = "member"  # in the view
    LEAVING = "leaving"  # in the view, asked to leave at the next boundary


NEWCOMERS, MEMBERS = (Phase.WARMING, Phase.READY), (Phase.MEMBER, Phase.LEAVING)


class WorkerPhase(NamedTuple):
    """Where a connected worker stands.

    `training` is, of one that is ready, the training that it is ready for; of one that warms up, the one that it was
    told to go to. What it says of earlier ones was on its way by then.
    """

    member: Member
    phase: Phase
    training: int = 1


Workers = Mapping[str, WorkerPhase]
