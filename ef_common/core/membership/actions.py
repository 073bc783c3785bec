"""What is to be done: the actions of the membership machine.

Most of them tell workers something: the message is the action itself, without the names of those workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ef_common.core.quorum import Bid
from ef_common.core.view import View


class Action:
    """Base of all actions."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Accept(Action):
    """Take a worker in, and tell it to warm up (the job already runs), or to wait for the first view.

    `training`: the one that the members are in, so that a newcomer's program passes over those before it.
    """

    worker: str
    warm_up: bool
    training: int = 1


@dataclass(frozen=True, slots=True)
class Install(Action):
    """Send the view to its members and to the workers that it drops (they leave or are evicted)."""

    view: View
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Announce(Action):
    """Tell the members of the view of `generation` that a change is pending."""

    workers: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Skip(Action):
    """Tell a newcomer that the members are in this training: its program passes over those before it."""

    worker: str
    training: int


@dataclass(frozen=True, slots=True)
class Finish(Action):
    """Tell a worker that the job has ended."""

    worker: str


@dataclass(frozen=True, slots=True)
class Dismiss(Action):
    """End what a worker takes part in: the others continue without it."""

    worker: str
    why: str


@dataclass(frozen=True, slots=True)
class SendAway(Action):
    """End the connection of a worker that belongs to another coordinator, as this one is a standby."""

    worker: str


@dataclass(frozen=True, slots=True)
class Republish(Action):
    """Tell members of the view of `generation` to publish again: another one is back, and may lack what they have."""

    workers: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Resume(Action):
    """Tell the members of the view of `generation` that it continues under this coordinator."""

    workers: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class StepDown(Action):
    """End all connections: nothing more is decided here until members come again."""


@dataclass(frozen=True, slots=True)
class Abort(Action):
    """Tell a worker that the job has failed."""

    worker: str
    why: str


@dataclass(frozen=True, slots=True)
class Claim(Action):
    """Let a worker try to acquire a claim for these members."""

    worker: str
    bid: Bid


@dataclass(frozen=True, slots=True)
class Agree(Action):
    """Tell the members of the view of `generation` that all of them have the same store.

    `members`: a digest of them (:func:`~ef_common.core.quorum.digest_of_ids`), as another view may have its generation.
    """

    workers: tuple[str, ...]
    generation: int
    members: str


@dataclass(frozen=True, slots=True)
class Resign(Action):
    """Ask a member to leave, because it is replaced, or because fewer nodes are wanted."""

    worker: str


@dataclass(frozen=True, slots=True)
class Stay(Action):
    """Tell a member that has been asked to leave, and is about to, that it is needed after all."""

    worker: str
