"""The workers that come back, and tell in which views they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from ef_common.core import membership
from ef_common.core.membership import Membership, Settings
from ef_common.core.view import View
from ef_common.protocol import wire
from ef_common.protocol.known_views import KnownViews
from ef_common.protocol.peer import Coming, Peer, PeerRefusal
from ef_common.protocol.relay import MAX_RELAYED_BYTES
from ef_common.protocol.server_outputs import Write

_RECALLS = 3
"""Number of workers that are asked for a view which they name: one of them may not answer."""
AT_ANY_TIME = (wire.Inquire, wire.Seek, wire.Heartbeat, wire.Moved, wire.Bye)
"""These are heard from a worker whose report waits, too."""
_BEFORE_RETURN = (wire.Return, wire.Follow, membership.Failed, *AT_ANY_TIME)


class Returns:
    """Takes the reports of workers that name their views by digests, and asks for the views that are not known.

    ::

        NEW → RETURNING       it introduces itself as one that comes back
        RETURNING → HEARD     `hear`: all views that it names are known
        RETURNING → WAITING   `hear`: some are not, and are asked for
        WAITING → HEARD       `ready`: they have been told since (`learn`)
        WAITING → gone        `forget`: others are asked in its place
        HEARD → BACK          `accept`: it is not refused

    N workers that name the same views cost three answers, and share one chain in memory.
    """

    def __init__(self) -> None:
        self._views = KnownViews()
        self._waiting: dict[Peer, wire.Return] = {}  # the reports that name views which are not known
        self._recalled: Counter[str] = Counter()  # how many of them have been asked for each such view, by its digest

    def hear(self, peer: Peer, report: wire.Return, state: Membership) -> list[Write]:
        """A worker tells where it stands; its report waits if a view that it names is not known, which is asked for."""
        self._views.add(link.view for link in state.chain)
        if not self._views.missing(report.received):
            peer.coming = Coming.HEARD
            return []
        peer.coming = Coming.WAITING
        self._waiting[peer] = report
        return self._recall(peer, report)

    def put_off(self, peer: Peer, line: bytes) -> None:
        """Keep what a worker says after a report that waits.

        Raises:
            PeerRefusal: It says too much.
        """
        peer.later.append(line)
        peer.later_bytes += len(line)
        if peer.later_bytes > MAX_RELAYED_BYTES:
            raise PeerRefusal("too much to wait for", f"more than {MAX_RELAYED_BYTES} bytes after its report")

    def learn(self, peer: Peer, views: tuple[View, ...]) -> bool:
        """A worker tells the views that it names; returns whether anybody needs them."""
        peer.told = True
        if peer not in self._waiting and not peer.recalled:
            return False
        self._views.add(views)
        return True

    def lacks_views_of(self, peer: Peer) -> bool:
        """Whether the report of this worker waits, and names views that are still not known."""
        report = self._waiting.get(peer)
        return report is not None and bool(self._views.missing(report.received))

    def ready(self) -> Iterator[tuple[Peer, wire.Return]]:
        """The reports that have waited, and need not any more; each as it is taken, since one may end another's."""
        for peer, report in list(self._waiting.items()):
            if peer in self._waiting and not self._views.missing(report.received):
                self._drop(peer)
                peer.coming = Coming.HEARD
                yield peer, report

    def event(self, report: wire.Return) -> membership.Returned:
        """What a report says, all of whose views are known, with these views.

        Raises:
            ProtocolError: A view is named by another generation.
        """
        return replace(report.event, received=self._views.chain(report.received))

    def accept(self, peer: Peer) -> None:
        """What a worker has told counts."""
        peer.coming = Coming.BACK

    def forget(self, peer: Peer) -> list[Write]:
        """A worker is gone; if it may have been asked for views, others that name them are asked."""
        if peer not in self._waiting:
            return []
        self._drop(peer)
        recalls: list[Write] = []
        for other, report in self._waiting.items() if peer.recalled else ():
            if not other.recalled:
                recalls += self._recall(other, report)
        return recalls

    def forget_views(self, state: Membership) -> None:
        """Forget the views that a quorum does not count in, unless reports wait."""
        if not self._waiting:
            self._views.keep(link.view for link in state.chain)

    def _recall(self, peer: Peer, report: wire.Return) -> list[Write]:
        """Ask a worker for views that it has named, unless enough have been asked."""
        missing = self._views.missing(report.received)
        if all(self._recalled[digest] >= _RECALLS for digest in missing):
            return []
        peer.recalled = missing
        self._recalled.update(missing)
        return [Write(peer, wire.encode(wire.Recall(missing)))]

    def _drop(self, peer: Peer) -> None:
        """Its report waits no more."""
        del self._waiting[peer]
        self._recalled -= Counter(peer.recalled)


def is_in_order(peer: Peer, message: wire.FromWorker) -> bool:
    """Whether only a returning worker reports its resume state and its views, once and before almost anything else."""
    if isinstance(message, wire.Told):
        return peer.coming not in (Coming.NEW, Coming.RETURNING) and not peer.told
    if peer.returning:
        return isinstance(message, _BEFORE_RETURN)
    return not isinstance(message, (wire.Return, wire.Follow))


def is_elsewhere(event: membership.Returned, state: Membership, settings: Settings) -> bool:
    """Whether a worker reports another coordinator's newer view: nobody can have issued it if most members are here.

    No other coordinator can have had the quorum for such a view (:mod:`ef_common.core.quorum`), except by a claim. In
    that case ours is held back as soon as this worker is given up, and the worker is believed when it returns. A worker
    that is no member, and that knows only of views that never came about, is no liar: it hears that it is out.
    """
    view = state.view
    if view is None or state.held or settings.on_minority == "continue":
        return False
    newest = max([event.promised, *(link.view.generation for link in event.received)])
    is_newer = view.rank_of(event.member.id) is not None and newest > state.generation
    return is_newer or membership.is_news(state, event.received, event.settled)  # of our generation, maybe
