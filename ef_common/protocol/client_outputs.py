"""What :class:`~ef_common.protocol.client.Client` asks of whoever runs it."""

from __future__ import annotations

from dataclasses import dataclass

from ef_common.core.quorum import Bid
from ef_common.core.stragglers import StragglerReport
from ef_common.protocol.addresses import Address
from ef_common.protocol.introduction import Introduction


class CoordinatorLink:
    """One connection to a coordinator.

    Args:
        address: Where the coordinator is.
        introduction: The handshake; it has what has come, also afterwards.
        now: When the connection is asked for.

    Attributes:
        heard: When something came last.
        reached: It was accepted, so there is a coordinator, or at least its system.
        ended: Whether it has ended in order; None as long as it has not ended.
    """

    def __init__(self, address: Address, introduction: Introduction, now: float) -> None:
        self.address = address
        self.introduction = introduction
        self.since = self.heard = now
        self.reached = False
        self.ended: bool | None = None


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to a coordinator, within some seconds; report how that ends, what comes, and the end.

    Args:
        link: The connection.
        timeout_s: How long it may take, with the proofs of TLS.
        accept_s: By when the system of the coordinator must have accepted it.
        beside: Another connection is open, and is read on.
    """

    link: CoordinatorLink
    timeout_s: float
    accept_s: float
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Send bytes, after all that was to be sent on the same link before."""

    link: CoordinatorLink
    data: bytes


@dataclass(frozen=True, slots=True)
class TrustLeader:
    """The coordinator has proved itself.

    Give the link up where bytes do not leave for `timeout_s`, or are not acknowledged for five times as long.
    """

    link: CoordinatorLink
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End a link at once. Nothing more is reported of it."""

    link: CoordinatorLink


@dataclass(frozen=True, slots=True)
class Leave:
    """End a link to a coordinator that must not take that for the end of this process.

    Send `word`, if it can be sent at once after all that was to be sent before; else, and without a word, reset the
    connection.
    """

    link: CoordinatorLink
    word: bytes | None


@dataclass(frozen=True, slots=True)
class EndSending:
    """Send all that was to be sent, and no more; what comes is still reported, until the coordinator ends the link."""

    link: CoordinatorLink


@dataclass(frozen=True, slots=True)
class AskForClaim:
    """Ask the store for a claim, and report the answer, or that there was none."""

    bid: Bid


@dataclass(frozen=True, slots=True)
class Replaced:
    """A newer view than the one of this generation's group is known, or none will come: end what is older."""

    generation: int


@dataclass(frozen=True, slots=True)
class Hung:
    """The others go on without this worker, since it has kept them waiting: see that its process ends."""

    why: str


ClientOutput = (
    Connect | Send | TrustLeader | Disconnect | Leave | EndSending | AskForClaim | Replaced | Hung | StragglerReport
)
"""A report says that this very worker is slower than the others, or no longer."""
