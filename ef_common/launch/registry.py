"""Where the agents of a job find each other: a shared folder, an object store or etcd, as ``--rdzv-endpoint`` names it.

::

    agents/founder-000001           which agent has made the first start of the job, and a nonce of that start
    agents/coordinator-000001-NODE  where the one of a node listens, which leads or knows who does
    agents/beat-000001-00000042     the newest sign of life of the leader, with its address
    agents/end-000001               how this start has ended

All files are created only once; :mod:`ef_common.core.founding` has the rule.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ef_common import threads
from ef_common.core.founding import BEAT_S, LEASE_S, Start
from ef_common.errors import AlreadyExists, NotFound, StorageError, StorageFailed, UsageError
from ef_common.protocol.addresses import Address, format_address, parse_address
from ef_common.protocol.auth import new_nonce
from ef_common.storage import manifest as manifests
from ef_common.storage.claims import Place
from ef_common.storage.failures import redact

logger = logging.getLogger(__name__)

_FOLDER = "agents"
_KIND = "registration"
_NAME = re.compile(r"(founder|coordinator|beat|end)-(\d{6})(?:-(.+))?")
_LAST_S = 5.0  # for what is recorded at the end
_MAX_ADDRESSES = 64
"""So many are tried; any agent that lives is a good one."""


def is_registry(endpoint: str) -> bool:
    """Whether an endpoint is a registry, and not a host."""
    return "://" in endpoint


def check_registry(url: str) -> None:
    """Refuse a registry that other machines, or other processes, cannot share.

    Raises:
        UsageError: It is one of this process, or a folder whose path depends on the working directory.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "memory" or (scheme in ("file", "local") and not rest.startswith("/")):
        raise UsageError(
            "agents meet at file:///FOLDER with a path from the root that all of them share, at the URL of an object "
            f"store, or at etcd://HOST:PORT/PREFIX. Received: --rdzv-endpoint={redact(url)}"
        )


class Registry:
    """The records of a job.

    Args:
        place: Where they are.
        job: torchrun's ``--rdzv-id``: a place can have several jobs. "" or "none" for the only one.
        node: Name of this node, which no other agent has.

    Raises:
        StorageFailed: By all operations. The place has not said.

    Attributes:
        own_nonce: That of a start which this agent makes.
    """

    def __init__(self, place: Place, job: str, node: str) -> None:
        self.place = place
        self._folder = _FOLDER if job in ("", "none") else f"{_FOLDER}-{hashlib.sha256(job.encode()).hexdigest()[:16]}"
        self._node = node
        self.own_nonce = new_nonce()

    def newest(self) -> Start | None:
        """The newest start on record."""
        records = self._records()
        number = max((start for kind, start, _ in records if kind == "founder"), default=0)
        if not number:
            return None
        beats = max((int(rest) for kind, start, rest in records if (kind, start) == ("beat", number)), default=0)
        has_ended = any((kind, start) == ("end", number) for kind, start, _ in records)
        return Start(number, beats, str(self._read(f"end-{number:06}")["how"]) if has_ended else "")

    def addresses(self, number: int) -> list[Address]:
        """Where coordinators of a start listen, as far as they are on record; that of the leader comes first."""
        own = [(kind, rest) for kind, start, rest in self._records() if start == number]
        beats = sorted((rest for kind, rest in own if kind == "beat"), reverse=True)
        nodes = [rest for kind, rest in own if kind == "coordinator"]
        names = [
            *(f"beat-{number:06}-{beat}" for beat in beats),
            *(f"coordinator-{number:06}-{node}" for node in nodes),
        ]
        found: dict[Address, None] = {}
        for name in names[:_MAX_ADDRESSES]:
            with contextlib.suppress(NotFound):  # it is gone since
                address = str(self._read(name)["address"])
                found[parse_address(address, what=f"the address in {name} of {self.place}")] = None
        return list(found)

    def found(self, number: int) -> bool:
        """Make a start; False if somebody else has made it.

        Raises:
            UsageError: The place does not create exclusively.
        """
        name = f"founder-{number:06}"
        try:
            self._create(name, {"node": self._node, "nonce": self.own_nonce})
        except AlreadyExists:
            return False
        try:
            self._create(name, {"node": self._node, "again": True})
        except AlreadyExists:
            return True
        raise UsageError(
            f"agents cannot find each other at {self.place}: it does not create files exclusively. Use a shared "
            "folder, an object store with conditional writes, or etcd"
        )

    def nonce(self, number: int) -> str:
        """The nonce of a start."""
        return str(self._read(f"founder-{number:06}")["nonce"])

    def add(self, number: int, address: Address) -> None:
        """Record where the coordinator of this node listens."""
        self._create(f"coordinator-{number:06}-{self._node}", {"address": format_address(address)})

    def remove(self, number: int) -> None:
        """The coordinator of this node listens no more."""
        self.place.delete(self._path(f"coordinator-{number:06}-{self._node}"))

    def beat(self, number: int, beats: int, address: Address) -> None:
        """Leave a sign of life of the leader, which listens at an address, after so many."""
        with contextlib.suppress(AlreadyExists):  # for a moment, two of them may lead
            self._create(f"beat-{number:06}-{beats + 1:08}", {"address": format_address(address)})
        if beats:
            self.place.delete(self._path(f"beat-{number:06}-{beats:08}"))

    def end(self, number: int, how: str) -> None:
        """Record how a start has ended; the first record counts."""
        with contextlib.suppress(AlreadyExists):
            self._create(f"end-{number:06}", {"how": how})

    def _records(self) -> list[tuple[str, int, str]]:
        """What there is: (kind, number of the start, what else is in its name)."""
        names = [entry.name for entry in self.place.entries(self._folder)]
        matches = filter(None, map(_NAME.fullmatch, names))
        return [(found[1], int(found[2]), found[3] or "") for found in matches]

    @property
    def founder(self) -> str:
        """The node that has made the newest start; "" if there is none."""
        start = self.newest()
        return "" if start is None else str(self._read(f"founder-{start.number:06}")["node"])

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _create(self, name: str, content: dict[str, Any]) -> None:
        self.place.create(self._path(name), manifests.sealed(content, _KIND), keep=True)

    def _read(self, name: str) -> dict[str, Any]:
        return manifests.opened(self.place.read(self._path(name)), name, _KIND)


