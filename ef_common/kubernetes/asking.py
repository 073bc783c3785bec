"""What workers say of their trainings: one pod of each job is asked every few seconds, in the background.

What a pod answers is not trusted: it may be long, late, or wrong. It is read up to a limit and for a limited time, and
only numbers and addresses are taken from it. So a pod that lies falsifies the status of its own job, its size between
what the user allows, and which of its pods go first; it delays nobody else.

A pod that looks for its job in vain shows a nonce on the same page (:mod:`ef_common.core.door_list`). As long as fewer
pods train than run, some of the others are asked for that, too, and whether they train.

Cost: one request for each job in `EVERY_S`, or two if the first pod does not answer, for `MOST_AT_ONCE` jobs at once;
`_SEEKERS` more while some pods of a job do not train, or `_SEEKERS_AT_FIRST` if none does; a few hundred bytes of
memory for each job.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ef_common import threads
from ef_common.core.cluster import WorkerReport
from ef_common.core.cluster.report import after
from ef_common.core.door_list import VALID_S
from ef_common.errors import ThreadFailed

logger = logging.getLogger(__name__)

EVERY_S = 3.0
MOST_AT_ONCE = 32
_TIMEOUT_S = 2.0
_MAX_BYTES = 16384
_ASK_OF_A_JOB = 2
"""How many pods of a job are asked in a round; others are asked in the next one."""
_LINE = re.compile(r"elasticflow_([a-z_]{1,40}) ([0-9]{1,15}(?:\.[0-9]{1,9})?)")
_STRAGGLER = re.compile(r'elasticflow_straggler\{address="([0-9a-fA-F.:]{2,45})"\} 1')
_FIRST = re.compile(r'elasticflow_rank_zero\{address="([0-9a-fA-F.:]{2,45})"\} 1')
_SEEKING = re.compile(r'elasticflow_seeking\{nonce="([0-9a-f]{16})"\} 1')
_SEEKERS = 8
"""How many more pods of a job that trains are asked in a round whether they look for it."""
_SEEKERS_AT_FIRST = 64
"""The same for a job of which nobody trains."""
_MOST_SLOW = 16
_NEEDED = ("workers", "view_generation", "step", "samples_per_second", "nodes_wanted")

Door = tuple[str, int]
"""Address and port at which a pod answers."""


def report_in(text: str, at: float) -> WorkerReport | None:
    r"""What a page of metrics says of the training; None if the worker is no member, or the page is malformed.

    Args:
        text: The page.
        at: When it was asked for.

    Example:
        >>> page = "elasticflow_workers 2\nelasticflow_view_generation 3\nelasticflow_step 40\n"
        >>> found = report_in(page + "elasticflow_samples_per_second 51.5\nelasticflow_nodes_wanted 0\n", 1.0)
        >>> found.workers, found.step, found.samples_per_s
        (2, 40, 51.5)
    """
    lines = text.splitlines()
    found = {match[1]: match[2] for match in map(_LINE.fullmatch, lines) if match}
    slow = tuple(sorted({match[1] for match in map(_STRAGGLER.fullmatch, lines) if match}))[:_MOST_SLOW]
    try:
        workers, generation, step = (int(found[name]) for name in _NEEDED[:3])
        asked, speed = int(found["nodes_wanted"]), float(f"{float(found['samples_per_second']):.3g}")
        checkpoint = int(found["checkpoint_step"]) if "checkpoint_step" in found else None
        nodes = min(int(found["nodes"]), 2**31 - 1) if "nodes" in found else None
    except (KeyError, ValueError):
        return None
    largest = 2**31 - 1  # what the fields of the status hold
    first = next((match[1] for match in map(_FIRST.fullmatch, lines) if match), "")
    if not workers:
        return None
    return WorkerReport(
        at, min(workers, largest), generation, step, speed, min(asked, largest), slow, checkpoint, first, nodes
    )


def nonce_in(text: str) -> str:
    r"""The nonce that a page shows; "" for none.

    Example:
        >>> nonce_in('elasticflow_seeking{nonce="00112233445566ff"} 1\n')
        '00112233445566ff'
    """
    return next((match[1] for match in map(_SEEKING.fullmatch, text.splitlines()) if match), "")


class Reports:
    """The newest report of each job, kept by a thread.

    Args:
        on_news: Called when something is new that the controller may have to act upon.
        clock: Time in seconds.
    """

    def __init__(self, *, on_news: Callable[[], object], clock: Callable[[], float] = time.time) -> None:
        self._on_news, self._clock = on_news, clock
        self._doors: Mapping[str, Sequence[Door]] = {}
        self._reports: dict[str, WorkerReport] = {}
        self._answered: dict[str, Door] = {}
        self._seekers: dict[str, dict[str, tuple[str, float]]] = {}  # by address: the nonce, and when it was heard last
        self._idle: dict[str, frozenset[str]] = {}  # addresses of those that did not train when they were asked
        self._round = 0
        self._stopped = threading.Event()

    def follow(self, doors: Mapping[str, Sequence[Door]]) -> None:
        """From now on, these pods may be asked.

        Args:
            doors: Those of each job.
        """
        self._doors = doors
        self._forget_others()

    def _forget_others(self) -> None:
        doors = self._doors
        for known in (self._reports, self._answered, self._seekers, self._idle):
            for job in [job for job in list(known) if not doors.get(job)]:
                known.pop(job, None)

    def of(self, job: str) -> WorkerReport | None:
        """What a worker of a job has said last; None if nobody has, or nobody can be asked any more."""
        return self._reports.get(job)

    def seekers_of(self, job: str) -> dict[str, str]:
        """What the pods of a job have shown that look for it, by their addresses.

        One that does not answer any more may stand still for a while, and believe what it was told.
        """
        return {address: nonce for address, (nonce, _) in list(self._seekers.get(job, {}).items())}

    def idle_of(self, job: str) -> frozenset[str]:
        """Addresses of the pods of a job that did not train when they were asked last."""
        return self._idle.get(job, frozenset())

    def start(self, *, on_failure: Callable[[ThreadFailed], object] = lambda failure: None) -> None:
        """Start the thread.

        Args:
            on_failure: Called if the thread ends by an error, so that nobody is asked any more.
        """

        def ask() -> None:
            asyncio.run(self._run())

        threads.start(ask, name="elasticflow-reports", job="asks workers", on_failure=on_failure)

    def stop(self) -> None:
        """Let the thread end."""
        self._stopped.set()

    async def _run(self) -> None:
        while not self._stopped.is_set():
            began = time.monotonic()
            await self.ask_all()
            await asyncio.sleep(max(0.0, began + EVERY_S - time.monotonic()))

    async def ask_all(self) -> None:
        """Ask for each job once."""
        doors, self._round = self._doors, self._round + 1
        places = asyncio.Semaphore(MOST_AT_ONCE)

        async def ask(job: str) -> bool:
            async with places:
                return await self._ask_of(job, doors[job])

        is_news = any(await asyncio.gather(*map(ask, doors)))
        self._forget_others()  # an answer may have come after it was told that nobody of this job may be asked any more
        if is_news:
            self._on_news()

    async def _ask_of(self, job: str, doors: Sequence[Door]) -> bool:
        """Ask pods of a job until one answers; whether anything has changed that matters to the controller."""
        order, report = self._in_order(job, doors), None
        pages: dict[Door, str | None] = {}
        is_news = False
        for door in order:
            at = self._clock()
            pages[door] = await _page(door)
            report = report_in(pages[door] or "", at)
            if report is not None:
                before = self._reports.get(job)
                self._reports[job], self._answered[job] = after(before, replace(report, by=door[0])), door
                is_news = before is None or (before.members, before.asked) != (report.members, report.asked)
                break
        most = _num_others(report, len(doors))
        others = _turned([door for door in doors if door not in order], self._round * most)[:most]
        pages.update(zip(others, await asyncio.gather(*map(_page, others)), strict=True))
        notes = [self._note_seeker(job, door, text) for door, text in pages.items()]
        self._forget_old_seekers(job)
        self._note_idle(job, doors, pages, do_all_train=not most)
        return is_news or any(notes)

    def _note_idle(
        self, job: str, doors: Sequence[Door], pages: Mapping[Door, str | None], *, do_all_train: bool
    ) -> None:
        """Note who does not train. One that does not answer may do either."""
        train = {door[0] for door, text in pages.items() if report_in(text or "", 0.0) is not None}
        idle = {door[0] for door, text in pages.items() if text != ""} - train
        still = (self._idle.get(job, frozenset()) | idle) - train
        self._idle[job] = frozenset() if do_all_train else still & {address for address, _ in doors}

    def _forget_old_seekers(self, job: str) -> None:
        """Forget pods that have gone, too: nobody hears any more from them."""
        known = self._seekers.get(job, {})
        for address in [address for address, (_, at) in known.items() if self._clock() - at >= VALID_S]:
            known.pop(address)

    def _note_seeker(self, job: str, door: Door, text: str | None) -> bool:
        """What a page says of whether this pod looks for its job; whether that is news. None: it has found it."""
        known, nonce = self._seekers.setdefault(job, {}), nonce_in(text or "")
        before = known.get(door[0], ("", 0.0))[0]
        if nonce:
            known[door[0]] = (nonce, self._clock())
        elif text != "":
            known.pop(door[0], None)
        return bool(nonce) and nonce != before

    def _in_order(self, job: str, doors: Sequence[Door]) -> list[Door]:
        """The pod of rank 0 comes first, then the one that has answered before, and another one in each round."""
        known = self._reports.get(job)
        address = "" if known is None else known.first
        order = sorted(
            _turned(doors, self._round), key=lambda door: (door[0] != address, door != self._answered.get(job))
        )
        return order[:_ASK_OF_A_JOB]


def _num_others(report: WorkerReport | None, num_pods: int) -> int:
    """How many more pods of a job are asked whether they look for it."""
    if report is None:
        return _SEEKERS_AT_FIRST
    do_all_train = report.nodes is not None and report.nodes >= num_pods
    return 0 if do_all_train else _SEEKERS


def _turned(doors: Sequence[Door], by: int) -> list[Door]:
    """The same, beginning at another one."""
    first = by % max(1, len(doors))
    return [*doors[first:], *doors[:first]]


async def _page(door: Door) -> str | None:
    """The metrics of a pod; "" if it does not answer in time, or if its answer is too long; None without a page."""
    try:
        return await asyncio.wait_for(_read(door), _TIMEOUT_S)
    except ConnectionRefusedError:
        return None
    except Exception as error:  # whatever a pod does, others are asked
        logger.debug("the worker at %s does not answer: %r", door, error)
        return ""


async def _read(door: Door) -> str:
    reader, writer = await asyncio.open_connection(*door, limit=_MAX_BYTES)
    try:
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        await writer.drain()
        data = b""
        while len(data) <= _MAX_BYTES:
            more = await reader.read(_MAX_BYTES)
            if not more:
                return data.decode("ascii", errors="replace")
            data += more
        return ""
    finally:
        writer.transport.abort()  # whatever is still on its way is not needed
