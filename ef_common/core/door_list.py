"""Doors that a controller tells agents which find no name server: which of them may found the job, a pure rule.

The controller knows the addresses of its pods, and no agent can ask anybody for them, as pods have no account. An agent
that has looked for its job in vain shows a *nonce* to whoever asks, a number that it has just drawn. The controller
reads it, then reads the addresses of all pods of the job from the API server, and has them written into a
file of that agent's pod, with the nonce.

Such a list is one more source of the doors of :mod:`ef_common.core.doors`, with the same rule. A name server may be
trusted to know the agent itself and whoever was there before it. A list in a file may be of any age: it may have been
written for an agent that was here before, or wait there while the agent stands still. So it counts for founding only

1. if it answers a nonce that this agent has drawn in the last `VALID_S`, so it was read from the API server since;
2. and if it has the agent itself. So it also has everybody who had an address before that. Of two agents that look at
   the same time, the list of one of them has the other one, who then hears of it by being asked.

Any other list, for example the one with which a pod is created, only says whom to ask. An address in it that is another
job's by now, or nobody's, does no harm: whoever does not know the secret of the job is not listened to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from math import inf

VALID_S = 150.0
"""How long after it has drawn a nonce an agent may found the job by a list with it. A kubelet writes the file at once
as a rule, and after one and a half minutes at most."""
RENEW_S = 60.0
"""How often an agent draws another nonce."""
ASK_S = 10.0
"""How long an agent looks for its job before it shows a nonce. Where names are known, it has mostly found it then."""
MAX_LISTED = 1024
"""How many addresses a list has at most."""
_MAX_NONCE_CHARS = _MAX_ADDRESS_CHARS = 64


@dataclass(frozen=True, slots=True)
class DoorList:
    """What an agent is told.

    Args:
        doors: Addresses of the pods of the job that run.
        others: Addresses of its other pods, which are asked, too: they are about to start, or to go.
        nonce: Whose question it answers; "" for nobody's.
    """

    doors: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    nonce: str = ""

    def text(self) -> str:
        """As it is written into the file; "" for an empty one.

        Example:
            >>> DoorList(("10.0.0.1",)).text()
            '{"doors": ["10.0.0.1"]}'
        """
        parts = {"doors": [*self.doors], "others": [*self.others], "nonce": self.nonce}
        return json.dumps({name: part for name, part in parts.items() if part}) if self.doors or self.others else ""

    @classmethod
    def of(cls, text: str) -> DoorList:
        """Read it; an empty one if the text is no list.

        Example:
            >>> DoorList.of('{"doors": ["10.0.0.1", "fd00::1"], "nonce": "4f"}').doors
            ('10.0.0.1', 'fd00::1')
            >>> DoorList.of('{"doors": ["somewhere"]}') == DoorList.of("") == DoorList()
            True
        """
        try:
            found = json.loads(text)
            doors, others = (_addresses(found.get(name, [])) for name in ("doors", "others"))
            nonce = found.get("nonce", "")
        except (AttributeError, RecursionError, TypeError, ValueError):
            return cls()
        if not isinstance(nonce, str) or len(nonce) > _MAX_NONCE_CHARS:
            return cls()
        return cls(doors, others, nonce)


NO_DOORS = DoorList()
"""What a pod is told of which nobody knows anything."""


def _addresses(found: object) -> tuple[str, ...]:
    if not isinstance(found, list) or len(found) > MAX_LISTED:
        raise ValueError("expected a list of addresses")
    return tuple(dict.fromkeys(_address(one) for one in found))


def _address(found: object) -> str:
    if not isinstance(found, str) or len(found) > _MAX_ADDRESS_CHARS:
        raise ValueError("expected an address")
    return _in_one_form(found)


@lru_cache(4 * MAX_LISTED)  # the lists of all pods of a job have the same addresses
def _in_one_form(address: str) -> str:
    return str(ip_address(address))


@dataclass(frozen=True, slots=True)
class Bearings:
    """Where an agent looks.

    Args:
        ask: All addresses that are asked.
        doors: Those of which a majority has to support whoever founds the job.
        may_found: This agent may be the one.
    """

    ask: tuple[str, ...]
    doors: tuple[str, ...]
    may_found: bool


class ListReader:
    """The part of an agent that reads lists. One thread may ask it for the nonce while another one looks.

    Args:
        own: The address of this agent.
        draw: Draws a nonce, which nobody has drawn before.

    Example:
        >>> reader = ListReader("10.0.0.1", draw=lambda: "4f")
        >>> told = DoorList(("10.0.0.1", "10.0.0.2"))
        >>> reader.look(told, (), 0.0)
        Bearings(ask=('10.0.0.1', '10.0.0.2'), doors=(), may_found=False)
        >>> reader.look(DoorList(told.doors, nonce=reader.nonce(0.0)), (), 1.0).may_found
        True
    """

    def __init__(self, own: str, *, draw: Callable[[], str]) -> None:
        self._own, self._draw = own, draw
        self._drawn: dict[str, float] = {}

    def nonce(self, now: float) -> str:
        """The nonce that is shown now."""
        self._drawn = {nonce: when for nonce, when in self._drawn.items() if now - when < VALID_S}
        newest = max(self._drawn.items(), key=lambda one: one[1], default=("", now - RENEW_S))
        if now - newest[1] < RENEW_S:
            return newest[0]
        nonce = self._draw()
        self._drawn[nonce] = now
        return nonce

    def look(self, told: DoorList, named: Sequence[str], now: float) -> Bearings:
        """Where to look.

        Args:
            told: What the file says now.
            named: Addresses for which the name of the job stands, as far as is known; these count as they always do,
                unless there is a list that counts: a name server may know addresses of pods that have gone.
            now: Time of a monotonic clock, in seconds.
        """
        ask = _unique([self._own], told.doors, told.others, named)
        if self._own in told.doors and self._is_fresh(told.nonce, now):
            return Bearings(ask, told.doors, may_found=True)
        return Bearings(ask, tuple(named), may_found=self._own in named)

    def _is_fresh(self, nonce: str, now: float) -> bool:
        return now - self._drawn.get(nonce, -inf) < VALID_S


def _unique(*groups: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one for group in groups for one in group))
