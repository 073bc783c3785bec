"""A policy of a user's that keeps the number of nodes, and names a batch for a while."""

from __future__ import annotations

from dataclasses import dataclass

from ef_common.core.autoscale import Situation, Target

SMALL = 12
"""Samples: less than two workers have with the batch of 8 of these trainings."""


@dataclass(frozen=True)
class SmallAtFirst:
    """Asks for a small batch as long as it is larger, but not with one node."""

    def decide(self, situation: Situation) -> Target | None:
        """The batch that the test waits for."""
        if situation.size == 1 or situation.batch_size <= SMALL:
            return None
        return Target(situation.size, "the test wants a small batch", SMALL)
