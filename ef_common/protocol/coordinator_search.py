"""Where a worker looks for a coordinator that takes it, when, and for how long."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from ef_common.core.membership import Phase
from ef_common.core.resume_state import ResumeState
from ef_common.protocol.addresses import LOOPBACK, Address, named_by

PAUSE_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_FIRST_ATTEMPT_S, _ATTEMPT_S = 10.0, 1.0
_TURN_S = 0.002
"""As many workers as there are standbys may come to the first of them at once, and each waits for its turn."""
_ACCEPT_S = 0.2  # a host that accepts no connection by then is likely to be gone, and many of them may come first
_ROUNDS = 2
_IN_VAIN_S = 1.0
"""A coordinator that sends a newcomer away within this time has nobody who might lead it."""
_SOME = 8  # more than most lists of addresses are long


class SearchState(Enum):
    """What a search does."""

    RESTING = auto()  # a coordinator has this worker, or none is sought any more
    RETURNING = auto()  # tries the coordinator that it had, once more
    TRYING = auto()  # tries one address after the other
    PAUSING = auto()  # waits until it tries the next one


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to reach a coordinator.

    Args:
        address: Where.
        timeout_s: How long it may take.
        accept_s: How long it may take until the connection is accepted, see :meth:`CoordinatorSearch.accepted`.
    """

    address: Address
    timeout_s: float
    accept_s: float


@dataclass(slots=True)
class _Tour:
    """One search over all addresses: round after round, with a pause after each.

    It ends when a time has come and this number of rounds is over. In the first of them, a host has `accept_s` to
    accept a connection, and in each later one twice as long, up to `attempt_s`, in which it must have answered.
    """

    addresses: list[Address]  # listed once: with thousands of them, a list for each attempt takes longer than all tries
    until: float
    pause_s: float
    longest_pause_s: float
    attempt: int = 0  # number of the next one
    round_began: int = 0  # number of the first attempt since the last pause
    attempt_s: float = _ATTEMPT_S
    accept_s: float = inf
    rounds: int = 0