class Registration:
    """A thread that leaves signs of life while the coordinator of this agent leads, and notices a newer start.

    Args:
        registry: Where.
        number: Of the start.
        address: Where the coordinator of this agent listens.
        leads: Whether it leads now.
        on_newer: Called once if somebody has made a newer start.
    """

    def __init__(
        self,
        registry: Registry,
        number: int,
        *,
        address: Address,
        leads: Callable[[], bool],
        on_newer: Callable[[int], None],
    ) -> None:
        self.registry = registry
        self.number = number
        self._address = address
        self._leads = leads
        self._on_newer = on_newer
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        threads.start(self._run, name="elasticflow-registration", job="leaves signs of life for other agents")

    def end(self, how: str = "") -> None:
        """The coordinator of this agent is to end. May be repeated.

        Args:
            how: How the start has ended, if it has. What cannot be recorded is noticed when the signs of life stop.
        """
        self._stopped.set()
        last = threads.start(partial(self._record, how), name="elasticflow-registration", job="records the end")
        last.join(_LAST_S)  # a place that does not answer is no reason to stay

    def _record(self, how: str) -> None:
        try:
            if how:
                self.registry.end(self.number, how)
            self.registry.remove(self.number)
        except StorageError as error:
            logger.warning("other agents cannot be told that this one ends: %s", error)

    def _run(self) -> None:
        failed, looked = False, 0.0
        while not self._stopped.is_set():
            leads, now = self._leads(), time.monotonic()
            if leads or now >= looked + LEASE_S:
                looked = now
                try:
                    if self._look(leads=leads):
                        return
                    failed = False
                except StorageFailed as error:  # others that come meanwhile find the addresses on record
                    if not failed:
                        logger.warning("no sign of life can be left for other agents: %s", error)
                    failed = True
            self._stopped.wait(BEAT_S)

    def _look(self, *, leads: bool) -> bool:
        """Look once; returns whether somebody has made a newer start."""
        newest = self.registry.newest()
        if newest is not None and newest.number > self.number:
            self._on_newer(newest.number)
            return True
        if newest is not None and leads:
            self.registry.beat(self.number, newest.beats, self._address)
        return False
