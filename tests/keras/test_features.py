"""Every feature of `fit` gives what plain Keras gives with the batches of all workers together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import Job
from tests import warm

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

WEIGHTS = 2e-5
TOLERANCES = {"mixed_precision": 5e-3}


def train_tensorflow(names: list[str] | None) -> dict[str, Any]:
    from tests.keras.on_tensorflow import train_all

    return train_all(names)


def train_torch(names: list[str] | None) -> dict[str, Any]:
    from tests.keras.on_torch import train_all

    return train_all(names)


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
@pytest.mark.thorough
def test_features_of_fit_give_what_plain_keras_gives(tmp_path: Path, backend: str) -> None:
    compare(tmp_path, backend, None)


def test_data_of_unknown_length_give_what_plain_keras_gives(tmp_path: Path) -> None:
    compare(tmp_path, "torch", ["stream_of_unknown_length", "generators_without_an_end"])


def compare(tmp_path: Path, backend: str, names: list[str] | None) -> None:
    target = {"tensorflow": train_tensorflow, "torch": train_torch}[backend]
    with Job(tmp_path / "run", preload=warm.KERAS[backend], guard_s=270.0) as job:
        workers = job.start_world(2, target, names)
        first, second = (worker.result() for worker in workers)
    _check(first, second)


UNTRAINED = [
    "no_trainable_weights",
    "no_trainable_weights_at_all_and_adam",
    "no_trainable_weights_and_several_steps_at_a_time",
    "no_trainable_weights_and_a_stop_of_one_worker",
    "no_trainable_weights_and_a_global_batch",
    "evaluation_of_several_steps_at_a_time",
]


def test_model_without_trainable_weights_and_evaluation_in_several_steps_are_those_of_plain_keras(
    tmp_path: Path,
) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["tensorflow"]) as job:
        workers = job.start_world(2, train_tensorflow, UNTRAINED)
        _check(*(worker.result() for worker in workers))
        job.audit()


def _check(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    problems = []
    for name, found in first.items():
        tolerance = TOLERANCES.get(name, WEIGHTS)
        if found["sum"] != second[name]["sum"]:
            problems.append(f"{name}: the workers' weights differ")
        if not found["weights"] <= tolerance:
            problems.append(f"{name}: weights are off by {found['weights']}")
        for key, difference in found["history"].items():
            if not difference <= 10 * tolerance:
                problems.append(f"{name}: {key} is off by {difference}")
    assert not problems, "\n".join(problems)
