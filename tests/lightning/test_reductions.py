"""Values of workers as one value."""

from __future__ import annotations

import math

import pytest
import torch

from ef_lightning.reductions import WorkerPart, combine


def parts(*values: tuple[float, float]) -> list[WorkerPart]:
    return [WorkerPart(torch.tensor(value), weight) for value, weight in values]


@pytest.mark.parametrize(
    ("reduction", "expected"), [("mean", 2.0), ("sum", 6.0), ("min", 1.0), ("max", 5.0), ("first", 1.0)]
)
def test_values_are_reduced_as_they_are_logged(reduction: str, expected: float) -> None:
    assert combine(reduction, parts((1.0, 3.0), (5.0, 1.0))).item() == expected


def test_mean_leaves_out_what_weighs_nothing_whatever_it_is() -> None:
    assert combine("mean", parts((math.nan, 0.0), (5.0, 1.0))).item() == 5.0
    assert combine("mean", parts((1.0, 0.0), (5.0, 0.0))).item() == 3.0


def test_mean_of_equal_values_is_that_value_bit_for_bit() -> None:
    value = torch.tensor(0.1)
    mean = combine(
        "mean", [WorkerPart(value, 1 / 3), WorkerPart(value.clone(), 1 / 3), WorkerPart(value.clone(), 1 / 3)]
    )
    assert torch.equal(mean, value)
    assert combine("mean", [WorkerPart(torch.tensor(7)), WorkerPart(torch.tensor(7))]).dtype == torch.int64


def test_mean_of_single_precision_is_made_in_double_precision() -> None:
    large, small = torch.tensor(float(2**24)), torch.tensor(1.0)
    assert combine("mean", [WorkerPart(large), WorkerPart(small), WorkerPart(small)]).item() == pytest.approx(
        (2**24 + 2) / 3, rel=1e-7
    )
    assert combine("sum", [WorkerPart(large), WorkerPart(small), WorkerPart(small)]).item() == 2**24 + 2


def test_not_a_number_is_not_hidden() -> None:
    for reduction in ("mean", "sum", "min", "max"):
        assert math.isnan(combine(reduction, parts((1.0, 1.0), (math.nan, 1.0))).item())


def test_values_of_another_shape_than_the_first_are_left_out() -> None:
    assert combine("mean", [WorkerPart(torch.tensor([1.0, 2.0])), WorkerPart(torch.tensor(5.0))]).tolist() == [1.0, 2.0]
