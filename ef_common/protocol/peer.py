"""What the coordinator knows of the other end of a connection."""

from __future__ import annotations

import math
from enum import Enum, auto

from ef_common.core.view import Member, View
from ef_common.core.watermark import Watermark
from ef_common.protocol import wire
from ef_common.protocol.lines import Lines


class End(Enum):
    """How a connection ended."""

    CLOSED = "closed"  # in order: all that the peer had sent has come before
    RESET = "reset"  # by the peer's system, or by what lies between; the process may live
    BROKEN = "broken"  # no answer, or no way
    UNSENT = "unsent"  # we have reset it, as the peer had not read all that it must know first


class Coming(Enum):
    """Whether a worker comes from another coordinator: the states of :class:`~ef_common.protocol.returns.Returns`."""

    NEW = auto()  # it has not said so
    RETURNING = auto()  # it has, and is about to tell where it stands
    WAITING = auto()  # it has told that, with names of views that are not known yet
    HEARD = auto()  # likewise, and they are known
    BACK = auto()  # what it has told counts


class PeerRefusal(Exception):
    """A peer breaks the rules, so its connection is to be dropped; training is not affected.

    Args:
        kind: Of trouble. The log warns once of each.
        why: What the peer has done.
        code: As in :class:`~ef_common.protocol.wire.Error`.
    """

    def __init__(self, kind: str, why: str, *, code: str = "protocol") -> None:
        super().__init__(f"{kind}: {why}")
        self.kind, self.why, self.code = kind, why, code


class Peer:
    """The other end of a connection: a stranger, until it has proved itself.

    Args:
        address: Its IP address; "" if it is gone.
        now: When it has connected.
    """

    def __init__(self, address: str, now: float) -> None:
        self.address = address
        self.nonce = ""  # of our challenge
        self.proof = ""  # ours, once the peer has proved itself
        self.worker: str | None = None  # likewise
        self.member: Member | None = None  # likewise
        self.standby = 0  # port of the standby on the worker's node
        self.coming = Coming.NEW
        self.told = False  # it has told the views that it has named
        self.recalled: tuple[str, ...] = ()  # digests of views that it has been asked for
        self.later: list[bytes] = []  # lines that it has sent after its report
        self.later_bytes = 0
        self.view: View | None = None  # the newest one that it knows
        self.watermark: Watermark | None = None  # the newest one that it has told, as a member
        self.relayed = (0, 0)  # generation of a view, and bytes that it has published to its members
        self.since = now
        self.heard = now  # time of the last sign of life
        self.may_lead = True  # it has not proved to be a worker, which no coordinator is
        self.downlink: Peer | None = None  # the connection on which we speak to this worker, if it is not this one
        self.uplink: Peer | None = None  # likewise, the one of which this is the downlink
        self.deaf_since = math.inf  # when the downlink of this worker has ended
        self.moved = False  # it lives, and has gone to another coordinator
        self.dropped = False  # nothing of this peer counts any more
        self.lines = Lines(wire.MAX_STRANGER_BYTES)

    @property
    def returning(self) -> bool:
        """Whether it comes back, and what it tells does not count so far."""
        return self.coming in (Coming.RETURNING, Coming.WAITING, Coming.HEARD)
