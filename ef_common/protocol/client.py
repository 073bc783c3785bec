"""A worker's end of the control plane as a state machine.

It does no I/O and has no clock: whoever runs it (:class:`~ef_common.control.client.CoordinatorClient` with sockets and
threads, the simulator over a simulated network) reports what has happened, with the time, and carries out its `outputs`
in order. The worker's own thread waits until one of :meth:`~Client.started`, :meth:`~Client.newer_view` and
:meth:`~Client.value` has an answer.

If nodes keep standbys, a link that ends is no loss: the client looks for a coordinator (:mod:`coordinator_search`), and
tells it where the worker stands (:mod:`ef_common.core.resume_state`)::

    OUTSIDE → SEARCHING     `start`
    SEARCHING → SERVED      a coordinator has proved itself, and takes this worker
    SERVED → RETURNING      the link ends, or the coordinator is silent for too long
    SERVED → SEARCHING      likewise, and the coordinator has sent this worker away, or it breaks before any view
    RETURNING → SERVED      the same coordinator takes this worker back
    RETURNING → SEARCHING   it does not, so this worker leaves it
    SERVED → DISMISSED      nothing more will come: this worker is out, or the job has ended or failed
    SERVED → ENDING         `stop`: nothing more is said
    DISMISSED → ENDING      likewise
    ENDING → OVER           the link ends; `break_off`
    DISMISSED → OVER        likewise
    SERVED → OVER           the link ends, and no other coordinator could take this worker; `break_off`
    SEARCHING → OVER        for too long; the job has ended or failed; `stop`, `break_off`
    RETURNING → OVER        the job has failed; `stop`, `break_off`
    OUTSIDE → OVER          `stop`

Half a second after a coordinator has taken it up, the client connects to it once more, for the *downlink*
(:mod:`~ef_common.protocol.wire`). From then on, what comes there counts, and the link ends when that one does.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum, auto
from math import inf

from ef_common.core import membership
from ef_common.core.doubling import doubled_s
from ef_common.core.membership import Phase
from ef_common.core.progress import Progress
from ef_common.core.quorum import Bid
from ef_common.core.resume_state import ResumeState
from ef_common.core.room import Room
from ef_common.core.stragglers import StragglerReport
from ef_common.core.view import Member, View
from ef_common.core.watermark import Watermark
from ef_common.errors import (
    AuthenticationError,
    CoordinatorLost,
    Evicted,
    GroupBroken,
    JobFailed,
    JobFinished,
    Left,
    ProtocolError,
    TrainingOver,
)
from ef_common.protocol import fields, wire
from ef_common.protocol.addresses import Address, format_address
from ef_common.protocol.auth import Token, new_nonce
from ef_common.protocol.claim_requests import ClaimRequests
from ef_common.protocol.client_outputs import (
    AskForClaim,
    ClientOutput,
    Connect,
    CoordinatorLink,
    Disconnect,
    EndSending,
    Hung,
    Leave,
    Replaced,
    Send,
    TrustLeader,
)
from ef_common.protocol.coordinator_search import PAUSE_S, Attempt, CoordinatorSearch, SearchState
from ef_common.protocol.heartbeats import Heartbeats
from ef_common.protocol.introduction import HELP, Answer, Introduction
from ef_common.protocol.newest_view import NewestView
from ef_common.protocol.view_patch import ViewName

logger = logging.getLogger(__name__)

_ABOVE_ALL = 1 << 60  # a generation that is newer than any view
_IN_FLIGHT_S = 0.5
"""After a failure of the job, collectives that one worker has completed come to their end in the others, too."""

_DOWNLINK_S, _MAX_DOWNLINK_S = 1.0, 60.0
"""How long it may take to connect once more, and what may lie between the ends of both connections."""
_ASK_S = 0.5
"""The second connection is asked for so long after the first one has come about, or with the first heartbeat."""
_MAX_PAUSE_S = 5.0

_MESSAGES: Mapping[str, Callable[[str, int], membership.Event | wire.Bye]] = {
    "ready": lambda worker, training: membership.Ready(worker, max(1, training)),
    "begin": membership.Begun,
    "at_boundary": membership.AtBoundary,
    "suspect": membership.Suspected,
    "settled": membership.Settled,
    "leave": lambda worker, generation: membership.Leaving(worker),
    "close": lambda worker, generation: membership.Closed(worker),
    "bye": lambda worker, generation: wire.Bye(),
}


class ClientState(Enum):
    """Where a worker's end of the control plane stands."""

    OUTSIDE = auto()  # has not looked for a coordinator yet
    SEARCHING = auto()  # looks for a coordinator that takes it
    SERVED = auto()  # has one
    RETURNING = auto()  # the link has ended, and the same coordinator is tried once more
    DISMISSED = auto()  # has one, which has said that nothing more will come: it is out, or the job is over
    ENDING = auto()  # says nothing more, and hears until the link ends
    OVER = auto()  # neither says nor hears anything more


