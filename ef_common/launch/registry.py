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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ef_common import threads
from ef_common.core.founding import BEAT_S, FINISHED, LEASE_S, Start
from ef_common.errors import AlreadyExists, NotFound, StorageError, ThreadFailed, UsageError
from ef_common.protocol.addresses import Address, format_address, parse_address
from ef_common.protocol.auth import new_nonce
from ef_common.storage import manifest as manifests
from ef_common.storage.claims import ClaimPlace
from ef_common.storage.failures import redact

logger = logging.getLogger(__name__)

_FOLDER = "agents"
_KIND = "registration"
_NAME = re.compile(r"(founder|coordinator|beat|end)-(\d{6})(?:-(.+))?")
_Record = tuple[str, int, str]
"""Kind, number of the start, and what else is in the name."""
_LAST_S = 5.0  # for what is recorded at the end
_MAX_ADDRESSES = 64
"""So many are tried; any agent that lives is a good one."""


def registry_of(endpoint: str) -> str:
    """The URL of the registry that an endpoint is; "" if it is a host.

    Raises:
        UsageError: Other machines, or other processes, cannot share it.
    """
    scheme, separator, rest = endpoint.partition("://")
    if separator and (scheme == "memory" or (scheme in ("file", "local") and not rest.startswith("/"))):
        raise UsageError(
            "agents meet at file:///FOLDER with a path from the root that all of them share, at the URL of an object "
            f"store, or at etcd://HOST:PORT/PREFIX. Received: --rdzv-endpoint={redact(endpoint)}"
        )
    return endpoint if separator else ""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is on record of the newest start.

    Args:
        start: It.
        founder: The node that has made it.
        nonce: Of this start alone.
        addresses: Where coordinators of it listen, that of the leader first; none if the training is over.
    """

    start: Start
    founder: str
    nonce: str
    addresses: list[Address]


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

    def __init__(self, place: ClaimPlace, job: str, node: str) -> None:
        self.place = place
        self._folder = _FOLDER if job in ("", "none") else f"{_FOLDER}-{hashlib.sha256(job.encode()).hexdigest()[:16]}"
        self._node = node
        self.own_nonce = new_nonce()

    def newest(self) -> Start | None:
        """The newest start on record."""
        return self._newest(self._records())

    def look(self) -> Seen | None:
        """The newest start on record, and how it is joined."""
        records = self._records()
        start = self._newest(records)
        if start is None:
            return None
        founder = self._read(f"founder-{start.number:06}")
        addresses = [] if start.end == FINISHED else self._addresses(records, start.number)
        return Seen(start, str(founder["node"]), str(founder["nonce"]), addresses)

    def _newest(self, records: Sequence[_Record]) -> Start | None:
        number = max((start for kind, start, _ in records if kind == "founder"), default=0)
        if not number:
            return None
        beats = max((int(rest) for kind, start, rest in records if (kind, start) == ("beat", number)), default=0)
        has_ended = any((kind, start) == ("end", number) for kind, start, _ in records)
        return Start(number, beats, str(self._read(f"end-{number:06}")["how"]) if has_ended else "")

    def _addresses(self, records: Sequence[_Record], number: int) -> list[Address]:
        own = [(kind, rest) for kind, start, rest in records if start == number]
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

    def _records(self) -> list[_Record]:
        names = [entry.name for entry in self.place.entries(self._folder)]
        matches = filter(None, map(_NAME.fullmatch, names))
        return [(found[1], int(found[2]), found[3] or "") for found in matches]

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
        on_newer: Called if somebody has made a newer start, again until it returns that the workers have been told.
    """

    def __init__(
        self,
        registry: Registry,
        number: int,
        *,
        address: Address,
        leads: Callable[[], bool],
        on_newer: Callable[[int], bool],
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
        record = partial(self._record, how)
        try:
            thread = threads.start(record, name="elasticflow-registration", job="records the end")
        except ThreadFailed:  # the interpreter ends already, and starts none
            record()
        else:
            thread.join(_LAST_S)  # a place that does not answer is no reason to stay

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
                except Exception as error:  # the signs of life must go on, or the job is started a second time
                    if not failed:
                        trace = None if isinstance(error, StorageError) else error
                        logger.warning("no sign of life can be left for other agents: %s", error, exc_info=trace)
                    failed = True
            self._stopped.wait(BEAT_S)

    def _look(self, *, leads: bool) -> bool:
        """Look once; returns whether there is nothing more to do, as a newer start has been made and told."""
        newest = self.registry.newest()
        if newest is not None and newest.number > self.number:
            return self._on_newer(newest.number)
        if newest is not None and leads:
            self.registry.beat(self.number, newest.beats, self._address)
        return False
