"""Who is silent, who hangs and who is slower than the others, as far as the workers' heartbeats tell."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from ef_common.core.membership import Membership, Phase
from ef_common.core.progress import Heard, Limits, Longest, Verdict, judge
from ef_common.core.stragglers import Pacing, StragglerReport, Track, judge_pace, noted, slow
from ef_common.core.view import View
from ef_common.protocol import wire
from ef_common.protocol.peer import Peer, PeerRefusal

logger = logging.getLogger(__name__)

_SWEEPS_PER_TIMEOUT = 8
_DOUBTFUL, _DECIDED = 0.7, 1.3  # of the timeout: perhaps silent; so long it is waited for others that are doubtful
_PACE_S = 1.0
_LARGEST_RATIO = 1e6


class Liveness:
    """Judges the workers now and then.

    ::

        attentive → absent   `sweep` comes late, or not at all: it was us who did not listen
        absent → attentive   a heartbeat timeout has passed, in which we have listened

    Args:
        timeout_s: A worker that is silent for longer is lost.
        limits: When a worker counts as hung.
        now: Time of a monotonic clock, in seconds.

    Attributes:
        sweep_at: When to look again.
    """

    def __init__(self, timeout_s: float, limits: Limits, now: float) -> None:
        self.timeout_s = timeout_s
        self.limits = limits
        self.pacing = Pacing()
        self.viewed_at = now  # when the newest view was issued, or came to this coordinator
        self.longest = Longest()
        self._heard: dict[str, Heard] = {}
        self._tracks: dict[str, Track] = {}
        self._paced_at = now
        self._swept_at = self._attentive_since = now
        self._absent_at = -math.inf  # when we were found not to have listened
        self.sweep_at = now + self.sweep_s

    @property
    def sweep_s(self) -> float:
        """How often it is looked who is silent."""
        return self.timeout_s / _SWEEPS_PER_TIMEOUT

    def sweep(self, now: float) -> None:
        """Note that we listen."""
        self.sweep_at = now + self.sweep_s
        if not self.has_listened(now):  # it was us (a stopped or starved process)
            self._attentive_since = self._absent_at = now
        self._swept_at = now

    def has_listened(self, now: float) -> bool:
        """Whether we have listened since the last sweep; if not, what has come meanwhile is still unread."""
        return now - self._swept_at <= 2 * self.sweep_s

    def is_attentive(self, now: float) -> bool:
        """Whether we have listened all the time, so that no system can have given up a peer unnoticed."""
        return self.has_listened(now) and now > self._absent_at + self.timeout_s

    def hear(self, peer: Peer, heartbeat: wire.Heartbeat, state: Membership, now: float) -> None:
        """Note the watermark and the progress of a member.

        Raises:
            PeerRefusal: It is in a view that does not exist.
        """
        worker, progress = str(peer.worker), heartbeat.progress
        if heartbeat.watermark is not None and not is_warming(worker, state):
            peer.watermark = heartbeat.watermark
        if progress is None or state.failed:
            return  # it need not know any views then
        if progress.generation > state.generation:
            raise PeerRefusal("impossible", f"it is in view {progress.generation}, which does not exist")
        self._heard[worker] = Heard(progress, now)
        self.longest = self.longest.and_of(progress)
        self._tracks[worker] = noted(self._tracks.get(worker), progress, now, self.pacing)

    def forget(self, worker: str) -> None:
        """Forget what a worker has reported."""
        self._heard.pop(worker, None)
        self._tracks.pop(worker, None)

    def silent(self, peers: Iterable[Peer], now: float) -> tuple[list[Peer], float]:
        """Workers that are silent for too long, and for how long; none yet if more may follow: we may be cut off."""
        silent_s = {peer: now - max(peer.heard, self._attentive_since) for peer in peers}
        silent = [peer for peer, seconds in silent_s.items() if seconds > self.timeout_s]
        longest_s = max(silent_s.values(), default=0.0)
        in_doubt = any(_DOUBTFUL * self.timeout_s < seconds <= self.timeout_s for seconds in silent_s.values())
        return ([] if in_doubt and longest_s < _DECIDED * self.timeout_s else silent), longest_s

    def hung(self, members: Sequence[str], now: float) -> Verdict:
        """Judge the members that are here: who keeps the others waiting."""
        return judge(
            members,
            self._heard,
            now=now,
            earliest=self.viewed_at,
            fresh=max(now - self.timeout_s, self._attentive_since),
            longest=self.longest,
            limits=self.limits,
        )

    def stragglers(self, view: View, now: float) -> list[tuple[StragglerReport, tuple[str]]] | None:
        """Who of the members is to be told that it is slower than the others, or is no longer; None if it is not time.

        This is logged, too.
        """
        if now - self._paced_at < _PACE_S:
            return None
        self._paced_at = now
        after, reports = judge_pace(self._tracks, view.ids, now, self.pacing)
        self._tracks |= after
        for report in reports:
            what = "is slower than the others" if report.slow else "is as fast as the others again"
            how = f"its throughput is {report.ratio:.2f} of theirs, and they wait {report.waiting:.0%} of the time"
            logger.warning("view %d: %s %s: %s", view.generation, report.worker, what, how)
        return [(replace(report, ratio=min(report.ratio, _LARGEST_RATIO)), (report.worker,)) for report in reports]

    def evicts_stragglers(self, members: Collection[str]) -> bool:
        """Whether the members want the slowest straggler to be replaced."""
        return any(self._heard[worker].progress.evicts_stragglers for worker in members if worker in self._heard)

    def slow(self, members: Collection[str]) -> tuple[str, ...]:
        """The members that are stragglers, the slowest first."""
        return slow(self._tracks, members)


def is_warming(worker: str, state: Membership) -> bool:
    """Whether this is a newcomer that warms up; a worker that has left may still be heard."""
    stands = state.workers.get(worker)
    return stands is not None and stands.phase is Phase.WARMING
