"""The port of the policies: what one sees, and what it answers.

The runtime asks the policy after each window of training steps at an unchanged size, once no wish is on its way. A
policy has no memory of its own: everything that it may remember (measures, trials and when they were made) is in the
history, which outlives rank 0 and goes into the checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from ef_common.core.throughput import SpeedHistory


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy sees. Sizes are nodes, durations seconds.

    Args:
        size: Nodes now.
        least: The fewest that the policy may ask for.
        most: The most that it may ask for: the user's limit, the job's, and for a while what could be had.
        now: The time (epoch seconds).
        history: What the run has learned. The newest measure of the present size may be from before.
        batch_size: Samples of an update of all workers together.
        local_batch_size: Those of one worker, as the user has set them; None: `batch_size` by the workers.
        workers_per_node: Workers of a node.
        elapsed_s: Duration of the run so far, from its first start on.
        worker_s: Time of all workers together so far.
        remaining_samples: Samples to the end of the training, if the batch of all workers stays; None if unknown.
        counts_steps: The training ends after a number of steps: with another batch, other samples remain.
    """

    size: int
    least: int
    most: int
    now: float
    history: SpeedHistory = field(default_factory=SpeedHistory)
    batch_size: int = 1
    local_batch_size: int | None = None
    workers_per_node: int = 1
    elapsed_s: float = 0.0
    worker_s: float = 0.0
    remaining_samples: float | None = None
    counts_steps: bool = False

    @property
    def local_batch(self) -> int:
        """Samples of an update of one worker, as the user has set them."""
        return self.local_batch_size or max(1, round(self.batch_size / (self.size * self.workers_per_node)))

    def bounded(self, size: float) -> int:
        """The nearest size within the limits.

        >>> situation = Situation(size=2, least=1, most=6, now=0.0)
        >>> situation.bounded(8), situation.bounded(0), situation.bounded(2.6)
        (6, 1, 3)
        """
        return max(self.least, min(self.most, round(size)))


class Target(NamedTuple):
    """The size that a policy asks for.

    Args:
        size: Nodes.
        reason: Why, in one line, with the numbers that decided.
        batch_size: The global batch that it asks for, in samples; None: no wish.
    """

    size: int
    reason: str
    batch_size: int | None = None


@runtime_checkable
class Policy(Protocol):
    """Chooses the size of a job.

    One of a user's own, which takes a second node only at night:

    >>> class Night:
    ...     def decide(self, situation):
    ...         hour = situation.now / 3600 % 24
    ...         size = 2 if hour < 6 else 1
    ...         if size == situation.size:
    ...             return None
    ...         return Target(situation.bounded(size), f"it is {hour:.0f} o'clock UTC")
    >>> Night().decide(Situation(size=1, least=1, most=4, now=3 * 3600.0))
    Target(size=2, reason="it is 3 o'clock UTC", batch_size=None)
    >>> isinstance(Night(), Policy)
    True
    """

    def decide(self, situation: Situation) -> Target | None:
        """The size to ask for; None if the job should stay as it is. Neither blocks nor keeps anything."""
        ...
