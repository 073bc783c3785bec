"""The connections of a coordinator: those of strangers, of workers, and of workers that are out."""

from __future__ import annotations

from itertools import takewhile

from ef_common.core.view import Member, View
from ef_common.protocol import fields, wire
from ef_common.protocol.auth import new_nonce
from ef_common.protocol.peer import Coming, Peer, PeerRefusal
from ef_common.protocol.server_outputs import Close, Output, Write, WriteOrReset

MAX_STRANGERS = 512
"""Maximal number of unauthenticated connections; one more closes the oldest."""
MAX_WORKERS = 8192
"""Maximal number of authenticated connections; one more is refused."""
_DEAF_S = 1.0
"""How long a worker may live whose downlink has ended: if its process has, the end of its connection comes soon."""
STRANGER_S = 2.0
"""How long a stranger may take to introduce itself, at least."""


class Sessions:
    """Knows what each connection is, and gives what is to be sent over it, or its end.

    ::

        stranger → worker    `adopt`: it has proved that it is this worker
        stranger → gone      `forget`
        stranger → downlink  `attach`: it has proved that it is the second connection of a worker
        worker → gone        `forget`; likewise `evict` and `suspend`, if its node has no standby
        worker → out         `forget` and `evict`, if its node has a standby
        worker → suspended   `forget` and `suspend`, if its node has a standby
        suspended → out      `tell_out`: others go on without it
        suspended → gone     `discard`, `discard_all`
        out → gone           likewise

    The connection of a worker that is out is kept, because its end tells when the worker is gone for good. One that is
    suspended is not told yet: if it is we who are cut off, it must live, to go on with the others.

    Attributes:
        workers: The connections of workers that count, by id.
    """

    def __init__(self) -> None:
        self.workers: dict[str, Peer] = {}
        self._strangers: dict[Peer, None] = {}  # ordered by age
        self._out: dict[Peer, str | None] = {}  # in order of time; and why, if not told so far
        self._members_bytes = 0  # that a view of all workers would take

    # ------------------------------------------------------------ strangers

    def connect(self, address: str, now: float) -> Peer:
        """A stranger has connected from this IP address; it is to be challenged."""
        peer = Peer(address, now)
        peer.nonce = new_nonce()
        self._strangers[peer] = None
        return peer

    @property
    def is_crowded(self) -> bool:
        """Whether there are too many strangers."""
        return len(self._strangers) > MAX_STRANGERS

    def oldest(self, number: int) -> list[Peer]:
        """The strangers that have been connected for longest."""
        return list(self._strangers)[:number]

    def overdue(self, now: float, timeout_s: float) -> list[Peer]:
        """The strangers that do not introduce themselves."""
        longest_s = max(timeout_s, STRANGER_S)
        return list(takewhile(lambda peer: now - peer.since > longest_s, self._strangers))

    # ------------------------------------------------------------ workers

    def check_room(self, member: Member) -> None:
        """Make sure that there is room for this worker.

        Raises:
            PeerRefusal: Too many are connected.
        """
        if member.id in self.workers:
            return
        if len(self.workers) + len(self._out) >= MAX_WORKERS:
            raise PeerRefusal("too many workers", f"{MAX_WORKERS} are connected")
        if self._members_bytes + fields.size_of(member) > wire.MAX_MEMBERS_BYTES:
            raise PeerRefusal("too many workers", f"{len(self.workers)} are connected, all that fit in a view")

    def adopt(self, peer: Peer, member: Member, *, proof: str, returning: bool) -> None:
        """A stranger has proved to be this worker, and is sent our proof; it may come back from another coordinator."""
        self._strangers.pop(peer, None)
        peer.worker, peer.member, peer.standby = member.id, member, member.standby
        peer.proof, peer.coming = proof, Coming.RETURNING if returning else Coming.NEW
        peer.lines.max_bytes = wire.MAX_LINE_BYTES
        self.workers[member.id] = peer
        self._members_bytes += fields.size_of(member)

    def attach(self, downlink: Peer, peer: Peer) -> None:
        """A stranger has proved that it is the downlink of this worker."""
        self._strangers.pop(downlink, None)
        downlink.uplink, peer.downlink = peer, downlink

    def deaf(self, now: float) -> list[Peer]:
        """The workers that speak, and cannot be spoken to."""
        return [peer for peer in self.workers.values() if now - peer.deaf_since > _DEAF_S]

    def forget(self, peer: Peer) -> bool:
        """A connection no longer counts; returns whether it was that of a worker."""
        self._strangers.pop(peer, None)
        if peer.worker is None or self.workers.get(peer.worker) is not peer:
            return False
        del self.workers[peer.worker]
        self._members_bytes -= 0 if peer.member is None else fields.size_of(peer.member)
        return True

    def has_most_of(self, view: View | None) -> bool:
        """Whether most members of a view are connected, and have told where they stand if they came back."""
        if view is None:
            return False
        here = sum(worker in self.workers and not self.workers[worker].returning for worker in view.ids)
        return 2 * here > view.world_size

    def proof_to(self, worker: str) -> str:
        """Our proof for this worker; nobody's, if it is gone."""
        return self.workers[worker].proof if worker in self.workers else "0" * 64

    def tell(self, message: wire.FromCoordinator, *workers: str, can_wait: bool = False) -> list[Write]:
        """What sends a message to workers; if one is gone, the event that says so waits its turn."""
        line = wire.encode(message)
        return [Write(self.workers[worker], line, can_wait) for worker in workers if worker in self.workers]

    # ------------------------------------------------------------ workers that are out

    def is_out(self, peer: Peer) -> bool:
        """Whether this worker is out, and its connection is kept."""
        return peer in self._out

    def evict(self, peer: Peer, why: str, *, hung: bool = False) -> Output:
        """What tells a worker that it is out. It must not learn that later than those that continue without it."""
        last_words = wire.encode(wire.Eviction(why, hung))
        if not peer.standby:
            return Close(peer, last_words)
        self._out[peer] = None  # nobody but its system can tell when it is gone for good
        return WriteOrReset(peer, last_words)

    def suspend(self, peer: Peer, why: str) -> list[Output]:
        """A worker is silent: it is out, and is not told yet, if others could take it."""
        if not peer.standby:
            return [self.evict(peer, why)]
        self._out[peer] = why
        return []

    def tell_out(self, view: View | None = None) -> list[Output]:
        """What tells workers that they are out, if they have not been told yet, and are out of this view, too."""
        untold = {peer: why for peer, why in self._out.items() if why is not None}
        self._out |= dict.fromkeys(untold)
        return [
            self.evict(peer, why)
            for peer, why in untold.items()
            if view is None or view.rank_of(str(peer.worker)) is None
        ]

    def discard(self, peer: Peer) -> bool:
        """A worker that is out is gone; returns whether it was out."""
        was_out = peer in self._out
        self._out.pop(peer, None)
        return was_out

    def discard_all(self) -> list[Output]:
        """What ends the connections of all workers that are out."""
        gone, self._out = self._out, {}
        return [Close(peer) for peer in gone]