class Client:
    """The worker's end.

    Times are those of a monotonic clock, in seconds.

    Args:
        address: Where to look for the coordinator first.
        member: This worker. With an empty address the coordinator fills in the one that it sees.
        token: The job token, or None.
        connect_timeout_s: How long to look for a coordinator.
        progress: How this worker moves on, to be told in its heartbeats; None if that is not known.
        chance: Source of random pauses.

    Attributes:
        outputs: What is to be done, the oldest first; whoever does it removes it.
        member: This worker.
        state: Where it stands.
        resume_state: What it has heard and told.
        change_pending: A change of the members is planned, or this worker is out: it must ask at its next boundary.
        watermark: The watermark of the members, as far as it is known.
        training: The training that the members are in, as far as it is known.
        room: What the coordinator knows of the number of nodes, as far as it has told.
        end: Why nothing more will come, once that is so.
    """

    def __init__(
        self,
        address: Address,
        member: Member,
        token: Token | None,
        *,
        connect_timeout_s: float = 60.0,
        progress: Callable[[], Progress | None] = lambda: None,
        chance: random.Random | None = None,
    ) -> None:
        self.outputs: deque[ClientOutput] = deque()
        self.member = member
        self.state = ClientState.OUTSIDE
        self.resume_state = ResumeState()
        self.change_pending = False
        self.watermark: Watermark | None = None
        self.training = 1
        self.room: Room | None = None
        self.end: Exception | None = None
        self._token = token
        self._key = new_nonce()
        self._connect_timeout_s = connect_timeout_s
        self._now = 0.0
        self._newest = NewestView()
        self._heartbeats = Heartbeats(progress)
        self._warm_up = False
        self._named: dict[str, View] = {}  # views that it has named to the coordinator that it has
        self._link: CoordinatorLink | None = None  # to the coordinator that has taken it
        self._old: CoordinatorLink | None = None  # the one before, until the first attempt to come back has ended
        self._trying: CoordinatorLink | None = None
        self._downlink: CoordinatorLink | None = None  # a second connection to the coordinator that it has
        self._hears_downlink = False  # the coordinator speaks there alone
        self._downlink_s, self._downlink_at = _DOWNLINK_S, -inf  # how long to try that, and not before when
        self._ask_at: float | None = None  # when to ask for it, if no heartbeat is due before
        self._give_up_at: float | None = None  # as the first connection has ended, and the second one has not
        self._chance = chance or random.Random()
        self._search = CoordinatorSearch(address, member.standby, timeout_s=connect_timeout_s, chance=self._chance)
        self._num_breaks = 0  # of links before the first view
        self._again_until: float | None = None  # until when others may follow them
        self._claims = ClaimRequests()
        self._replace_at: float | None = None  # when to end the group of a job that has failed
        self._wants_to_leave = False  # itself; it may also be asked to

    @property
    def generation(self) -> int:
        """Generation of the newest view, 0 before the first."""
        return self._newest.generation

    @property
    def deadline(self) -> float | None:
        """When :meth:`tick` is to be called, or None; it may be called earlier, too."""
        times = (
            self._heartbeats.due,
            self._ask_at,
            self._search.due,
            self._replace_at,
            self._claims.due,
            self._give_up_at,
        )
        return None if self.stopped else min((time for time in times if time is not None), default=None)

    @property
    def stopped(self) -> bool:
        """Whether nothing more will be said."""
        return self.state in (ClientState.ENDING, ClientState.OVER)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be said or heard: there will be no connection any more."""
        return self.state is ClientState.OVER

    @property
    def candidates(self) -> list[Address]:
        """Where it would look for a coordinator now."""
        return self._search.candidates(self.resume_state)

    # ------------------------------------------------------------ what the worker waits for

    def started(self) -> bool | None:
        """How the worker starts: True to warm up, False if the first view is there; None if that is not clear.

        Raises:
            AuthenticationError, CoordinatorLost, JobFailed, JobFinished, ProtocolError: There is no start.
        """
        if self._warm_up or self.generation:
            return self._warm_up
        self._raise_end()
        return None

    def newer_view(self, after: int) -> View | None:
        """The newest view, if its generation is above `after`.

        Raises:
            TrainingOver: In a newcomer: the members are in a later training than the one that it is ready for.
            MembershipError: Nothing more will come, see :attr:`end`.
        """
        # A lost link harms nobody who has a view; every other end concerns this worker itself.
        if not isinstance(self.end, CoordinatorLost):
            self._raise_end()
        if self.generation > after:
            return self._newest.view
        if not self.resume_state.links and self.training > self.resume_state.training:
            raise TrainingOver(f"the others are in training {self.training}")
        self._raise_end()
        return None

    def value(self, generation: int, key: str) -> bytes | None:
        """A value that a member of the view of `generation` has published.

        Raises:
            GroupBroken: The view has been replaced, or nothing more will come.
        """
        value = self._newest.value(generation, key)
        if value is None and self.end is not None:
            raise GroupBroken(f"no more values of view {generation} can come: {self.end}")
        return value

    def _raise_end(self) -> None:
        if self.end is not None:
            raise self.end

    # ------------------------------------------------------------ what the worker says

    def start(self, now: float) -> None:
        """Look for the coordinator, and introduce this worker."""
        self._now = now
        self._heartbeats.look(now)
        self.state = ClientState.SEARCHING
        self._try(self._search.begin(self.resume_state, now))

    def send(self, kind: str, generation: int = 0) -> None:
        """Tell the coordinator something; see :class:`~ef_common.session.ports.ControlChannel`."""
        if kind not in _MESSAGES:
            raise ProtocolError(f"a worker sends one of {', '.join(_MESSAGES)}. Received: kind={kind!r}")
        self._wants_to_leave = self._wants_to_leave or kind == "leave"
        self._tell(_MESSAGES[kind](self.member.id, generation))

    def _leave(self) -> None:
        """Say that this worker leaves, because the coordinator has asked it to, or because it wants to itself."""
        self._tell(membership.Leaving(self.member.id))

    def _tell(self, message: membership.Event | wire.Bye) -> None:
        if not isinstance(message, wire.Bye):
            self.resume_state = self.resume_state.told(message)
        self._say(message)

    def fail(self, why: str) -> None:
        """Report an exception of the user's code, which ends the job."""
        self._tell(membership.Failed(self.member.id, why))

    def publish(self, generation: int, key: str, value: bytes) -> None:
        """Publish a value to the members of a view."""
        message = wire.Relay(generation, key, value)
        self._newest.publish(message)
        self._say(message)

    def tell_watermark(self, watermark: Watermark) -> None:
        """Report this member's watermark in the next heartbeats. A watermark that names too much is left out."""
        if len(watermark.returned) <= fields.MAX_RETURNED:
            self._heartbeats.watermark = watermark

    def tell_store(self, store: str) -> None:
        """Report the store that this worker has; only the first counts."""
        if self.resume_state.store is None:
            self._tell(membership.Stored(self.member.id, store))

    def want(self, num_nodes: int) -> None:
        """Tell how many nodes the members want, even if they want as many as before. Only rank 0 is heard."""
        demand = self.resume_state.demand.next(self.generation, num_nodes)
        self._tell(membership.Wanted(self.member.id, demand))

    def stop(self) -> None:
        """Nothing more will be said. May be repeated."""
        if not self.stopped:
            self._finish(CoordinatorLost("this worker has closed its control connection"))
            if self._link is not None:
                self.outputs.append(EndSending(self._link))

    def break_off(self, error: Exception) -> None:
        """Whoever runs this can hear nothing more, or say nothing more: the worker must end.

        The end of the link tells the coordinator. It may count as the end of this process, because this worker goes to
        no other coordinator any more.
        """
        link, self._link = self._link, None
        self._drop_downlink()
        self._finish(error)
        if link is not None:
            self.outputs.append(Disconnect(link))
        self._put_out(error)

    def _finish(self, end: Exception) -> None:
        """Nothing more will be said, and no coordinator is sought."""
        self.state = ClientState.OVER if self._link is None else ClientState.ENDING
        self.end = self.end or end
        self._search.rest()
        self._replace()
        if self._trying is not None:
            self.outputs.append(Disconnect(self._trying))
            self._trying = None
        if not self._hears_downlink:
            self._drop_downlink()
        self._leave_old()

    # ------------------------------------------------------------ what happens

    def wants(self, link: CoordinatorLink) -> bool:
        """Whether a connection that it has asked for is still of use; if not, it has been given up."""
        return link in (self._trying, self._downlink)

    def accepted(self, link: CoordinatorLink) -> None:
        """The system of a coordinator has accepted a connection; it may still have to prove who it is (with TLS)."""
        if link is self._trying and not link.reached:
            self._search.accepted()
        link.reached = True

    def connected(self, link: CoordinatorLink, now: float) -> None:
        """A connection is there; the coordinator speaks first."""
        self._now = link.heard = now
        self.accepted(link)
        if not self.wants(link):  # that took too long
            self.outputs.append(Disconnect(link))

    def unreached(self, link: CoordinatorLink, problem: str | AuthenticationError, now: float) -> None:
        """A connection could not be made, maybe because one side does not prove who it is."""
        self._now = now
        if link is self._trying:
            if isinstance(problem, AuthenticationError):
                self._refuse(link, problem)
            else:
                self._fail_attempt(link, problem)
        elif link is self._downlink:
            self._fail_downlink()

    def receive(self, link: CoordinatorLink, data: bytes, now: float) -> None:
        """Bytes have come."""
        self._now = link.heard = now
        if link is self._downlink and self._hears_downlink and self._link is not None:
            self._link.heard = now
        link.introduction.lines.feed(data)
        self._take_all(link)

    def _take_all(self, link: CoordinatorLink) -> None:
        while link in (self._link, self._trying, self._downlink) and self._take(link):
            pass

    def _take(self, link: CoordinatorLink) -> bool:
        """Take the next line; returns whether there was one."""
        introduced = link.introduction.answer is not None
        if link is self._downlink and introduced and not self._hears_downlink:
            return False  # what the coordinator has said on the first connection comes before that
        try:
            if introduced:
                line = link.introduction.lines.next()
                message = None if line is None else wire.decode_from_coordinator(line)
            else:
                reply = link.introduction.take()
        except (ProtocolError, AuthenticationError) as error:
            self._refuse(link, error)
            return False
        if introduced:
            if message is not None:
                self._hear(message)
            return message is not None
        if link.introduction.answer is not None:
            self._heed(link, link.introduction.answer)
        elif reply is not None:
            self.outputs.append(Send(link, reply))
        return reply is not None

    def ended(self, link: CoordinatorLink, *, in_order: bool, now: float) -> None:
        """A connection has ended; `in_order`: by the coordinator, after all that it had to say."""
        self._now, link.ended = now, in_order
        if link is self._trying:
            self._fail_attempt(link, "it closed the connection")
        elif link is self._downlink and link.introduction.answer is None:
            self._fail_downlink()
        elif link is self._link and self._hears_downlink and not self.stopped:
            self._give_up_at = now + _DOWNLINK_S
        elif link is self._link or (link is self._downlink and self._hears_downlink):
            self._lose_ended(over=in_order)

    def _lose_ended(self, *, over: bool) -> None:
        link = self._link
        if link is None:
            return
        why = f"the connection to the coordinator at {format_address(link.address)} has ended"
        if over or not self._begin_anew(link, why):
            self._lose(link, why, over=over)

    def claimed(self, bid: Bid, named: tuple[str, ...] | None, now: float) -> None:
        """The store has said who has a claim; None: it has not said, and is asked again."""
        self._now = now
        if named is None:
            self._claims.put_off(bid, now)
        elif self._claims.settle(bid):
            logger.warning("the claim %s is of %s", bid.claim, ", ".join(named))
            self._say(membership.Claimed(self.member.id, bid.claim, named))

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._now = now
        has_listened = self._heartbeats.look(now)
        if self._replace_at is not None and now >= self._replace_at:
            self._replace()
        if self.stopped:
            return
        if self._search.due is not None and now >= self._search.due:
            self._search_on()
        if self._give_up_at is not None and now >= self._give_up_at:
            self._lose_ended(over=False)
        if (heartbeat := self._heartbeats.beat(now)) is not None:
            self._say(heartbeat)
        if heartbeat is not None or (self._ask_at is not None and now >= self._ask_at):
            self._ask_at = None
            self._ask_for_downlink()
        self.outputs.extend(map(AskForClaim, self._claims.again(now)))
        link = self._link
        if link is None:
            return
        if not has_listened:
            link.heard = now
        elif self._search.can_return(self.resume_state) and self._heartbeats.is_silent(link.heard, now):
            self._lose(link, "the coordinator is silent", over=False)

    def _say(self, message: wire.FromWorker) -> None:
        if self._link is not None and self.state in (ClientState.SERVED, ClientState.DISMISSED):
            self.outputs.append(Send(self._link, wire.encode(message)))

    # ------------------------------------------------------------ from one coordinator to another

    def _lose(self, link: CoordinatorLink, why: str, *, over: bool) -> None:
        """The link has ended, or is given up; `over`: the coordinator has ended it."""
        self._link = None
        self._drop_downlink()
        if self.state is not ClientState.SERVED or not self._search.can_return(self.resume_state):
            self.outputs.append(Disconnect(link))
            self._finish(CoordinatorLost(why))
            return
        logger.info("%s has lost its coordinator, and looks for another one", self.member.id)
        self.resume_state = self.resume_state.parted(over=over)
        self._old = link
        self.state = ClientState.SEARCHING if self._search.sent_away else ClientState.RETURNING
        if self._search.sent_away:
            self._leave_old()
        self._try(self._search.lose(self.resume_state, since=link.since, now=self._now))
        if self._search.state is SearchState.RESTING:
            within = f"within {self._connect_timeout_s:g} s"
            self._finish(
                CoordinatorLost(f"no coordinator that has members was found {within}: the members seem to have ended")
            )

    def _begin_anew(self, link: CoordinatorLink, why: str) -> bool:
        """Introduce this worker as a new one, after a pause that doubles; returns whether it may still do that.

        The link has broken before there was a view, so this worker holds nothing yet, and the coordinator may live.
        """
        is_early = self.state is ClientState.SERVED and self.resume_state.phase is Phase.EARLY
        if not is_early or self._search.can_return(self.resume_state):
            return False
        if self._again_until is None or self._now > link.since + self._connect_timeout_s:
            self._num_breaks, self._again_until = 0, self._now + self._connect_timeout_s
        if self._now >= self._again_until:
            return False
        logger.warning("%s before there was a view; connecting again", why)
        self._link = None
        self._drop_downlink()
        self._move(link)
        self.state = ClientState.SEARCHING
        self._heartbeats.rest()
        self._ask_at = None
        pause_s = doubled_s(PAUSE_S, self._num_breaks, most_s=_MAX_PAUSE_S)
        self._num_breaks += 1
        self._search.begin_later(self.resume_state, pause_s, self._now)
        return True

    def _ask_for_downlink(self) -> None:
        """Connect to the coordinator once more, to hear it there; this can wait until it has taken up all workers."""
        link = self._link
        if link is None or self._downlink is not None or self.state is not ClientState.SERVED:
            return
        if self._now < self._downlink_at:
            return
        if self.member.standby or self.resume_state.successors:  # else no other coordinator takes this worker anyway
            introduction = Introduction(self.member, self._token, key=self._key, address=link.address, downlink=True)
            self._downlink = CoordinatorLink(link.address, introduction, self._now)
            self.outputs.append(Connect(self._downlink, self._downlink_s, self._downlink_s, beside=True))

    def _hear_downlink(self) -> None:
        """All that the coordinator has said on the first connection has been heard."""
        downlink, self._hears_downlink = self._downlink, True
        if downlink is not None:
            self._take_all(downlink)
        if downlink is None or downlink.ended is not None:  # given up too early, or the coordinator has ended since
            self._lose_ended(over=downlink is not None and bool(downlink.ended))

    def _fail_downlink(self) -> None:
        """The second connection does not come about; if the coordinator speaks there all the same, this is the end."""
        if self._hears_downlink:
            self._lose_ended(over=False)
        self._drop_downlink()
        self._downlink_s = min(2 * self._downlink_s, _MAX_DOWNLINK_S)  # it may be busy, as many have come at once
        self._downlink_at = self._now + self._downlink_s * self._chance.uniform(1.0, 2.0)

    def _drop_downlink(self) -> None:
        """There is no second connection any more."""
        downlink, self._downlink = self._downlink, None
        self._hears_downlink, self._give_up_at = False, None
        if downlink is not None:
            self.outputs.append(Disconnect(downlink))

    def _leave_old(self) -> None:
        """The coordinator that this worker had does not take it back."""
        link, self._old = self._old, None
        if link is not None:
            self._move(link)

    def _move(self, link: CoordinatorLink) -> None:
        """End a connection so that this is not taken for the end of the process."""
        self.outputs.append(Leave(link, wire.encode(wire.Moved())))

    def _search_on(self) -> None:
        """An attempt has taken too long, or a pause is over."""
        link = self._trying
        if link is None:
            self._try(self._search.go_on(self.resume_state, self._now))
            return
        self._fail_attempt(link, "timed out")

    def _try(self, attempt: Attempt | None) -> None:
        """Connect to a coordinator, if that is to be tried now."""
        if attempt is None:
            return
        begun = self.resume_state.phase is not Phase.EARLY
        introduction = Introduction(self.member, self._token, key=self._key, address=attempt.address, returning=begun)
        self._trying = CoordinatorLink(attempt.address, introduction, self._now)
        self.outputs.append(Connect(self._trying, attempt.timeout_s, attempt.accept_s))

    def _fail_attempt(self, link: CoordinatorLink, problem: str) -> None:
        """An attempt has come to nothing."""
        if link.reached and self._search.due is not None and self._now >= self._search.due:
            self._search.be_patient()
        self._trying = None
        # It may have heard who this is, and would take an end in order for that of this process.
        self.outputs.append(Leave(link, None) if link.reached else Disconnect(link))
        where = format_address(link.address)
        logger.debug("%s does not take us: %s", where, problem)
        self._leave_old()
        self.state = ClientState.SEARCHING
        self._try(self._search.fail(self.resume_state, self._now))
        if self._search.state is SearchState.RESTING:
            within = f"within {self._connect_timeout_s:g} s"
            self._finish(CoordinatorLost(f"no coordinator at {where} {within} ({problem}). {HELP}"))

    def _replace(self) -> None:
        """Let the group of a job that has failed end."""
        if self._replace_at is not None:
            self._replace_at = None
            self.outputs.append(Replaced(_ABOVE_ALL))

    def _refuse(self, link: CoordinatorLink | None, error: ProtocolError | AuthenticationError) -> None:
        """A peer says what no coordinator says."""
        if link is None:
            return
        if link is self._downlink and not self._hears_downlink:
            self._fail_downlink()
        elif link in (self._link, self._downlink) and self._link is not None:
            where = format_address(link.address)
            why = f"the coordinator at {where} sent what the protocol does not allow: {error}"
            self._lose(self._link, why, over=False)
        elif self._begins:  # the user's settings must be wrong
            self._finish(error)
        else:
            self._fail_attempt(link, str(error))

    @property
    def _begins(self) -> bool:
        """Whether no coordinator has taken this worker yet."""
        return self._heartbeats.due is None

    def _heed(self, link: CoordinatorLink, answer: Answer) -> None:
        """A coordinator has answered to the introduction."""
        if link is self._downlink:
            if isinstance(answer, wire.Welcome):
                self.outputs.append(TrustLeader(link, answer.heartbeat_timeout_s))
            else:
                self._fail_downlink()
        elif isinstance(answer, wire.Welcome):
            self._take_up(link, answer)
        elif isinstance(answer, wire.Redirect):
            if self._begins and not self.member.standby:
                where = format_address(link.address)
                self._finish(CoordinatorLost(f"a standby listens at {where}, and this node has none"))
                return
            self._search.redirect(link.address, answer.address)
            self._fail_attempt(link, "it is a standby")
        elif isinstance(answer, wire.Aborted):
            self._finish(JobFailed(answer.abort.why))
            if not self._begins:
                self._put_out(JobFailed(answer.abort.why))
        elif self._begins:
            self._finish(JobFinished("the job has ended"))
        else:
            self._fail_attempt(link, "the job has ended there")

    def _take_up(self, link: CoordinatorLink, welcome: wire.Welcome) -> None:
        """Use a new link: tell where this worker stands before anything else."""
        self._search.find(link.address)
        self._heartbeats.begin(welcome.heartbeat_timeout_s, self._now)
        self.state, self._trying, self._link = ClientState.SERVED, None, link
        link.since = self._now
        self._downlink_s, self._downlink_at, self._ask_at = _DOWNLINK_S, -inf, self._now + _ASK_S
        self.outputs.append(TrustLeader(link, welcome.heartbeat_timeout_s))
        if not link.introduction.returning:
            self._hear(welcome)
            if self.resume_state.failed:  # while the coordinator was sought
                self._say(membership.Failed(self.member.id, self.resume_state.failed))
            if self.resume_state.leaving:
                self._say(membership.Leaving(self.member.id))
        else:
            self._report()
            self._publish_again()  # it may have been lost with the old link
        self._leave_old()  # if there is still one, the same coordinator has this worker again

    def _report(self) -> None:
        """Tell where this worker stands."""
        report = self.resume_state.report(self.member)
        self._named = {fields.digest_of_view(link.view): link.view for link in report.received}
        names = (
            ViewName(link.view.generation, digest, link.over, link.agreed)
            for digest, link in zip(self._named, report.received, strict=True)
        )
        self._say(wire.Return(report, tuple(names)))

    def _publish_again(self) -> None:
        for message in self._newest.published:
            self._say(message)

    # ------------------------------------------------------------ messages

    def _hear(self, message: wire.FromCoordinator) -> None:
        match message:
            case wire.NewView():
                self._hear_view(message)
            case wire.Downlink():
                self._hear_downlink()
            case wire.Recall(digests):
                self._say(wire.Told(tuple(self._named[digest] for digest in digests if digest in self._named)))
            case wire.Relayed():
                self._newest.hear(message)
            case membership.Announce(generation=generation):
                if generation == self.generation:
                    self.change_pending = True
            case wire.Welcome(accept, standbys=standbys):
                if accept.warm_up:
                    self.training = accept.training
                    self.resume_state = self.resume_state.warming(standbys)
                    self._warm_up = True
            case membership.Resume():
                self._search.led = True
            case membership.Republish(generation=generation):
                if generation == self.generation:
                    self._publish_again()
            case membership.Claim(bid=bid):
                self.resume_state = self.resume_state.claiming()
                self.outputs.extend(map(AskForClaim, self._claims.want(bid)))
            case membership.Agree(generation=generation, members=members):
                self.resume_state = self.resume_state.agreed(generation, members)
            case membership.Resign():
                self._leave()
            case membership.Stay() if self._wants_to_leave:
                self._leave()
            case membership.Stay():
                self.resume_state = self.resume_state.staying()
            case wire.Redirect():
                self._search.sent_away = True
                self._search.redirect(self._search.address, message.address)
            case wire.Alive():
                pass
            case wire.JobWatermark(watermark):
                self.watermark = watermark
            case membership.Skip(training=training):
                if training > self.resume_state.training:  # else it has said meanwhile that it is ready for it
                    self.resume_state = self.resume_state.behind()
                self.training = training
            case wire.Finished():
                self._dismiss(JobFinished("the job has ended"))
            case wire.Eviction(reason, hung):
                self._put_out(Evicted(f"the others went on without worker {self.member.id}: {reason}"))
                if hung:
                    self.outputs.append(Hung(reason))
            case wire.Aborted(abort):
                self._dismiss(JobFailed(abort.why))
                self.change_pending = True
                self._replace_at = self._now + _IN_FLIGHT_S
            case StragglerReport():
                self.outputs.append(message)
            case Room():
                self.resume_state = self.resume_state.wanting(message.demand)
                self.room = message
            case wire.Error(reason=reason):
                self._dismiss(CoordinatorLost(f"the coordinator closed the connection: {reason}"))
            case wire.Challenge():
                self._refuse(self._link, ProtocolError("a second challenge"))

    def _dismiss(self, end: Exception) -> None:
        """Nothing more will come; the first reason counts."""
        self.end = self.end or end
        if self.state is ClientState.SERVED:
            self.state = ClientState.DISMISSED

    def _put_out(self, end: Exception) -> None:
        self._dismiss(end)
        # A world of one has no peers whose loss would tell it: it must ask at its next boundary.
        self.change_pending = True
        self.outputs.append(Replaced(_ABOVE_ALL))

    def _hear_view(self, message: wire.NewView) -> None:
        try:
            view = self._newest.patched(message)
            if view.rank_of(self.member.id) is not None:
                self._newest.replace(view)
        except ProtocolError as error:
            self._refuse(self._link, error)
            return
        if view is self._newest.view:
            self.change_pending = False
            self.resume_state = self.resume_state.received(view)
            self._search.led = True
        else:
            self._dismiss(Left(view.reason, last=not view.members))
        self.outputs.append(Replaced(view.generation))
