"""Grows while a node more adds enough: the throughput efficiency of Or, Zhang and Freedman (2020).

With R_k samples per second of k nodes, d nodes more are worth it if

    s_{k,d} = ((R_{k+d} − R_k) / d) / (R_k / k)  >  S.

After each window of training steps the policy does the first of these that applies:

1. While a size is on trial and s lies within twice its standard error of S, wait for another window, four at most.
2. Try a size that was never measured, if the curve through what is known (see `curve`) says that it is worth it: up to
   three times the present one; or between two measured ones; or, if nothing smaller is known, the half of it.
3. After a trial, go to the best size that is known; after a return, only if it was left by mistake, and once.
4. Try a neighbour again, if the last change is `retry_s` ago, or longer the more often that was in vain.

**It does not flap.** Only the steps 2 and 3 may follow a change at once, each never-measured size is tried once, and a
size that the job returns to is no trial (see `stay`). So once the sizes that step 2 wants are measured for `retry_s`,
there are at most two changes in `retry_s`: the trial of a neighbour, and the return. That does not depend on what is
measured, however noisy it is. All comparisons are made by trials, whose two measures are neighbours in time: a drift
that all sizes share cancels out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ef_common.core.autoscale.curve import Curve
from ef_common.core.autoscale.policy import Situation, Target
from ef_common.core.autoscale.stay import SizeStay, curve_of, first, nodes, stay_of, to_retry, was_left_once

_GROWTH = 3
_SURE = 2.0  # standard errors

Worth = Callable[[int, float], float]
"""What a throughput at a size is worth: the throughput itself, or the goodput."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The policy "throughput".

    Args:
        threshold: S, in [0, 1].
        retry_s: After how many seconds a size that was not worth it is tried again.

    >>> from ef_common.core.throughput import SpeedHistory, Measure
    >>> history = SpeedHistory().with_measure(Measure(1, 100.0, 0.0, 10.0, 10.0))
    >>> Efficiency().decide(Situation(size=1, least=1, most=6, now=11.0, history=history))
    Target(size=3, reason='only 1 node is measured (100 samples/s), so 3 are tried', batch_size=None)
    >>> history = history.with_measure(Measure(3, 200.0, 0.0, 10.0, 30.0))
    >>> print(Efficiency().decide(Situation(size=3, least=1, most=6, now=31.0, history=history)).reason)
    3 nodes give 200 samples/s and 1 node 100: 0.50 for each more, not above 0.70, and 2 are not measured yet
    """

    threshold: float = 0.7
    retry_s: float = 3600.0

    def decide(self, situation: Situation) -> Target | None:
        """The size to ask for."""
        return self.decide_by(situation, lambda size, throughput: throughput)

    def decide_by(self, situation: Situation, worth: Worth, *, unit: str = "samples/s") -> Target | None:
        """The size to ask for, where a throughput is worth something else."""
        early = first(situation)
        if early is not None:
            return early if isinstance(early, Target) else None
        stay = stay_of(situation, self.retry_s)
        measured = {size: worth(size, throughput) for size, throughput in curve_of(situation, stay).items()}
        known = Known(Curve(measured), situation, self.threshold, unit)
        if self._is_open(stay, known):
            return None
        if untried := known.untried():
            return untried
        if known.best != situation.size and (stay.is_trial or was_left_once(situation, known.best, self.retry_s)):
            return Target(known.best, known.comparison(situation.size))
        again = to_retry(situation, stay, self.retry_s)
        if again is None:
            return None
        minutes = (situation.now - stay.since) / 60
        return Target(again, f"{nodes(again)}: not tried for {minutes:.0f} min, so once again")

    def _is_open(self, stay: SizeStay, known: Known) -> bool:
        """Whether another window may change the verdict of the trial."""
        if not stay.may_go_on or stay.trial is None or not stay.trial.sizes <= known.curve.measured.keys():
            return False
        small, large = sorted(stay.trial.sizes)
        ratio = known.curve.at(large) / known.curve.at(small)
        error = _SURE * stay.trial.error * ratio * small / (large - small)
        return abs(known.curve.gain(small, large) - self.threshold) < error


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the sizes within the limits.

    Args:
        curve: What each size is worth.
        situation: The fewest nodes and the most, among others.
        threshold: S.
        unit: Of what the curve gives.
    """

    curve: Curve
    situation: Situation
    threshold: float
    unit: str

    @property
    def best(self) -> int:
        """The largest measured size up to which each step between measured sizes is worth it."""
        best, *others = self.curve.measured
        for size in others:
            if self.curve.gain(best, size) <= self.threshold:
                break
            best = size
        return best

    @property
    def above(self) -> int | None:
        """The next measured size above the best."""
        return min((size for size in self.curve.measured if size > self.best), default=None)

    @property
    def below(self) -> int | None:
        """The next measured size below the best."""
        return max((size for size in self.curve.measured if size < self.best), default=None)

    def untried(self) -> Target | None:
        """A size that was never measured and seems to be worth it."""
        most = self.situation.most
        if self.above is None and self.best < most:
            size = self._last_worth(self.best, min(most, _GROWTH * self.best))
            if len(self.curve.measured) == 1:
                size = max(size, self.best + 1)
            if size > self.best:
                return Target(size, f"{self._reason_to_grow()}, so {size} are tried")
        if self.below is not None or self.above is not None:
            size = self._last_worth(self.below or self.best, self.above or self.best)
            if size not in self.curve.measured:
                return Target(size, f"{self.comparison(self.above or self.best)}, and {_are(size)} not measured yet")
        if self.below is None and self.best > self.situation.least:
            size = max(self.situation.least, self.best // 2)
            return Target(size, f"nothing below {nodes(self.best)} is measured, so {_are(size)} tried")
        return None

    def _last_worth(self, size: int, most: int) -> int:
        """How far it is worth to grow, one by one, from a size."""
        while size < most and self.curve.gain(size, size + 1) > self.threshold:
            size += 1
        return size

    def _reason_to_grow(self) -> str:
        if self.below is None:
            return (
                f"only {self.best} {'node is' if self.best == 1 else 'nodes are'} measured ({self._worth(self.best)})"
            )
        return self.comparison(self.best)

    def comparison(self, size: int) -> str:
        """How a measured size compares with the next one below, or with the best."""
        small, large = sorted((size, self.best))
        if small == large:
            small = self.below or large
        if small == large:
            return f"{nodes(large)} give {self._worth(large)}"
        gain = self.curve.gain(small, large)
        verdict = "above" if gain > self.threshold else "not above"
        return (
            f"{nodes(large)} give {self._worth(large)} and {nodes(small)} {self.curve.at(small):.4g}: "
            f"{gain:.2f} for each more, {verdict} {self.threshold:.2f}"
        )

    def _worth(self, size: int) -> str:
        return f"{self.curve.at(size):.4g} {self.unit}"


def _are(size: int) -> str:
    return f"{size} {'is' if size == 1 else 'are'}"
