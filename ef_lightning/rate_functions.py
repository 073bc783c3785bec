"""Functions of the user's that give learning rates (`LambdaLR`, `MultiplicativeLR`), which no state has in it.

A newcomer has its own, which `configure_optimizers` has made in a world of another size. If they gave it other rates
than the others have, its weights would drift away from theirs without an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType
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
        found += getattr(scheduler, "lr_lambdas", None) or ()
        found += functions_of(getattr(scheduler, "_schedulers", None) or ())
    return found


def factors_of(schedulers: Iterable[Any]) -> Factors:
    """What the functions give now. Those that may change something when they are called are not."""
    known: dict[int, list[float | None]] = {}  # one function may be that of all groups
    found: Factors = []
    for function in functions_of(schedulers):
        if id(function) not in known:
            is_pure = _is_plain(function, set())
            known[id(function)] = [_factor(function, step) if is_pure else None for step in _STEPS]
        found.append(known[id(function)])
    return found


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


def _is_plain(value: Any, seen: set[int]) -> bool:
    """Whether this is a number, a text, a collection of such, or a function that has nothing else of its own.

    An object or an iterator may count how often it is called.
    """
    if value is None or isinstance(value, (bool, int, float, str)) or id(value) in seen:
        return True
    seen.add(id(value))
    if isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        parts = [cell.cell_contents for cell in value.__closure__ or ()]
        parts += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif type(value) in (list, tuple):
        parts = list(value)
    elif type(value) is dict:
        parts = list(value.values())
    else:
        return False
    return all(_is_plain(part, seen) for part in parts)


def _factor(function: Callable[[int], Any], step: int) -> float | None:
    try:
        factor = float(function(step))
    except Exception:  # a table that ends before, for instance
        return None
    return factor if math.isfinite(factor) else None
