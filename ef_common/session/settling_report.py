"""What the members of a new view tell each other first: how far each has come, and with which software and clock."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ef_common.core.replay import FRESH

logger = logging.getLogger(__name__)

CLOCKS_APART_S = 60.0
"""Clocks that differ by more are told of: a run's events stand in the wrong order, and object stores refuse requests
whose time is off by some minutes."""


@dataclass(frozen=True, slots=True)
class SettlingReport:
    """What one member tells.

    Args:
        completed: Number of collectives that it has completed; `FRESH` for a newcomer.
        training: The training in which its program is.
        software: Digest of the versions of its software.
        time_s: Its clock, in seconds since 1970.
    """

    completed: int
    training: int
    software: str
    time_s: float

    def dump(self) -> bytes:
        """As bytes."""
        return b"%d %d %s %.1f" % (self.completed, self.training, self.software.encode(), self.time_s)

    @classmethod
    def load(cls, payload: bytes) -> SettlingReport:
        """Inverse of `dump`."""
        completed, training, software, time_s = payload.decode().split()
        return cls(int(completed), int(training), software, float(time_s))


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a worker brings along and others must have, too.

    Args:
        software: Versions by name.
        now: The clock, in seconds since 1970.
    """

    software: Mapping[str, str] = field(default_factory=dict)
    now: Callable[[], float] = lambda: 0.0

    def report(self, completed: int, training: int) -> SettlingReport:
        """What this worker tells the others."""
        digest = hashlib.sha256(self.dump()).hexdigest()[:8]
        return SettlingReport(completed, training, digest, self.now())

    def dump(self) -> bytes:
        """The versions as bytes."""
        return json.dumps(dict(self.software), sort_keys=True).encode()

    def differences(self, theirs: bytes) -> str:
        """What is of another version here than there, for people; "" for nothing. What one lacks does not matter."""
        other: dict[str, str] = json.loads(theirs)
        return ", ".join(
            f"{name} {version} (the others: {other[name]})"
            for name, version in self.software.items()
            if other.get(name, version) != version
        )


def reference_of(reports: Sequence[SettlingReport]) -> int:
    """The rank whose software and clock a newcomer is compared with: the first that holds the state, else the first."""
    return next((rank for rank, report in enumerate(reports) if report.completed != FRESH), 0)


def warn_of_clock(ahead_s: float, *, here: str, there: str) -> None:
    """Log that the clocks of two nodes differ, if they are far apart.

    Args:
        ahead_s: By how much the one here is ahead of the other one, in seconds.
        here: Name of this node.
        there: Name of the other one.
    """
    if abs(ahead_s) > CLOCKS_APART_S:
        logger.warning(
            "the clock of node %s is %.0f s %s that of node %s; set both by NTP. Until then, the events of the run "
            "are in the wrong order, and an object store may refuse requests",
            here,
            abs(ahead_s),
            "ahead of" if ahead_s > 0 else "behind",
            there,
        )
