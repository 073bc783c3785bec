"""Throughput by size: measured where it was, and from a simple model elsewhere.

Two models, each with two parameters, describe what training jobs do:

* *Amdahl*: R_k = r·k / (1 + α·(k/k₀ − 1)), where k₀ is the smallest measured size. A share α of the work does not
  become faster with more nodes. Without much knowledge, α is near 0.05.
* *kink*: R_k = min(r·k, C). A shared resource (storage, network, a token bucket) gives no more than C.

Both are fitted to the logarithms, and the one that fits better is used. Between two measured sizes any concave curve
lies below the kink through them; outside of them, a kink is believed only if two measures show the plateau.
What a model says is shifted so that it agrees with the nearest measured size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

_Points = Sequence[tuple[int, float]]
_USUAL_SHARE = 0.05
_TRUST_IN_IT = 1e-3  # small against the squared error that a wrong share makes


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
        amdahl = _amdahl(points)
        self._within = min(_kink(points, plateau=1) or amdahl, amdahl, key=lambda model: model.error)
        self._outside = min(_kink(points, plateau=2) or amdahl, amdahl, key=lambda model: model.error)

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


def _amdahl(points: _Points) -> _Model:
    if len(points) == 1:
        return _with_share(points, _USUAL_SHARE)
    coarse = min((step / 20 for step in range(21)), key=lambda share: _with_share(points, share).error)
    near = (coarse + step / 200 for step in range(-10, 11))
    models = [_with_share(points, share) for share in near if 0 <= share <= 1]
    return min(models, key=lambda model: model.error)


def _with_share(points: _Points, share: float) -> _Model:
    first = points[0][0]

    def shape(size: float) -> float:
        return size / (1 + share * (size / first - 1))

    rests = [math.log(throughput / shape(size)) for size, throughput in points]
    mean = sum(rests) / len(rests)
    error = sum((rest - mean) ** 2 for rest in rests) + _TRUST_IN_IT * (share - _USUAL_SHARE) ** 2
    return _Model(error, lambda size: math.exp(mean) * shape(size))


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
