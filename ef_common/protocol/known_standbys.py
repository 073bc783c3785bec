"""The standbys that a coordinator has heard of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ef_common.core.membership import Membership
from ef_common.core.view import Member
from ef_common.protocol.addresses import Address
from ef_common.protocol.peer import Peer

MAX_STANDBYS = 8192
"""Number of standbys whose addresses are kept; beyond it, only those of the newest view are kept."""
NUM_FORMER = 100
"""Number of standbys whose addresses are kept although no worker names them any more: lost workers may be there."""
_NUM_TOLD = 16  # the line must be short, as the worker does not trust us before it
_SHORT = 100


class KnownStandbys:
    """Addresses of the coordinators of all nodes, as far as workers have named them.

    It keeps those that a worker here or a member of the chain names, and a bounded number of former ones. Other threads
    may look, and forget one. To look again costs nothing until one is noted or forgotten.
    """

    def __init__(self) -> None:
        self._addresses: dict[Address, None] = {}
        self._version = object()  # replaced after each change; counting could lose one of two at once
        self._seen = (self._version, tuple[Address, ...]())  # a version, read before the addresses that it belongs to

    @property
    def addresses(self) -> tuple[Address, ...]:
        """All of them, the newest last; the same object until one is noted or forgotten."""
        version, seen = self._version, self._seen
        if seen[0] is not version:
            self._seen = seen = (version, tuple(self._addresses))
        return seen[1]

    def forget(self, address: Address) -> None:
        """Nobody will ever be there again."""
        self._addresses.pop(address, None)
        self._version = object()

    def note(self, members: Iterable[Member], workers: Mapping[str, Peer], state: Membership) -> None:
        """Note those of members that have come; if there are too many by now, forget the oldest that nobody names."""
        noted = _standbys_of(members)
        for address in noted:
            self._addresses.pop(address, None)
            self._addresses[address] = None
        if len(self._addresses) > 2 * max(NUM_FORMER, len(workers)):
            here = [peer.member for peer in workers.values() if peer.member is not None]
            named = _standbys_of((*here, *(member for link in state.chain for member in link.view.members))) | noted
            former = [address for address in list(self._addresses) if address not in named]
            self._addresses = dict.fromkeys(former[-max(NUM_FORMER, len(named)) :]) | named
        if len(self._addresses) > MAX_STANDBYS:
            self._addresses = _standbys_of(() if state.view is None else state.view.members)
        self._version = object()


def some_standbys(members: Iterable[Member]) -> tuple[Address, ...]:
    """Some standbys of these members, for a worker that knows none."""
    found: dict[Address, None] = {}
    for member in members:
        if member.standby and len(member.address) < _SHORT:
            found[member.address, member.standby] = None
            if len(found) == _NUM_TOLD:
                break
    return tuple(found)


def _standbys_of(members: Iterable[Member]) -> dict[Address, None]:
    return {(member.address, member.standby): None for member in members if member.standby}
