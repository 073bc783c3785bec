"""Functions of the user's that give learning rates (`LambdaLR`, `MultiplicativeLR`), which no state has in it.

A newcomer has its own, which `configure_optimizers` has made in a world of another size. If they gave it other rates
than the others have, its weights would drift away from theirs without an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from ef_common.errors import ElasticFlowError

Factors = list[list[float | None]]
"""What each function gives for some 50 steps; None where it gives no number."""

_STEPS = (0, *sorted({int(1.25**power) for power in range(62)}))  # up to a million
_RELATIVE_TOLERANCE, _TOLERANCE = 1e-6, 1e-12  # another machine's cosine


def functions_of(schedulers: Iterable[Any]) -> list[Callable[[int], Any]]:
    """All of these functions, of schedulers and of those that they are made of."""
    found: list[Callable[[int], Any]] = []
    for scheduler in schedulers:
        found += getattr(scheduler, "lr_lambdas", ())
        found += functions_of(getattr(scheduler, "_schedulers", ()))
    return found


def factors_of(schedulers: Iterable[Any]) -> Factors:
    """What the functions give now."""
    return [[_factor(function, step) for step in _STEPS] for function in functions_of(schedulers)]


def unchanged(before: Factors, now: Factors) -> Factors:
    """The same, without what a function gave when something else was so: it reads `num_training_batches`, say."""
    return [
        [factor if factor == earlier else None for earlier, factor in zip(*pair, strict=True)]
        for pair in zip(before, now, strict=False)
    ]


def check_factors(own: Factors, expected: Factors) -> None:
    """Compare with what the others' functions give.

    Raises:
        ElasticFlowError: This worker's rates would differ from theirs.
    """
    for given, others in zip(own, expected, strict=False):
        for step, factor, wanted in zip(_STEPS, given, others, strict=False):
            if factor is None or wanted is None or _are_close(factor, wanted):
                continue
            raise ElasticFlowError(
                "the function of a schedule (LambdaLR, say) gives other learning rates in this worker than in the "
                "others. If it depends on the number of workers, read that in configure_optimizers, from "
                "trainer.world_size or trainer.estimated_stepping_batches, which a newcomer sees as the others saw "
                f"them. Expected factor in step {step}: {wanted}. Received: {factor}"
            )


def _are_close(factor: float, wanted: float) -> bool:
    return math.isclose(factor, wanted, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_TOLERANCE)


def _factor(function: Callable[[int], Any], step: int) -> float | None:
    try:
        factor = float(function(step))
    except Exception:  # a table that ends before, for instance
        return None
    return factor if math.isfinite(factor) else None
