"""Functions of schedules, which a newcomer has of its own, are those of the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ef_common.errors import ElasticFlowError
from ef_lightning.rate_functions import check_factors, factors_of, functions_of, unchanged

Make = Callable[[Any, Callable[[int], float]], Any]

SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lr_scheduler.LambdaLR,
    "MultiplicativeLR": lr_scheduler.MultiplicativeLR,
    "SequentialLR": lambda o, f: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.LambdaLR(o, f)], [4]
    ),
    "ChainedScheduler": lambda o, f: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.LambdaLR(o, f)]
    ),
}


def decaying(total: int) -> Callable[[int], float]:
    """A warm-up that does not depend on the length of the training, and a decay that does."""
    return lambda step: min(1.0, (step + 1) / 8) * max(0.0, 1.0 - step / total)


def scheduler_of(make: Make, function: Callable[[int], float]) -> Any:
    return make(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1), function)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_function_for_another_number_of_workers_is_told_from_the_same(name: str) -> None:
    first, same, other = (scheduler_of(SCHEDULERS[name], decaying(total)) for total in (1000, 1000, 2000))
    assert len(functions_of([first])) == 1
    check_factors(factors_of([same]), factors_of([first]))
    with pytest.raises(ElasticFlowError, match=r"trainer\.world_size .* Expected factor in step 1: 0.24975. Received"):
        check_factors(factors_of([other]), factors_of([first]))


def test_schedule_without_functions_has_nothing_to_compare() -> None:
    scheduler = lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1), 3)
    assert functions_of([scheduler]) == []
    check_factors(factors_of([scheduler]), [])


def test_function_that_is_no_number_everywhere_is_compared_where_it_is_one() -> None:
    table = [0.5, 0.25]
    short = scheduler_of(lr_scheduler.LambdaLR, lambda step: table[step])
    [factors] = factors_of([short])
    assert factors[:2] == table
    assert set(factors[2:]) == {None}
    check_factors([factors], factors_of([short]))
    other = scheduler_of(lr_scheduler.LambdaLR, lambda step: [0.5, 0.2][step])
    with pytest.raises(ElasticFlowError, match=r"step 1: 0.25. Received: 0.2$"):
        check_factors(factors_of([other]), [factors])


class Counting:
    """Gives another number each time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1.0 / self.calls


def test_function_that_a_call_may_change_is_not_called() -> None:
    counting, rates = Counting(), iter([0.5, 0.25, 0.125])
    for function in (counting, partial(counting), lambda step: counting(step), lambda step: next(rates)):
        scheduler = scheduler_of(lr_scheduler.LambdaLR, function)
        calls = counting.calls
        [factors] = factors_of([scheduler])
        assert set(factors) == {None}
        assert counting.calls == calls
    assert next(rates) == 0.25  # the scheduler has taken the first one when it was made


def test_function_with_arguments_is_compared() -> None:
    def decay(step: int, *, total: int, floors: tuple[float, ...] = (0.0, 0.1)) -> float:
        return max(floors[0], 1.0 - step / total)

    first, other = (scheduler_of(lr_scheduler.LambdaLR, partial(decay, total=total)) for total in (1000, 2000))
    with pytest.raises(ElasticFlowError, match="step 1"):
        check_factors(factors_of([other]), factors_of([first]))


def test_function_of_more_than_the_step_is_not_compared() -> None:
    num_batches = [10]
    scheduler = scheduler_of(lr_scheduler.LambdaLR, lambda step: min(1.0, step / num_batches[0]))
    before = factors_of([scheduler])
    assert unchanged(before, factors_of([scheduler])) == before
    num_batches[0] = 5
    [left] = unchanged(before, factors_of([scheduler]))
    assert left[1] is None
    assert left[-1] == 1.0
