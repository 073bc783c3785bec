"""The cells of the grid: what can go wrong, in whom, and when; and what must come of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

STEP = 5
"""The faults strike after so many updates."""
VICTIMS = {"first": 0, "middle": 1, "last": 2}
"""Ranks, of three workers. The first is the one that logs, saves, and evaluates callbacks for all."""

MOMENTS: dict[str, dict[str, object]] = {
    "start-up": {"where": "start"},
    "forward": {"where": "forward", "step": STEP},
    "reduction": {"where": "reduction", "step": STEP},
    "optimizer": {"where": "optimizer", "step": STEP},
    "boundary": {"where": "boundary"},
    "checkpoint": {"where": "checkpoint", "step": STEP + 1},
    "data loading": {"where": "data", "step": STEP},
    "validation": {"where": "validation"},
    "recovery": {"where": "build", "index": 1, "generation": 2},
    "admission": {"where": "build", "index": 1, "generation": 2},
}
"""Where a :class:`tests.faults.faults.Fault` strikes. At a boundary and in an admission a newcomer is let in; in a
recovery another worker has been killed."""

_USERS_CODE = ("start-up", "forward", "optimizer", "data loading", "validation")

GOES_ON = "goes on"
DIES = "dies"
LEAVES = "leaves"
EVICTED = "is evicted"
ENDS_THE_JOB = "ends the job"
DIES_OR_RETURNS = "dies or returns"

FATES = {
    "SIGKILL": DIES,
    "SIGTERM": LEAVES,
    "SIGINT": DIES,
    "SIGSTOP": EVICTED,
    "SIGSEGV": DIES,
    "abort": DIES,
    "exception": ENDS_THE_JOB,
    "data exception": ENDS_THE_JOB,
    "holding the GIL": EVICTED,
    "out of memory": DIES,
    "full disk": GOES_ON,
    "closed sockets": DIES_OR_RETURNS,
}
"""What becomes of the victim. The others train on, unless the job ends."""
STATUSES = {"SIGKILL": -9, "SIGINT": 1, "SIGSEGV": -11, "abort": -6, "out of memory": -9}
"""Exit statuses of those that die."""


PLAIN_ONLY = ("keras-jax",)
"""Hosts that refuse the deterministic mode."""


@dataclass(frozen=True)
class Cell:
    """One trial.

    Args:
        host: Name of a host; see :mod:`tests.faults.hosts`.
        fault: One of `FATES`.
        victim: One of `VICTIMS`.
        moment: One of `MOMENTS`.
        deterministic: The weights must be those of an undisturbed run, bit for bit.
    """

    host: str
    fault: str
    victim: str
    moment: str
    deterministic: bool = False

    @property
    def fate(self) -> str:
        """What must become of the victim."""
        return FATES[self.fault]

    def __str__(self) -> str:
        mode = "-deterministic" if self.deterministic else ""
        return f"{self.host}{mode}-{self.fault}-{self.victim}-{self.moment}".replace(" ", "_")


def why_not(host: str, fault: str, moment: str) -> str:
    """Why there is no such cell, or ""."""
    if fault == "data exception" and host.startswith("keras"):
        return "Keras has no data workers here"
    if fault == "data exception" and moment != "data loading":
        return "it is in a data worker"
    if fault == "exception" and moment not in _USERS_CODE:
        return "no code of the user's runs then"
    if moment == "optimizer" and fault == "exception" and host == "keras-tensorflow":
        return "the optimizer is a part of the graph"
    return ""


def cells(hosts: list[str], *, deterministic: bool = False) -> Iterator[Cell]:
    """All cells of these hosts in one mode."""
    hosts = [host for host in hosts if not (deterministic and host in PLAIN_ONLY)]
    for host, fault, moment, victim in itertools.product(hosts, FATES, MOMENTS, VICTIMS):
        if not why_not(host, fault, moment):
            yield Cell(host, fault, victim, moment, deterministic)
