from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ef_common.core.lineage import CheckpointId
from ef_common.core.retention import Retention, StoredFiles, removable
from ef_common.errors import UsageError


def id_(step: int, run: int = 1) -> CheckpointId:
    return CheckpointId(run, 1, step)


def kept(retention: Retention, losses: dict[int, float | None], **metrics: Any) -> set[int]:
    """Steps that stay, of a run that has these losses at its steps."""
    stored = [StoredFiles(id_(step), True, {"loss": loss}) for step, loss in losses.items()]
    chain = sorted((one.id for one in stored), reverse=True)
    gone = removable(stored, retention, chain=chain, valid=chain[:1], run=1)
    return set(losses) - {id.step for id in gone}


STEPS = dict.fromkeys(range(100, 1100, 100))


@pytest.mark.parametrize(
    ("retention", "losses", "expected"),
    [
        (Retention(), STEPS, {800, 900, 1000}),
        (Retention(keep_last=1), STEPS, {1000}),
        (Retention(keep_last=1, keep_every=300), STEPS, {300, 600, 900, 1000}),
        (Retention(keep_last=1, keep_every=250), STEPS, {200, 500, 700, 1000}),
        (Retention(keep_last=20), STEPS, set(STEPS)),
        (Retention(keep_last=1, keep_best=2, monitor="loss"), {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0}, {2, 3, 4}),
        (Retention(keep_last=1, keep_best=1, monitor="loss", mode="max"), {1: 3.0, 2: 1.0, 3: 2.0}, {1, 3}),
        (Retention(keep_last=1, keep_best=1, monitor="loss"), {1: 1.0, 2: 1.0, 3: 2.0}, {2, 3}),
        (Retention(keep_last=1, keep_best=1, monitor="loss"), {1: math.nan, 2: None, 3: 5.0, 4: 9.0}, {3, 4}),
        (Retention(keep_last=1, keep_best=1, monitor="accuracy"), {1: 1.0, 2: 2.0}, {2}),
    ],
)
def test_removable_keeps(retention: Retention, losses: dict[int, float | None], expected: set[int]) -> None:
    assert kept(retention, losses) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        {"keep_last": 0},
        {"keep_every": 0},
        {"keep_best": -1},
        {"keep_best": 1},
        {"mode": "smallest"},
    ],
)
def test_retention_with_a_bad_value_raises(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="Received: "):
        Retention(**arguments)


def test_removable_without_a_valid_one_removes_nothing() -> None:
    stored = [StoredFiles(id_(step), True) for step in range(10)] + [StoredFiles(id_(0, run=0), False)]
    chain = [id_(step) for step in reversed(range(10))]
    assert removable(stored, Retention(keep_last=1), chain=chain, valid=[], run=1) == {}


def test_removable_newest_valid_is_kept_below_newer_ones_that_nobody_has_checked() -> None:
    stored = [StoredFiles(id_(step), True) for step in (1, 2, 3, 4)]
    chain = [id_(step) for step in (4, 3, 2, 1)]
    assert set(removable(stored, Retention(keep_last=1), chain=chain, valid=[id_(2)], run=1)) == {id_(1)}


def test_removable_leftovers_go_if_they_are_older_and_of_this_run_or_an_older_one() -> None:
    leftovers = [id_(5, run=1), id_(10, run=2), id_(30, run=2), id_(1, run=3)]
    stored = [StoredFiles(id, False) for id in leftovers] + [StoredFiles(id_(20, run=2), True)]
    gone = removable(stored, Retention(), chain=[id_(20, run=2)], valid=[id_(20, run=2)], run=2)
    assert list(gone) == [id_(5, run=1), id_(10, run=2)]
    assert all("left" in reason for reason in gone.values())


def test_removable_rolled_back_goes_when_a_valid_one_follows() -> None:
    stored = [StoredFiles(id_(10), True), StoredFiles(id_(20), True), StoredFiles(id_(12, run=2), True)]
    before = removable(stored[:2], Retention(), chain=[id_(10)], valid=[id_(10)], run=2)
    after = removable(stored, Retention(), chain=[id_(12, run=2), id_(10)], valid=[id_(12, run=2)], run=2)
    assert before == {}
    assert set(after) == {id_(20)}


def test_removable_of_a_newer_version_or_run_is_not_touched() -> None:
    stored = [
        StoredFiles(id_(1), False, foreign=True),
        StoredFiles(id_(2), True),
        StoredFiles(id_(3), True),
        StoredFiles(id_(1, 2), False),
    ]
    assert removable(stored, Retention(keep_last=1), chain=[id_(3), id_(2)], valid=[id_(3)], run=1) == {
        id_(2): "no longer kept"
    }


many = st.lists(
    st.builds(
        StoredFiles,
        st.builds(CheckpointId, st.integers(1, 3), st.integers(1, 2), st.integers(1, 30)),
        st.booleans(),
        st.fixed_dictionaries({"loss": st.none() | st.floats(allow_nan=True)}),
        st.booleans(),
    ),
    unique_by=lambda one: one.id,
)


@given(
    many,
    st.builds(
        Retention,
        st.integers(1, 4),
        st.none() | st.integers(1, 10),
        st.integers(0, 2),
        st.just("loss"),
        st.sampled_from(["min", "max"]),
    ),
    st.integers(1, 3),
    st.data(),
)
def test_removable_of_anything_keeps_the_newest_valid_and_repeats_nothing(
    stored: list[StoredFiles], retention: Retention, run: int, data: st.DataObject
) -> None:
    complete = sorted((one.id for one in stored if one.complete), reverse=True)
    chain = [id for id in complete if data.draw(st.booleans())]
    valid = {id for id in chain if data.draw(st.booleans())}
    gone = removable(stored, retention, chain=chain, valid=valid, run=run)
    if not valid:
        assert gone == {}
        return
    newest = max(valid)
    assert all(id < newest and id.run <= run for id in gone)
    left = [one for one in stored if one.id not in gone]
    assert removable(left, retention, chain=[id for id in chain if id not in gone], valid=valid, run=run) == {}
