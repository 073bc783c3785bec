"""The order that an object keeps things in can be taken over by another one that holds the same."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ef_common.data.orders import orders_of, put_in_order


def data_set(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        indices=np.arange(50), paths=[f"{n}.png" for n in range(50)], labels=[n % 3 for n in range(50)], **more
    )


@pytest.mark.parametrize("seed", range(5))
def test_order_of_one_object_makes_another_one_equal(seed: int) -> None:
    dice, first, other = random.Random(seed), data_set(), data_set()
    for owner in (first, other):
        for value in (owner.indices, owner.paths, owner.labels):
            dice.shuffle(value)
    assert vars(first)["paths"] != other.paths
    put_in_order(other, orders_of(first))
    assert np.array_equal(other.indices, first.indices)
    assert other.paths == first.paths
    assert other.labels == first.labels


def test_arrays_are_changed_in_place_as_others_may_hold_them() -> None:
    first, other = data_set(), data_set()
    first.indices[:] = first.indices[::-1].copy()
    held = other.indices
    put_in_order(other, orders_of(first))
    assert np.array_equal(held, first.indices)


def test_attributes_that_hold_something_else_are_left_alone() -> None:
    first, other = data_set(own=[1, 2, 3]), data_set(own=[1, 2, 4])
    first.own.reverse()
    put_in_order(other, orders_of(first))
    assert other.own == [1, 2, 4]


def test_only_rows_of_plain_values_have_an_order() -> None:
    fixed = np.arange(4)
    fixed.flags.writeable = False
    owner = data_set(
        tokens=np.zeros((1 << 22) + 1, "int8"),
        images=np.zeros((5, 2)),
        huge=[2**70, 1],
        fixed=fixed,
        mixed=[1, "a"],
        parts=[[1], [2]],
        one=[1],
        size=7,
        name="abc",
        rest=None,
    )
    assert set(orders_of(owner)) == {"indices", "paths", "labels"}
