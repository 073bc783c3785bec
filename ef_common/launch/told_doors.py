"""The doors of a job in Kubernetes: those that its controller tells in a file, and those of a name.

The name may resolve late, to what is old, or not at all. :mod:`ef_common.core.door_list` has the rule. An agent that
has looked in vain for a while shows a nonce at the port at which its first worker will answer with metrics, where the
controller asks anyway.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from pathlib import Path

from ef_common import threads
from ef_common.core.door_list import ASK_S, Bearings, DoorList, ListReader
from ef_common.core.doors import SETTLED_S
from ef_common.launch.door_search import Resolved
from ef_common.launch.port_page import PortPage
from ef_common.protocol.addresses import Address

logger = logging.getLogger(__name__)

_MAX_BYTES = 1 << 17
_NAMES_S = 0.5
"""How long a look waits for the name server."""


class ToldDoors:
    """The doors in a file and at the addresses of a name.

    Args:
        name: The name.
        file: The file, which is read anew for each look.
        own: Address and port at which this agent listens.
        port: Port of the page with the nonce; 0 for none, so that no list counts for founding the job.
    """

    settle_s = SETTLED_S

    def __init__(self, name: Resolved, *, file: Path, own: Address, port: int) -> None:
        self._file, self._own = file, own
        self._names = _Lookups(name)
        self._reader = ListReader(own[0], draw=lambda: secrets.token_hex(8))
        self._page = PortPage(port, self._text) if port else None
        self._began = time.monotonic()
        self._is_shown = False
        self._bearings = Bearings((), (), may_found=False)

    def close(self) -> None:
        """End the page, so that the first worker can have its port."""
        if self._page is not None:
            self._page.stop()

    def known(self) -> list[Address]:
        """All addresses that are to be asked now, that of this agent first."""
        named = [host for host, _ in self._names.known()]
        now = time.monotonic()
        if self._page is not None and not self._is_shown and now - self._began >= ASK_S:
            self._is_shown = True
            self._page.start()
        self._bearings = self._reader.look(_read(self._file), named, now)
        return self._with_port(self._bearings.ask)

    def counted(self) -> list[Address]:
        """Those of which a majority founds the job."""
        return self._with_port(self._bearings.doors)

    def candidate(self, own: Address | None) -> Address | None:
        """The door of this agent, if it may found the job."""
        return own if self._bearings.may_found and own == self._own else None

    def in_order(self, doors: Iterable[Address]) -> list[Address]:
        """All of these, in an order on which all agents agree: that of their numbers."""
        return Resolved.sorted(doors)

    def believes(self, address: Address) -> bool:
        """Whether another job's coordinator at an address is an error: not here, as any of them may be old."""
        return False

    def _with_port(self, hosts: Iterable[str]) -> list[Address]:
        return [(host, self._own[1]) for host in hosts]

    def _text(self) -> str:
        nonce = self._reader.nonce(time.monotonic())
        return f'elasticflow_seeking{{nonce="{nonce}"}} 1\n'


def _read(file: Path) -> DoorList:
    try:
        with file.open("rb") as opened:
            return DoorList.of(opened.read(_MAX_BYTES).decode("ascii", errors="replace"))
    except OSError as error:
        logger.debug("no doors are told: %s", error)
        return DoorList()


class _Lookups:
    """Asks a name server in the background: it may take long to say nothing."""

    def __init__(self, name: Resolved) -> None:
        self._name = name
        self._answer: Future[list[Address]] | None = None
        self._known: list[Address] = []

    def known(self) -> list[Address]:
        """The addresses that are known now; those of before as long as the name server takes its time.

        Raises:
            ThreadFailed: The thread that asks has failed.
        """
        self._answer = self._answer or self._ask()
        with contextlib.suppress(NoAnswer):
            self._known = self._answer.result(_NAMES_S)
            self._answer = None
        return self._known

    def _ask(self) -> Future[list[Address]]:
        answer: Future[list[Address]] = Future()

        def resolve() -> None:
            answer.set_result(self._name.known())

        threads.start(
            resolve, name="elasticflow-names", job="asks for the addresses of a name", on_failure=answer.set_exception
        )
        return answer
