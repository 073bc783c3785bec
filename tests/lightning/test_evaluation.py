"""Validation, test and prediction: every sample once, and the same numbers in all workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.lightning import evaluation
from tests.lightning.conftest import HOSTS
from tests.lightning.evaluation import PREDICT_LENGTH, TEST_LENGTH, VAL_LENGTHS
from tests.lightning.training import BATCH_SIZE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.parametrize("host", HOSTS)
def test_evaluation_counts_every_sample_once(run: Callable[..., list[Any]], host: str) -> None:
    results = run(3, evaluation.run, host)
    first = results[0]
    for name in ("fit", "validate", "test", "test_by_another", "by_hand", "one_batch_each", "half"):
        assert all(result[name] == first[name] for result in results), name
    assert {result["rank"] for result in results} == {0, 1, 2}
    assert first["lengths"] == [math.ceil(length / (3 * BATCH_SIZE)) for length in VAL_LENGTHS]
    for index, length in enumerate(VAL_LENGTHS):
        for metrics in (first["fit"], first["validate"][index]):
            check_validation(metrics, f"/dataloader_idx_{index}", length)
    for metrics in (*first["test"], *first["test_by_another"]):
        check_test(metrics, TEST_LENGTH)
    assert sorted(index for result in results for index in result["collected"]) == list(range(TEST_LENGTH))
    assert [result["after_batches"] for result in results] == [sum(range(TEST_LENGTH))] * 3
    assert first["by_hand"] == [[float(i) for i in range(n)] for n in (TEST_LENGTH, TEST_LENGTH, 3, 15)]
    assert first["one_batch_each"]["count"] == 3.0
    assert first["half"]["count"] == 15.0


def check_validation(metrics: dict[str, float], suffix: str, length: int) -> None:
    mean = (length - 1) / 2
    assert math.isclose(metrics[f"on_step_epoch{suffix}"], mean, rel_tol=1e-6)
    assert math.isclose(metrics[f"given{suffix}"], mean, rel_tol=1e-6)
    assert metrics[f"total{suffix}"] == length * mean
    assert metrics[f"least{suffix}"] == 0.0
    assert metrics[f"largest{suffix}"] == length - 1
    assert (f"sometimes{suffix}" in metrics) == (length > 3 * 4)


def check_test(metrics: dict[str, float], length: int) -> None:
    assert math.isclose(metrics["mean"], (length - 1) / 2, rel_tol=1e-6)
    assert metrics["sum"] == length * (length - 1) / 2
    assert metrics["max"] == length - 1
    assert metrics["count"] == length


@pytest.mark.parametrize("host", HOSTS[:1])
def test_prediction_predicts_every_sample_once_and_tells_which(run: Callable[..., list[Any]], host: str) -> None:
    results = run(3, evaluation.run, host)
    everything = list(range(PREDICT_LENGTH))
    for name in ("predicted", "predicted_by_another"):
        assert sorted(index for result in results for index in result[name]) == everything
    for result in results:
        assert result["nothing_returned"] is None
        assert all(predicted == indices for predicted, indices in result["written"])
        assert all(predicted == indices for predicted, indices in result["written_at_the_end"])
    written = [i for result in results for _, indices in result["written"] for i in indices]
    assert sorted(written) == sorted(everything * 2)
    at_the_end = [i for result in results for _, indices in result["written_at_the_end"] for i in indices]
    assert sorted(at_the_end) == everything
