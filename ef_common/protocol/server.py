"""The coordinator's server as a state machine, between the connections and the membership machine.

It does no I/O and has no clock: whoever runs it (:class:`~ef_common.control.coordinator.Coordinator` over sockets, the
simulator over a simulated network) reports what has happened, with the time, and carries out its `outputs` in order.
What follows from an event is decided by :func:`ef_common.core.membership.decide` and by nothing here; this module turns
lines and lost connections into events, and actions into lines. What it must remember for that is kept by smaller
machines, each of which knows nothing of the others: see the table in docs/architecture.md.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf

from ef_common.core import membership
from ef_common.core.membership import Forming, Gathering, Idle, Membership, Serving, Settings, decide
from ef_common.core.progress import Limits
from ef_common.core.view import Member, View
from ef_common.errors import ProtocolError
from ef_common.protocol import returns, sessions, wire
from ef_common.protocol.action_outputs import answer_heartbeat, outputs_of
from ef_common.protocol.admission import Admission
from ef_common.protocol.auth import Token
from ef_common.protocol.fields import clip
from ef_common.protocol.journal import Journal
from ef_common.protocol.known_standbys import KnownStandbys
from ef_common.protocol.leadership import Leadership, why_out
from ef_common.protocol.liveness import Liveness
from ef_common.protocol.peer import Coming, End, Peer, PeerRefusal
from ef_common.protocol.relay import Relaying
from ef_common.protocol.returns import Returns
from ef_common.protocol.room_news import RoomNews
from ef_common.protocol.server_outputs import Close, Output, Probe, Write, WriteOrReset
from ef_common.protocol.sessions import Sessions
from ef_common.protocol.ticks import Probes, Ticks

logger = logging.getLogger(__name__)

_ALIVE = wire.encode(wire.Alive())


class CoordinatorServer:
    """Turns incoming messages into events, and the resulting actions into messages.

    Times are those of a monotonic clock, in seconds.

    Args:
        now: The time.
        token: The job token, or None.
        settings: Settings of the membership.
        heartbeat_timeout_s: A worker that is silent for longer is evicted.
        limits: When a worker counts as hung.
        standby: Whether it begins as a standby.
        name: Ranks it among those that gather members at the same time: the first in order is to be preferred.
        job: Name of the job; "" if it has none.

    Attributes:
        outputs: What is to be done, the oldest first; whoever does it removes it.
        state: The decisions so far; the state is immutable, so any thread may read it.
        standbys: Addresses of the coordinators of all nodes that were heard of.
        liveness: What the heartbeats tell.
    """

    def __init__(
        self,
        now: float,
        *,
        token: Token | None,
        settings: Settings,
        heartbeat_timeout_s: float,
        limits: Limits,
        standby: bool = False,
        name: str = "",
        job: str = "",
    ) -> None:
        self.outputs: deque[Output] = deque()
        self.state: Membership = Idle() if standby else Forming()
        self.standbys = KnownStandbys()
        self.liveness = Liveness(heartbeat_timeout_s, limits, now)
        self._now = now
        self._settings = settings
        self._events: deque[tuple[membership.Event, Peer | None]] = deque()
        self._deciding = False
        self._ticks = Ticks()
        self._admission = Admission(token)
        self._sessions = Sessions()
        self._returns = Returns()
        self._leadership = Leadership(name, job)
        self._relay = Relaying()
        self._room = RoomNews()
        self._probes = Probes()
        self._journal = Journal()

    @property
    def workers(self) -> Mapping[str, Peer]:
        """The connections of workers, by id."""
        return self._sessions.workers

    @property
    def leader(self) -> str:
        """Address of the coordinator to which this one sends workers that it does not lead; "" if it knows none."""
        return self._leadership.leader

    @property
    def deadline(self) -> float:
        """When :meth:`tick` is to be called; it may be called earlier, too."""
        ticks = min(self._ticks.due, self._ticks.soon)
        return min(self.liveness.sweep_at, ticks, self._probes.due, self._relay.due, self._room.due)

    # ------------------------------------------------------------ what happens

    def connect(self, address: str, now: float) -> Peer:
        """A peer has connected from this IP address; it is challenged."""
        self._now = now
        peer = self._sessions.connect(address, now)
        if self._sessions.is_crowded:
            self.make_room(1, f"more than {sessions.MAX_STRANGERS} unauthenticated connections")
        self._write(peer, wire.Challenge(peer.nonce))
        return peer

    def receive(self, peer: Peer, data: bytes, now: float) -> None:
        """Bytes of a peer have come."""
        self._now = now
        peer.heard = now
        peer.lines.feed(data)
        while not peer.dropped:
            try:
                line = peer.lines.next()
            except ProtocolError as error:
                self._refuse(peer, "long line", str(error))
                return
            if line is None:
                return
            self._take(peer, line)

    def end(self, peer: Peer, how: End, now: float) -> None:
        """A connection has ended, so its worker is gone. How it ended decides whether its process is, too."""
        self._now = now
        if peer.uplink is not None:
            self._end_downlink(peer, peer.uplink, how)
        elif self._sessions.discard(peer):
            self._emit([Close(peer, resets=how is not End.CLOSED)])  # it may not have been told that it is out
            if how is End.CLOSED and peer.worker not in self.workers and not peer.moved:
                self._submit(membership.Gone(str(peer.worker), "its process ended"), None)
        elif not peer.dropped:
            # Whoever was about to tell where it stands may have been in a view of another coordinator. A reset may come
            # of a worker that cannot say that it goes to another one, or of what lies between.
            proves = how is End.CLOSED and self.liveness.is_attentive(now) and not peer.returning
            why = "its connection was reset" if how is End.UNSENT else "its connection ended"
            self._depart(peer, why, silent=not proves, resets=how is not End.CLOSED)

    def _end_downlink(self, downlink: Peer, peer: Peer, how: End) -> None:
        """A worker is no longer spoken to. If that is the end of its process, the end of its connection follows."""
        self._emit([Close(downlink)])
        peer.deaf_since = min(peer.deaf_since, self._now)
        if how is End.UNSENT:
            self.end(peer, how, self._now)

    def distrust(self, peer: Peer, why: str, now: float) -> None:
        """A connection is not safe: the peer does not prove who it is, or what it sent was changed."""
        self._now = now
        if not peer.dropped:
            # Words on a downlink would be believed, and the worker would end.
            self._refuse(peer, "no TLS", why, tells=peer.downlink is None and peer.uplink is None)

    def overflow(self, peer: Peer, num_bytes: int, now: float) -> None:
        """A peer does not read what it is sent."""
        self._now = now
        if not peer.dropped:
            self._refuse(peer, "slow reader", f"it left {num_bytes} bytes unread")

    def refused(self, worker: str, now: float) -> None:
        """A probe was refused: nobody listens any more where the process of a worker did, or so it seems."""
        self._now = now
        self._submit(membership.Refused(worker), None)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._now = now
        if isinstance(self.state, Forming) and not self.liveness.has_listened(now):
            # The last call begins anew: the connections of those who are here may have ended meanwhile.
            self.state = replace(self.state, last_arrival=now)
            self._ticks.arm(self.state, self._settings)
        if self._ticks.take(now):
            self._submit(membership.Tick(), None)
        if now >= self._relay.due:
            self._tell(self._relay.pass_on(self.state.view))
        if now >= self._probes.due:
            self._emit(self._probes.look(self.state, now))
        if now >= self._room.due:
            self._tell(self._room.tell(self.state, self._settings, now))
        if now >= self.liveness.sweep_at:
            self._sweep()

    def hand_over(self, node: str, now: float) -> bool:
        """Let another coordinator lead, because this one, on this node, is to end: that of a member on another node.

        Returns:
            Whether there is one. The members have been sent to it, where they gather.
        """
        self._now = now
        hands_over = self._leadership.hand_over(node, self.state)
        if hands_over:
            self._step_down()
        return hands_over

    def lead(self, now: float) -> None:
        """The agent of this standby has founded the job (:mod:`ef_common.core.doors`), so it waits for workers."""
        self._now = now
        if isinstance(self.state, Idle):
            self.state = Forming(generation=self.state.generation)
        self._ticks.arm(self.state, self._settings)

    def follow(self, leader: str, now: float) -> None:
        """The agent of this standby has found the job, which is led from this address."""
        self._now = now
        self._leadership.follow(leader)

    def make_room(self, number: int, why: str) -> None:
        """Close the oldest strangers."""
        for peer in self._sessions.oldest(number):
            self._journal.notice("crowd", "closing the oldest unauthenticated connections: %s", why)
            self._close(peer)

    # ------------------------------------------------------------ what is to be done

    def _emit(self, outputs: Iterable[Output]) -> None:
        """Ask for what is to be done, but for nothing more with a connection that has been given up."""
        for output in outputs:
            if isinstance(output, Probe):
                self.outputs.append(output)
            elif not output.peer.dropped:
                output.peer.dropped = isinstance(output, Close)
                self.outputs.extend(_by_downlink(output, output.peer.downlink))

    def _write(self, peer: Peer, message: wire.FromCoordinator) -> None:
        self._emit([Write(peer, wire.encode(message))])

    def _tell(self, messages: Iterable[tuple[wire.FromCoordinator, Iterable[str]]]) -> None:
        for message, workers in messages:
            self._emit(self._sessions.tell(message, *workers))

    # ------------------------------------------------------------ lines

    def _take(self, peer: Peer, line: bytes) -> None:
        """Take a line of a stranger or of a worker."""
        try:
            message = wire.decode_from_worker(line, sender=peer.member, max_bytes=peer.lines.max_bytes)
        except ProtocolError as error:
            self._refuse(peer, "malformed message", str(error))
            return
        try:
            if peer.worker is None:
                self._introduce(peer, message)
            elif peer.coming is not Coming.WAITING or isinstance(message, (wire.Told, *returns.AT_ANY_TIME)):
                self._hear(peer, peer.worker, message)
            else:
                self._returns.put_off(peer, line)
        except PeerRefusal as refusal:
            self._refuse(peer, refusal.kind, refusal.why, code=refusal.code)

    def _refuse(self, peer: Peer, kind: str, why: str, *, code: str = "protocol", tells: bool = True) -> None:
        """Drop a peer that breaks the rules; training is not affected."""
        peer = peer.uplink or peer
        who = peer.address if peer.worker is None else f"worker {peer.worker}"
        self._journal.notice(kind, "dropped the connection of %s (%s): %s", who, kind, why)
        # It may not read our last words, and go on with another coordinator.
        last_words = wire.encode(wire.Error(code, why)) if tells else b""
        self._depart(peer, f"{kind}: {why}", last_words=last_words, silent=True, resets=not tells)

    def _introduce(self, peer: Peer, message: wire.FromWorker) -> None:
        if not isinstance(message, wire.Hello) or peer.uplink is not None:
            raise PeerRefusal("no introduction", f"expected hello, got {type(message).__name__}")
        proof = self._admission.prove(peer.nonce, message)
        if message.downlink:
            self._take_downlink(peer, message.member.id, proof)
            return
        self._sessions.check_room(message.member)
        member = replace(message.member, address=message.member.address or peer.address)
        self.standbys.note((member,), self.workers, self.state)
        before = self.workers.get(member.id)
        if before is not None:  # that connection has broken, or was given up, and this has not been noticed
            self._close(before)
            if not message.returning:  # it holds nothing of what has been decided for it
                self._submit(membership.Gone(member.id, "it has begun anew"), None)
        self._admission.remember(member.id, message.key)
        self._sessions.adopt(peer, member, proof=proof, returning=message.returning)
        if message.returning:
            accept = membership.Accept(member.id, warm_up=False)
            self._write(peer, wire.Welcome(accept, self.liveness.timeout_s, proof, ()))
        else:
            self._ticks.arrived(self.state, self._now)
            self._submit(membership.Arrived(member), peer)

    def _take_downlink(self, downlink: Peer, worker: str, proof: str) -> None:
        """Speak to a worker on a connection on which it says nothing from now on."""
        peer = self.workers.get(worker)
        if peer is None or peer.downlink is not None:  # it has gone since it has set out
            self._close(downlink)
            return
        accept = membership.Accept(worker, warm_up=False)
        self._write(downlink, wire.Welcome(accept, self.liveness.timeout_s, proof, ()))
        self._emit([WriteOrReset(peer, wire.encode(wire.Downlink()))])  # an end in order must come after that
        self._sessions.attach(downlink, peer)

    def _hear(self, peer: Peer, worker: str, message: wire.FromWorker) -> None:
        match message:
            case _ if self._sessions.is_out(peer):
                if isinstance(message, (wire.Moved, wire.Bye)):
                    peer.moved = isinstance(message, wire.Moved)
                    self.end(peer, End.CLOSED, self._now)
            case _ if not returns.is_in_order(peer, message):
                raise PeerRefusal("wrong order", f"{type(message).__name__} is not expected now")
            case wire.Return():
                self._emit(self._returns.hear(peer, message, self.state))
                if peer.coming is not Coming.WAITING:
                    self._take_back(peer, message)
            case wire.Told(views):
                self._hear_views(peer, views)
            case wire.Moved():
                self._depart(peer, "it has gone to another coordinator", silent=True)
            case wire.Follow() if not peer.may_lead:
                raise PeerRefusal("no coordinator", "its certificate is that of a worker")
            case wire.Follow():
                self._depart(peer, "it is a coordinator", silent=True)
                event = self._leadership.heed(worker, peer.address, message, self.state, self._now)
                if event is not None:
                    self._submit(event, None)
            case wire.Heartbeat():
                if not peer.returning:  # else it is not known yet what it speaks of
                    self._emit(answer_heartbeat(worker, self.state, self._sessions))
                    self.liveness.hear(peer, message, self.state, self._now)
                if peer.standby:
                    self._emit([Write(peer, _ALIVE, can_wait=True)])
            case wire.Relay() if self.state.held:
                pass  # some who are here may know another view of its generation, which is not to come about either
            case wire.Relay():
                self._tell(self._relay.publish(peer, message, self.state.view, self._now))
            case wire.Inquire() if isinstance(self.state, Idle):
                self._redirect(worker)
            case wire.Inquire(asked):
                why = why_out(asked, self.state)
                self._write(peer, wire.Eviction(why) if why else wire.Alive())
            case wire.Seek():
                self._write(peer, self._leadership.answer(peer, message, self.state, self._now))
            case wire.Bye():
                self._depart(peer, "it said goodbye", goodbye=True)
            case wire.Hello():
                raise PeerRefusal("second introduction", "a worker introduces itself once")
            case membership.Event():
                self._submit(message, peer)

    def _hear_views(self, peer: Peer, views: tuple[View, ...]) -> None:
        """A worker tells the views that it names; whoever has waited for them is heard now."""
        if not self._returns.learn(peer, views):
            return
        if self._returns.lacks_views_of(peer):
            self._refuse(peer, "unknown views", "it names views that it does not tell")
        for other, report in self._returns.ready():
            self._take_back(other, report)
            lines, other.later = other.later, []
            for line in lines:  # what it has said since its report
                if not other.dropped:
                    self._take(other, line)

    def _take_back(self, peer: Peer, report: wire.Return) -> None:
        try:
            event = self._returns.event(report)
        except ProtocolError as error:
            self._refuse(peer, "malformed report", str(error))
            return
        view = self.state.view
        if returns.is_elsewhere(event, self.state, self._settings) and self._sessions.has_most_of(view):
            # Not refused: if it is early news after all, and no lie, its worker tries again.
            self._journal.notice("impossible", "worker %s names views that nobody can have issued", peer.worker)
            self._depart(peer, "it has come back with impossible news", silent=True, resets=True)
        else:
            self._returns.accept(peer)
            if peer.view is None and event.received:  # else it has been told a newer one meanwhile
                peer.view = event.received[-1].view
            self._room.returned()
            self._submit(event, peer)
            self._ticks.arrived(self.state, self._now)

    # ------------------------------------------------------------ workers that go

    def _depart(
        self,
        peer: Peer,
        why: str,
        *,
        last_words: bytes = b"",
        goodbye: bool = False,
        silent: bool = False,
        resets: bool = False,
    ) -> None:
        """End the connection of a stranger, or of a worker, which is gone."""
        if self._close(peer, last_words, resets=resets):
            self._submit(membership.Gone(str(peer.worker), clip(why), goodbye=goodbye, silent=silent), None)

    def _evict(self, peer: Peer, why: str, *, hung: bool = False) -> None:
        self._forget(peer)
        self._emit([self._sessions.evict(peer, why, hung=hung)])

    def _suspend(self, peers: list[Peer], why: str) -> None:
        """Note silent workers; they learn that they are out once others continue without them."""
        for peer in peers:
            self._forget(peer)
            self._emit(self._sessions.suspend(peer, why))
        self._submit(membership.Silent(tuple(str(peer.worker) for peer in peers), why), None)
        if not self.state.held and not isinstance(self.state, Gathering):
            self._emit(self._sessions.tell_out())

    def _redirect(self, worker: str) -> None:
        peer = self.workers.get(worker)
        if peer is not None:
            self._close(peer, wire.encode(wire.Redirect(self.leader, peer.proof)))

    def _close(self, peer: Peer, last_words: bytes = b"", *, resets: bool = False) -> bool:
        """End a connection, and remove it from the books; returns whether it was a worker's."""
        present = self._forget(peer)
        self._emit([Close(peer, last_words, resets)])
        return present

    def _forget(self, peer: Peer) -> bool:
        """Remove a connection from the books; returns whether it was a worker's."""
        if not self._sessions.forget(peer):
            return False
        self._emit(self._returns.forget(peer))
        self.liveness.forget(str(peer.worker))
        self._admission.forget([str(peer.worker)], self.state)
        return True

    # ------------------------------------------------------------ decisions

    def _submit(self, event: membership.Event, cause: Peer | None) -> None:
        """Decide on an event, after those that arrived before it.

        To perform an action may drop a connection, which is an event again: it waits until all messages of
        the decision in hand are out, or a worker could receive two views in the wrong order.
        """
        self._events.append((event, cause))
        if self._deciding:
            return
        self._deciding = True
        try:
            while self._events:
                self._decide(*self._events.popleft())
        finally:
            self._deciding = False
        self._ticks.arm(self.state, self._settings)

    def _decide(self, event: membership.Event, cause: Peer | None) -> None:
        before = self.state.view
        try:
            state, actions, reason = decide(self.state, event, self._now, self._settings)
        except ProtocolError as error:
            if cause is not None:
                self._refuse(cause, "illegal event", str(error))
            return
        if state.failed and not self.state.failed:  # noted first, as the announcer may look at any time
            self.standbys.note(_heard_of(self.state, event), self.workers, self.state)
        self.state = state
        try:
            for action in actions:
                self._perform(action)
        except Exception as error:
            self._break(error)
        if self._probes.due == inf:
            self._emit(self._probes.look(self.state, self._now))
        self._room.decided(self.state, self._now)
        if self.state.view is not before:
            self.liveness.viewed_at = self._now
            self._relay.clear()
            self._returns.forget_views(self.state)
            news = self.state.chain if before is None else self.state.chain[-1:]  # the views before have been noted
            members = (member for link in news for member in link.view.members)
            self.standbys.note(members, self.workers, self.state)
        self._journal.decided(before, self.state, reason)

    def _break(self, error: Exception) -> None:
        """A decision cannot be sent to all workers. End all connections, or some would wait for it forever.

        In a job with standbys, the workers gather again at one of the coordinators, and tell where they stand.
        """
        logger.error("the coordinator cannot tell what it has decided, and steps down: %s", error, exc_info=error)
        self._step_down()

    def _step_down(self) -> None:
        self.state, actions, _ = membership.step_down(self.state)
        for action in actions:
            self._perform(action)
        self._ticks.arm(self.state, self._settings)

    def _perform(self, action: membership.Action) -> None:
        match action:
            case membership.Dismiss(worker, why):
                if worker in self.workers:
                    self._evict(self.workers[worker], why)
            case membership.SendAway(worker):
                self._redirect(worker)
            case membership.StepDown():
                for worker in list(self.workers):
                    self._redirect(worker)
                self._emit(self._sessions.discard_all())
            case _:
                self._emit(outputs_of(action, self.state, self._sessions, timeout_s=self.liveness.timeout_s))

    # ------------------------------------------------------------ time

    def _sweep(self) -> None:
        """Suspend silent workers, and drop strangers that do not introduce themselves."""
        now = self._now
        self.liveness.sweep(now)  # first: no fault below may end the watch
        silent, longest_s = self.liveness.silent(self.workers.values(), now)
        if silent:
            self._suspend(silent, f"silent for {longest_s:.1f} s")
        for peer in self._sessions.deaf(now):
            self._depart(peer, "its downlink ended", silent=True, resets=True)
        self._look_for_hung(now)
        self._look_for_stragglers(now)
        for peer in self._sessions.overdue(now, self.liveness.timeout_s):
            # Without a word, or a worker that stood still meanwhile would take it for a refusal, and not come again.
            self._journal.notice("no introduction", "dropped the connection of %s: it said nothing", peer.address)
            self._depart(peer, "it said nothing")
        if not isinstance(self.state, Gathering):
            self._returns.forget_views(self.state)
        self._admission.forget(self._admission.known - self.workers.keys(), self.state)

    def _look_for_hung(self, now: float) -> None:
        """Evict workers that keep the others waiting."""
        view = self.state.view
        if view is None or not membership.is_at_work(self.state):
            return
        verdict = self.liveness.hung([worker for worker in view.ids if worker in self.workers], now)
        if verdict.why:
            logger.warning("view %d: %s", view.generation, verdict.why)
        for worker in verdict.hung:
            if worker in self.workers:
                self._evict(self.workers[worker], verdict.why, hung=True)
                self._submit(membership.Gone(worker, verdict.why, silent=True), None)
        if verdict.stuck:
            for worker in view.ids:
                self._submit(membership.Suspected(worker, view.generation), None)

    def _look_for_stragglers(self, now: float) -> None:
        """Tell members that they are slower than the others; replace one if that is wanted, and note all of them."""
        state = self.state
        if not isinstance(state, Serving) or (reports := self.liveness.stragglers(state.view, now)) is None:
            return
        self._tell(reports)
        view = state.view
        slow = self.liveness.slow(view.ids)
        if slow != state.slow:
            self._submit(membership.Slow(slow), None)
        slowest = slow[0] if slow else ""
        if slowest != state.replacement.straggler and self.liveness.evicts_stragglers(view.ids):
            self._submit(membership.Straggler(slowest), None)


def _heard_of(state: Membership, event: membership.Event) -> Iterator[Member]:
    """The members of another coordinator, as workers tell that have come to this one, which has no view of its own."""
    chains = [chain for _, chain in state.known.values()] if isinstance(state, Gathering) else []
    if isinstance(event, membership.Returned):
        chains.append(event.received)
    # The first ranks come last, and are told first: workers look for a coordinator at their standbys first.
    return (member for chain in chains for link in chain for member in reversed(link.view.members))


def _by_downlink(output: Write | WriteOrReset | Close, downlink: Peer | None) -> Iterator[Output]:
    """What is to be done if the worker is spoken to on its downlink; once that is gone, it is told only last words."""
    if downlink is None or (downlink.dropped and not isinstance(output, Write)):
        yield output
    elif not downlink.dropped:
        downlink.dropped = isinstance(output, Close)
        yield replace(output, peer=downlink)
        if isinstance(output, Close):
            yield Close(output.peer, resets=output.resets)
