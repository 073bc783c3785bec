"""The stages of a session, and what leads from one to the next.

::

    OUTSIDE → RECOVERING            `start`: the job begins with this worker
    OUTSIDE → WARMING               `start`: the job runs already, so this worker is a newcomer
    WARMING → JOINING               `join`: everything slow is done
    JOINING → WARMING               the others have come to a later training
    JOINING → STEPPING              it is admitted and has the state
    STEPPING → AT_BOUNDARY          `boundary`: all members have agreed on a change
    AT_BOUNDARY → RECOVERING        all have met there, or one of them is lost
    STEPPING → RECOVERING           the group has broken in a collective
    RECOVERING → STEPPING           a view holds: what its members owed each other is settled

An error ends the session. It leaves the stage as it was:

    OUTSIDE → Left                  this worker asked to leave before it was a member
    WARMING → Left                  likewise
    JOINING → CannotJoin            it cannot continue from the state of the others
    STEPPING → CallMismatch         the members are in different calls
    AT_BOUNDARY → CallMismatch      likewise
    RECOVERING → Left               this worker asked to leave, and the view is without it
    RECOVERING → CoordinatorLost    no view can come; likewise if the job has failed or this worker is evicted
    ALONE → Left                    this process asked to leave; it has saved its state
"""

from __future__ import annotations

from enum import Enum, auto


class Stage(Enum):
    """What a worker does."""

    ALONE = auto()  # trains in a process without a coordinator, so that nobody can come
    OUTSIDE = auto()  # has not asked the coordinator yet
    WARMING = auto()  # a newcomer, which prepares by itself while the others train
    JOINING = auto()  # a newcomer, which waits to be admitted and for the state
    STEPPING = auto()  # a member between two changes
    AT_BOUNDARY = auto()  # a member that meets all others between two steps
    RECOVERING = auto()  # a member that waits for a view and settles in it
