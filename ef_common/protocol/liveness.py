"""Who is silent, who hangs and who is slower than the others, as far as the workers' heartbeats tell."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from ef_common.core.progress import Heard, Limits, Longest, Progress, Verdict, judge
from ef_common.core.stragglers import Pacing, Report, Track, judge_pace, noted, slow, slowest
from ef_common.protocol.peer import Peer

_SWEEPS_PER_TIMEOUT = 8
_DOUBTFUL, _DECIDED = 0.7, 1.3  # of the timeout: perhaps silent; so long it is waited for others that are doubtful
_PACE_S = 1.0


class Liveness:
    """Judges the workers now and then.

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
        if now - self._swept_at > 2 * self.sweep_s:
            # It was us who did not listen (a stopped or starved process): what came is still unread.
            self._attentive_since = self._absent_at = now
        self._swept_at = now

    def is_attentive(self, now: float) -> bool:
        """Whether we have listened all the time, so that no system can have given up a peer unnoticed."""
        return now - self._swept_at <= 2 * self.sweep_s and now > self._absent_at + self.timeout_s

    def hear(self, worker: str, progress: Progress, now: float) -> None:
        """Note a member's progress."""
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

    def stragglers(self, members: Sequence[str], now: float) -> tuple[Report, ...] | None:
        """Who of the members has become slower than the others, or is no longer; None if it is not time to look."""
        if now - self._paced_at < _PACE_S:
            return None
        self._paced_at = now
        after, reports = judge_pace(self._tracks, members, now, self.pacing)
        self._tracks |= after
        return reports

    def to_replace(self, members: Collection[str]) -> str | None:
        """The slowest straggler ("" if there is none), if the members want it to be replaced; else None."""
        if any(self._heard[worker].progress.evicts_stragglers for worker in members if worker in self._heard):
            return slowest(self._tracks, members)
        return None

    def slow(self, members: Collection[str]) -> tuple[str, ...]:
        """The members that are stragglers, the slowest first."""
        return slow(self._tracks, members)
