"""The policies among which the administrator of a cluster may choose.

There is one rule, :mod:`ef_common.core.cluster.shares`. A policy says what the rule is told of a job.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from ef_common.core.cluster.state import Job


class SharePolicy(Enum):
    """How the pods for which there is room are divided among the jobs."""

    FAIR = "fair"  # each job gets its minimum; what is left is shared equally
    PRIORITY = "priority"  # the same, but what is left goes to the jobs of the highest priority first
    GANG = "gang"  # a job gets its maximum or nothing, and the oldest comes first: what clusters do without elasticity

    def told_of(self, job: Job) -> Job:
        """The job, as the rule is told of it."""
        return replace(job, minimum=job.maximum, priority=0) if self is SharePolicy.GANG else job

    def tier(self, job: Job) -> int:
        """What is left is dealt among the jobs of the lowest tier first, and then among those of the next one."""
        return -job.priority if self is SharePolicy.PRIORITY else 0
