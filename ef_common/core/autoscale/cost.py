"""Weighs time against money: the policy "cost".

With R_k samples per second of k nodes and N samples to go, the rest of the run takes

    t_k = N / R_k + pause of a change        and costs        m_k = price · workers of k nodes · t_k.

If the training ends after a number of steps, N is in proportion to the batch that all workers of k nodes have together.

The user has one of three goals:

* *value*: an hour earlier is worth v, so the size with the least m_k + v · t_k is best;
* *deadline*: the cheapest size that ends in time is best, or the fastest one, if none does;
* *budget*: the fastest size that the rest of the budget pays for is best, or the cheapest one, if it pays for none.

Sizes that were never measured are taken from the curve through the others (see `curve`), up to three times as large or
small as a measured one. They are tried only if the prediction is clearly better, so that the trial is worth its price.
A measured size is chosen again only after a trial, or when there was no change for a tenth of the time that remains,
and for ten minutes, or at once if the present size misses the goal: a known size is then safer than a trial. That keeps
the number of changes small; so does the requirement to be better by some per cent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ef_common.core.autoscale.curve import Curve
from ef_common.core.autoscale.policy import Situation, Target
from ef_common.core.autoscale.stay import SizeStay, curve_of, first, nodes, stay_of

_REACH = 3
_BETTER = 0.03
_RESERVE = 0.02  # of the deadline or the budget, which a prediction leaves
_REST = 0.1  # of the remaining time, without a change
_LEAST_REST_S = 600.0
_THRIFT = 0.05  # part of the time by which a run may be longer to spend nothing of the budget
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class CostPlan:
    """How the rest of the run would go with a size.

    Args:
        size: Nodes.
        seconds: How long it would take.
        money: What it would cost.
        misses: By which factor it exceeds the deadline or the budget; at most 1 if it keeps them.
        score: What is to be small among the plans that miss nothing.
    """

    size: int
    seconds: float
    money: float
    misses: float
    score: float

    @property
    def rank(self) -> tuple[float, float]:
        """Plans that miss their limit are ordered by how much; the others by their score."""
        return (self.misses, self.score) if self.misses > 1 else (1.0, self.score)

    def beats(self, other: CostPlan, by: float) -> bool:
        """Whether it is better by this share."""
        if other.misses > 1:
            return self.misses < other.misses * (1 - by)
        return self.misses <= 1 and self.score < other.score * (1 - by)


@dataclass(frozen=True, slots=True)
class Cost:
    """The policy "cost". Exactly one of `value_per_hour`, `deadline_s` and `budget` is given.

    Args:
        price: Of a worker for an hour.
        value_per_hour: What an hour earlier is worth.
        deadline_s: Duration of the run in which it should end.
        budget: What the run may cost.
        retry_s: After this time without a change a measured size may be chosen again in any case.
        max_global_batch_size: The largest batch of all workers together, in samples; None: it grows with them.

    >>> from ef_common.core.throughput import SpeedHistory, Measure
    >>> history = SpeedHistory().with_measure(Measure(1, 100.0, 0.0, 10.0, 10.0))
    >>> situation = Situation(size=1, least=1, most=4, now=11.0, history=history, remaining_samples=360_000.0)
    >>> print(Cost(price=2.0, value_per_hour=10.0).decide(situation).reason)
    3 nodes (an estimate) end in 22 min for 2.16, 1 node in 60 min for 2: with 10 per hour, 5.76 against 12
    """

    price: float = 1.0
    value_per_hour: float | None = None
    deadline_s: float | None = None
    budget: float | None = None
    retry_s: float = 3600.0
    max_global_batch_size: int | None = None

    @property
    def needs_end(self) -> bool:
        """Whether it can decide nothing where nobody knows how much is left to do."""
        return self.value_per_hour is None

    def decide(self, situation: Situation) -> Target | None:
        """The size to ask for."""
        early = first(situation)
        if early is not None:
            return early if isinstance(early, Target) else None
        if situation.remaining_samples is None and self.needs_end:
            return None
        stay = stay_of(situation, self.retry_s)
        curve = Curve(curve_of(situation, stay))
        plans = {size: self._plan(situation, curve, size) for size in _reachable(situation, curve)}
        present = plans[situation.size]
        candidates = sorted(
            (plan for plan in plans.values() if self._may_choose(plan, present, curve, stay, situation)),
            key=lambda plan: plan.rank,
        )
        if not candidates:
            return None
        return Target(candidates[0].size, self._reason(candidates[0], present, curve))

    def _may_choose(
        self, plan: CostPlan, present: CostPlan, curve: Curve, stay: SizeStay, situation: Situation
    ) -> bool:
        if plan.size == present.size:
            return False
        if plan.size not in curve.measured:
            return plan.beats(present, _BETTER) and self._pays(plan, present, situation)
        rest_s = max(_LEAST_REST_S, min(self.retry_s, _REST * present.seconds))
        had_rest = situation.now - stay.since >= rest_s or present.misses > 1
        return (stay.is_trial or had_rest) and plan.beats(present, 0.0 if stay.is_trial else 2 * _BETTER)

    def _pays(self, plan: CostPlan, present: CostPlan, situation: Situation) -> bool:
        """Whether there is enough left to do after the trial and perhaps a return."""
        measure = situation.history.of(situation.size)
        trial_s = 2 * situation.history.change_s + (0.0 if measure is None else measure.seconds)
        return situation.remaining_samples is None or present.misses > 1 or present.seconds > 5 * trial_s

    def _plan(self, situation: Situation, curve: Curve, size: int) -> CostPlan:
        samples = self._samples(situation, size)
        pause_s = situation.history.change_s if size != situation.size and samples is not None else 0.0
        seconds = (_HOUR_S * curve.at(situation.size) if samples is None else samples) / curve.at(size) + pause_s
        workers = size * situation.workers_per_node
        money = self.price * workers * seconds / _HOUR_S
        if self.value_per_hour is not None:
            return CostPlan(size, seconds, money, 0.0, money + self.value_per_hour * seconds / _HOUR_S)
        kept = 1.0 if size == situation.size else 1.0 - _RESERVE
        if self.deadline_s is not None:
            misses = _share(seconds, kept * (self.deadline_s - situation.elapsed_s), 1.0)
            return CostPlan(size, seconds, money, misses, money)
        left = kept * ((self.budget or 0.0) - self.price * situation.worker_s / _HOUR_S)
        misses = _share(money, left, (self.budget or 0.0) * 1e-6)
        return CostPlan(size, seconds, money, misses, seconds * (1 + _THRIFT * min(1.0, misses)))

    def _samples(self, situation: Situation, size: int) -> float | None:
        """Samples to the end with a size."""
        samples = situation.remaining_samples
        if samples is None or not situation.counts_steps:
            return samples
        return samples * self._batch(situation, size) / self._batch(situation, situation.size)

    def _batch(self, situation: Situation, size: int) -> int:
        """Samples of an update of all workers with a size."""
        batch = size * situation.workers_per_node * situation.local_batch
        return batch if self.max_global_batch_size is None else min(batch, self.max_global_batch_size)

    def _reason(self, plan: CostPlan, present: CostPlan, curve: Curve) -> str:
        new, old = (f"in {one.seconds / 60:.0f} min for {one.money:.4g}" for one in (plan, present))
        is_guess = "" if plan.size in curve.measured else " (an estimate)"
        ends = "ends" if plan.size == 1 else "end"
        text = f"{nodes(plan.size)}{is_guess} {ends} {new}, {nodes(present.size)} {old}: "
        if self.value_per_hour is not None:
            return text + f"with {self.value_per_hour:g} per hour, {plan.score:.4g} against {present.score:.4g}"
        what = f"the deadline of {(self.deadline_s or 0) / 60:.0f} min" if self.budget is None else f"{self.budget:g}"
        goal = "the cheapest" if self.budget is None else "the fastest"
        verdict = "nothing keeps it, and this comes nearest" if plan.misses > 1 else f"{goal} that keeps it"
        return text + f"with {what} in all, {verdict}"


def _share(needed: float, left: float, least: float) -> float:
    """How much of what is left would be needed, where less than the least counts as that."""
    return needed / max(left, least)


def _reachable(situation: Situation, curve: Curve) -> Iterable[int]:
    """Sizes within the limits that are not far from a measured one."""
    low, high = min(curve.measured) / _REACH, max(curve.measured) * _REACH
    return (size for size in range(situation.least, situation.most + 1) if low <= size <= high)