class CoordinatorSearch:
    """Chooses among the address where the coordinator was last, the standbys of the newest view, and that of the node.

    ::

        RESTING → TRYING        `begin`; `lose`, if the coordinator has sent this worker away
        RESTING → RETURNING     `lose`: it may be the connection alone that broke
        RESTING → PAUSING       `lose`, soon after that coordinator has taken this worker; `begin_later`
        RETURNING → TRYING      `fail`: it does not take this worker back, so others are tried
        TRYING → PAUSING        `fail`, and all addresses have been tried in this round
        PAUSING → TRYING        `go_on`: the pause is over
        PAUSING → RETURNING     likewise, if the coordinator that it had is to be tried first
        TRYING → RESTING        `find`: a coordinator has taken this worker; `fail`, after too long; `rest`
        RETURNING → RESTING     `find`, `rest`
        PAUSING → RESTING       `rest`: nothing more is said

    A search for another coordinator goes through all addresses at least twice. With N of them, of hosts that are gone
    without a word, the last one is tried after 0.2 N s.

    Those that send a newcomer away at once do not count as found: if nobody else is, its search ends as if nobody had
    answered.

    Args:
        address: Where to look first.
        standby: Port of the standby on this worker's node; 0 if there is none.
        timeout_s: How long to look.
        chance: Source of random pauses.

    Attributes:
        state: What it does.
        address: Where the coordinator is that this worker has, or had last.
        hint: Where the coordinator is, as a standby has said.
        due: When the attempt has taken too long, or the pause is over; None at rest.
        sent_away: The coordinator that this worker has no longer wants it.
        led: That coordinator leads, as far as is known: to go to it was not in vain.
    """

    def __init__(self, address: Address, standby: int, *, timeout_s: float, chance: random.Random) -> None:
        self.state = SearchState.RESTING
        self.address = address
        self.hint: Address | None = None
        self.due: float | None = None
        self.sent_away = False
        self.led = True
        self._standby = standby
        self._timeout_s = timeout_s
        self._chance = chance
        self._until = inf  # when to have found one that wants this worker
        self._answer_s = 0.0  # how much longer the attempt may take once it is accepted
        self._tour: _Tour | None = None  # None while the coordinator that it had is to be tried once more

    def candidates(self, resume: ResumeState) -> list[Address]:
        """Where a coordinator may be, the most likely place first."""
        hint = [] if self.hint is None else [self.hint]
        return list(dict.fromkeys([*hint, *self._known(resume)]))

    def can_return(self, resume: ResumeState) -> bool:
        """Whether another coordinator may accept this worker."""
        if resume.phase is Phase.EARLY:  # nothing has begun that it could go on with
            return self.hint is not None
        return bool(self._standby or resume.successors)

    def begin(self, resume: ResumeState, now: float) -> Attempt:
        """Look for the first coordinator."""
        self._tour = self._first_tour(resume, now)
        return self.go_on(resume, now)

    def begin_later(self, resume: ResumeState, pause_s: float, now: float) -> None:
        """Look for the first coordinator again, after a pause."""
        self._tour = self._first_tour(resume, now)
        self._pause(pause_s, now)

    def lose(self, resume: ResumeState, *, since: float, now: float) -> Attempt | None:
        """The link to the coordinator is lost, which there was since a time.

        Returns:
            What to try now; None for nothing, as there is a pause, or as this has been in vain for too long.
        """
        self._tour = None
        if self.sent_away:
            in_vain = resume.phase in (Phase.WARMING, Phase.READY) and not self.led and now < since + _IN_VAIN_S
            if in_vain and now > self._until:
                self.rest()
                return None
            self._look_everywhere(resume, now, until=self._until if in_vain else None)
        if now < since + PAUSE_S:  # whoever took this worker did not want it
            self._pause(PAUSE_S, now)
            return None
        return self.go_on(resume, now)

    def fail(self, resume: ResumeState, now: float) -> Attempt | None:
        """An attempt has come to nothing; returns what to try now, if there is no pause and the search goes on."""
        tour = self._tour
        if tour is None:
            self._look_everywhere(resume, now)
        elif now > tour.until and tour.rounds <= 0:
            self.rest()
            return None
        elif tour.attempt - tour.round_began >= len(tour.addresses) + (self.hint is not None):
            tour.round_began, tour.rounds, tour.accept_s = tour.attempt, tour.rounds - 1, 2 * tour.accept_s
            self._pause(tour.pause_s, now)
            tour.pause_s = min(2 * tour.pause_s, tour.longest_pause_s)
            return None
        return self.go_on(resume, now)

    def go_on(self, resume: ResumeState, now: float) -> Attempt:
        """Try the next address."""
        tour = self._tour
        if tour is None:
            self.state = SearchState.RETURNING
            return self._attempt(self.address, _ATTEMPT_S, inf, now)
        self.state = SearchState.TRYING
        address = tour.addresses[tour.attempt % len(tour.addresses)]
        tour.attempt += 1
        if self.hint is not None:
            address, self.hint = self.hint, None
        timeout_s = tour.attempt_s
        if resume.phase is Phase.EARLY and not self._standby:
            timeout_s = max(0.1, min(tour.until - now, _FIRST_ATTEMPT_S))
        return self._attempt(address, timeout_s, tour.accept_s, now)

    def accepted(self) -> None:
        """The host has accepted the connection, so its coordinator has the whole time to answer."""
        if self.due is not None:
            self.due += self._answer_s

    def be_patient(self) -> None:
        """A coordinator has accepted a connection, and was too busy to answer in time.

        It works off the connections in their order: if thousands come at once, and each is given up while it waits, all
        that it comes to are dead, for ever.
        """
        if self._tour is not None:
            self._tour.attempt_s = min(2 * self._tour.attempt_s, _FIRST_ATTEMPT_S)

    def find(self, address: Address) -> None:
        """The coordinator there has taken this worker."""
        self.rest()
        self.address, self.sent_away = address, False

    def rest(self) -> None:
        """Nothing is sought any more."""
        self.state, self._tour, self.due = SearchState.RESTING, None, None

    def redirect(self, by: Address, address: str) -> None:
        """A coordinator says where another one is, as far as it knows."""
        if address:
            self.hint = named_by(by, address)

    def _attempt(self, address: Address, timeout_s: float, accept_s: float, now: float) -> Attempt:
        attempt = Attempt(address, timeout_s, min(accept_s, timeout_s))
        self.due, self._answer_s = now + attempt.accept_s, attempt.timeout_s - attempt.accept_s
        return attempt

    def _pause(self, typical_s: float, now: float) -> None:
        self.state = SearchState.PAUSING
        self.due = now + typical_s * self._chance.uniform(0.5, 1.5)

    def _known(self, resume: ResumeState) -> list[Address]:
        """Where a coordinator may be, without what others have said."""
        own = [(LOOPBACK, self._standby)] if self._standby else []
        return list(dict.fromkeys([self.address, *resume.successors, *own]))

    def _first_tour(self, resume: ResumeState, now: float) -> _Tour:
        self._until = now + self._timeout_s
        return _Tour(self._known(resume), self._until, _FIRST_PAUSE_S, PAUSE_S if self._standby else _LONGEST_PAUSE_S)

    def _look_everywhere(self, resume: ResumeState, now: float, *, until: float | None = None) -> None:
        skip = 0 if self.led else self._chance.randrange(_SOME)  # who knows different standbys meets by chance
        addresses = self._known(resume)
        if self.sent_away and skip % len(addresses) == 0:
            skip += 1  # the first one is the one that has sent it away
        self.led = self.sent_away = False
        self._until = now + self._timeout_s if until is None else until
        attempt_s = min(_ATTEMPT_S + len(addresses) * _TURN_S, _FIRST_ATTEMPT_S)
        self._tour = _Tour(addresses, self._until, PAUSE_S, PAUSE_S, skip, skip, attempt_s, _ACCEPT_S, _ROUNDS)
