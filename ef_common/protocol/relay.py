"""Passes on what members publish to build the groups of their view."""

from __future__ import annotations

from math import inf

from ef_common.core.view import View
from ef_common.protocol import wire
from ef_common.protocol.peer import Peer, PeerRefusal

MAX_RELAYED_BYTES = 4 * 1024 * 1024
"""How much a member may publish in one view: less than what makes a slow reader lose its connection."""
MAX_VALUE_BYTES = 1024 * 1024
"""How long one value may be that a member publishes, with its key."""
_SMALL_WORLD = 16
"""Up to so many members, what one of them publishes is passed on at once."""
_GATHERED_S = 2e-5
"""Beyond that, what they publish is gathered for so long for each of them, or all would get one line for each."""
_GATHERED_BYTES = 256 * 1024

Passed = tuple[wire.Relayed, tuple[str, ...]]
"""A message, and the members that it goes to."""


class Relaying:
    """Gathers values, and passes them on to all members of the view in one message.

    ::

        empty → gathering   `publish`, if the view is large
        gathering → empty   `pass_on`; `clear`: there is a new view

    N members that publish a value each cost N messages of N values, and not N² messages.

    Attributes:
        due: When to pass on what has been gathered; inf if nothing has.
    """

    def __init__(self) -> None:
        self.due = inf
        self._published: list[tuple[str, str, bytes]] = []  # by whom, and what
        self._num_bytes = 0

    def publish(self, peer: Peer, message: wire.Relay, view: View | None, now: float) -> list[Passed]:
        """A worker publishes a value for the members of the view; returns what is to be passed on at once.

        Raises:
            PeerRefusal: It publishes too much.
        """
        worker = str(peer.worker)
        if view is None or view.generation != message.generation or view.rank_of(worker) is None:
            return []  # its sender will learn of the newer view
        generation, num_bytes = peer.relayed
        size = len(message.key) + len(message.value)
        peer.relayed = (view.generation, size + (num_bytes if generation == view.generation else 0))
        if peer.relayed[1] > MAX_RELAYED_BYTES or size > MAX_VALUE_BYTES:
            raise PeerRefusal("too much to relay", f"more than {MAX_RELAYED_BYTES} bytes in one view")
        passed = self.pass_on(view) if self._num_bytes + size > _GATHERED_BYTES else []
        self._published.append((worker, message.key, message.value))
        self._num_bytes += size
        if view.world_size <= _SMALL_WORLD:
            return passed + self.pass_on(view)
        if self.due == inf:
            self.due = now + _GATHERED_S * view.world_size
        return passed

    def pass_on(self, view: View | None) -> list[Passed]:
        """What has been gathered, for all members; what one of them alone has published, for the others."""
        published = self._published
        self.clear()
        if view is None or not published:
            return []
        values = tuple((key, value) for _, key, value in published)
        only = published[0][0] if len({worker for worker, _, _ in published}) == 1 else None
        return [(wire.Relayed(view.generation, values), tuple(worker for worker in view.ids if worker != only))]

    def clear(self) -> None:
        """Forget what has been gathered."""
        self._published, self._num_bytes, self.due = [], 0, inf
