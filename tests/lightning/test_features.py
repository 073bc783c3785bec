"""Features that only a world of several workers has, or that concern who does what in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.lightning import features
from tests.lightning.conftest import HOSTS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def host() -> str:
    return HOSTS[0]


def test_features_of_a_world_of_two(run: Callable[..., list[Any]], host: str) -> None:
    first, second = run(2, features.run, host, audit=False)
    assert {name for name in features.FEATURES if first[name] != second[name]} == set()
    assert first["skipped_by_one"][0] == 8
    assert first["unused_by_one"][0] is True
    assert all(finite for finite, _ in first["mixed_precision"])
    assert first["mixed_precision"][0] == first["mixed_precision"][1]  # on a CPU, Lightning takes one for the other
    assert first["talking"] == {
        "gathered": [[0.0, 1.0], [1.0, 1.0]],
        "of_a_tree": [[0.0, 1.0], [1.0, 1.0]],
        "broadcast": 1,
        "mean": [0.5, 1.0],
        "sum": [1.0, 2.0],
        "max": [1.0, 1.0],
        "all": False,
        "any": True,
        "world": 2,
        "zero": True,
    }
    assert [steps for steps, _ in first["data_module"]] == [8, 8]
    assert first["own_sampler"][0] == 2 * 32
    for name, (of_each, of_the_first) in first["rates_that_each_worker_sets"].items():
        assert of_each == of_the_first, name
        expected = [0.02, 0.01, 0.02, 0.03, 0.01, 0.01, 0.02, 0.03]  # set after the batch before
        assert of_each[0] == pytest.approx(expected), name
    assert first["validation_schedules"] == {  # the sanity check is the first 0
        "fraction": [0, 2, 4, 6, 8],
        "number": [0, 3, 7],
        "across_epochs": [0, 5],
        "every_second_epoch": [0, 8, 16],
        "not_checked_before": [4, 8],
        "reloaded": [0, 4, 8],
        "limited": [0, 4, 8],
        "off": [],
    }
    each = list(range(1, 9))
    assert first["validation_by_the_clock"] == {
        "always": each,
        "never": [],
        "accumulating": [1, 2, 3, 4],
        "every_second_epoch": each[4:],
        "global_batch": each,
        "deterministic": each,
    }


def test_step_without_backward_in_one_worker_only_is_told_to_all(run: Callable[..., list[Any]], host: str) -> None:
    for message in run(2, features.skip_by_hand, host, audit=False):
        assert "1 of 2 workers without" in message
