"""Throughput by size: measured where it was, and from a simple model elsewhere.

Two models describe what training jobs do:

* *smooth*: k / R_k = c + a·(k/k₀ − 1) + b·(1 − k₀/k), the time of a node for a sample, where k₀ is the smallest
  measured size. The term with a grows with the nodes: work that is not parallel (Amdahl), or latencies. The term with b
  is the bandwidth of a ring all-reduce, which hardly grows beyond a few nodes. Without much knowledge both are near 3 %
  of c. The coefficients are not negative, and are found by least squares of the relative errors, which are linear in
  them.
* *kink*: R_k = min(r·k, C). A shared resource (storage, network, a token bucket) gives no more than C.

The one that fits better is used. Between two measured sizes any concave curve
lies below the kink through them; outside of them, a kink is believed only if two measures show the plateau.
What a model says is shifted so that it agrees with the nearest measured size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import mul
from typing import NamedTuple

_Points = Sequence[tuple[int, float]]
_Row = tuple[Sequence[float], float]  # weighted features, and what they should add up to
_USUAL_TERM = 0.03
_LEAST_TIME = 1e-9  # relative to that of the smallest size
_TRUST = {1: 0.03, 2: 0.01}  # in the usual terms: their squares are small against the errors that wrong ones make


class _Model(NamedTuple):
    error: float
    throughput: Callable[[float], float]


class Curve:
    """The throughput of each size.

    Args:
        measured: Throughputs by size, at least one.

    >>> capped = Curve({1: 100.0, 3: 300.0, 6: 400.0})
    >>> [round(capped.at(size)) for size in (1, 2, 3, 4, 5, 6)]
    [100, 200, 300, 400, 400, 400]
    >>> [round(Curve({1: 100.0, 2: 182.0, 4: 308.0}).at(size)) for size in (3, 8)]
    [250, 471]
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        self.measured = dict(sorted(measured.items()))
        points = list(self.measured.items())
        self._low, self._top = points[0][0], points[-1][0]
        smooth = _smooth(points)
        self._within = min(_kink(points, plateau=1) or smooth, smooth, key=lambda model: model.error)
        self._outside = min(_kink(points, plateau=2) or smooth, smooth, key=lambda model: model.error)

    def at(self, size: int) -> float:
        """Samples per second of this many nodes. Takes O(measured sizes)."""
        if size in self.measured:
            return self.measured[size]
        model = (self._within if self._low < size < self._top else self._outside).throughput
        near = min(self.measured, key=lambda known: abs(math.log(known / size)))
        return model(size) * self.measured[near] / model(near)

    def gain(self, small: int, large: int) -> float:
        """What a node more adds, as a share of what one of the present nodes gives: s = (ΔR/Δk) / (R_k/k).

        Or, Zhang and Freedman, *Resource Elasticity in Distributed Deep Learning* (2020), section 4.2.
        """
        return (self.at(large) / self.at(small) - 1) * small / (large - small)


def _smooth(points: _Points) -> _Model:
    first, unit = points[0][0], points[0][0] / points[0][1]

    def features(size: float) -> tuple[float, ...]:
        return 1.0, size / first - 1, 1 - first / size

    rows: list[_Row] = []
    for size, throughput in points:
        time = size / throughput / unit
        rows.append(([feature / time for feature in features(size)], 1.0))
    for index, trust in _TRUST.items():
        rows.append(([trust * (index == one) for one in range(3)], trust * _USUAL_TERM))
    fits = [_least_squares(rows, free) for free in ((0, 1, 2), (0, 1), (0, 2), (0,))]
    best = min((fit for fit in fits if min(fit) >= 0), key=lambda fit: _error(rows, fit))
    return _Model(_error(rows, best), lambda size: size / (unit * max(_product(best, features(size)), _LEAST_TIME)))


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(map(mul, one, other))


def _error(rows: Sequence[_Row], fit: Sequence[float]) -> float:
    return sum((_product(row, fit) - wanted) ** 2 for row, wanted in rows)


def _least_squares(rows: Sequence[_Row], free: Sequence[int]) -> list[float]:
    """The three coefficients, where those that are not free are 0 (normal equations, elimination); or negative ones."""
    lines = [
        [*(sum(row[one] * row[other] for row, _ in rows) for other in free), sum(row[one] * goal for row, goal in rows)]
        for one in free
    ]
    for pivot, pivot_line in enumerate(lines):
        if pivot_line[pivot] <= 0:  # the matrix is positive definite, but for rounding errors
            return [-math.inf] * 3
        for index, line in enumerate(lines):
            if index != pivot:
                factor = line[pivot] / pivot_line[pivot]
                line[:] = [value - factor * other for value, other in zip(line, pivot_line, strict=True)]
    fit = [0.0, 0.0, 0.0]
    for pivot, (index, line) in enumerate(zip(free, lines, strict=True)):
        fit[index] = line[-1] / line[pivot]
    return fit


def _kink(points: _Points, *, plateau: int) -> _Model | None:
    """The best kink with at least so many measured sizes on its plateau, and one below."""
    best: _Model | None = None
    for split in range(1, len(points) - plateau + 1):
        slopes = [math.log(throughput / size) for size, throughput in points[:split]]
        tops = [math.log(throughput) for _, throughput in points[split:]]
        slope, top = sum(slopes) / len(slopes), sum(tops) / len(tops)
        error = sum((one - slope) ** 2 for one in slopes) + sum((one - top) ** 2 for one in tops)
        bends_there = points[split - 1][0] * 0.99 <= math.exp(top - slope) <= points[split][0] * 1.01
        if bends_there and (best is None or error < best.error):
            best = _Model(error, _bent(slope, top))
    return best


def _bent(slope: float, top: float) -> Callable[[float], float]:
    return lambda size: math.exp(min(slope + math.log(size), top))
