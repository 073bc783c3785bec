"""Where a connected worker stands."""

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


class Standing(NamedTuple):
    """Where a connected worker stands.

    `training` is, of one that is ready, the training that it is ready for; of one that warms up, the one that it was
    told to go to. What it says of earlier ones was on its way by then.
    """

    member: Member
    phase: Phase
    training: int = 1


Workers = Mapping[str, Standing]
