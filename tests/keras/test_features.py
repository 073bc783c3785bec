"""Every feature of `fit` gives what plain Keras gives with the batches of all workers together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ef_common.report.timeline import Timeline
from ef_common.testing.harness import Job
from tests import warm
from tests.jax_installed import needs_jax

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1230)]

WEIGHTS = 2e-5
TOLERANCES = {"mixed_precision": 5e-3}


def train_tensorflow(names: list[str] | None) -> dict[str, Any]:
    from tests.keras.on_tensorflow import train_all

    return train_all(names)


def train_torch(names: list[str] | None) -> dict[str, Any]:
    from tests.keras.on_torch import train_all

    return train_all(names)


def train_jax(names: list[str] | None) -> dict[str, Any]:
    from tests.keras.on_jax import train_all

    return train_all(names)


OF_JAX = [
    [
        "arrays_with_validation",
        "custom_train_step",
        "custom_train_step_that_changes_gradients",
        "custom_train_step_that_averages_weights",
        "run_eagerly",
        "steps_per_execution",
        "no_trainable_weights",
        "no_trainable_weights_at_all_and_adam",
        "no_trainable_weights_and_several_steps_at_a_time",
        "evaluation_of_several_steps_at_a_time",
    ],
    [
        "mixed_precision",
        "gradient_accumulation",
        "learning_rate_schedule",
        "rates_that_differ_between_workers",
        "early_stopping",
        "stop_of_one_worker_in_mid_epoch",
        "stop_of_one_worker_before_a_step",
        "global_batch_of_a_py_dataset",
        "global_batch_with_a_scaled_loss",
    ],
]
"""What goes through a step that is cut, in two parts of about the same time."""
SOME = {
    "tensorflow": [
        "xla",
        "rates_that_differ_between_workers",
        "rates_that_differ_between_workers_and_xla",
        "logs_on_disk",
        "gradient_accumulation",
        "autoencoder_without_a_call",
        "adversaries_without_a_call",
        "adversaries_without_a_call_that_run_eagerly",
        "global_batch_that_is_a_batch_of_a_stream",
        "no_trainable_weights",
        "no_trainable_weights_and_several_steps_at_a_time",
        "evaluation_of_several_steps_at_a_time",
        "custom_train_step_that_changes_gradients",
    ],
    "torch": [
        "class_weight",
        "sample_weight",
        "validation_split",
        "steps_per_epoch",
        "py_dataset",
        "stream_of_batches",
        "custom_train_step",
        "custom_train_step_that_changes_gradients",
        "custom_train_step_that_changes_gradients_in_place",
        "custom_train_step_that_asks_for_gradients",
        "samples_read_one_by_one_with_class_weight",
        "inputs_alone_read_one_by_one",
        "stop_of_one_worker_before_a_step",
        "rates_that_differ_between_workers",
        "rates_that_differ_between_workers_and_a_global_batch",
        "list_of_callbacks_made_by_hand",
        "several_outputs",
        "run_eagerly",
        "mixed_precision",
        "global_batch_of_a_py_dataset",
    ],
}
"""What the README names, on the backend that is alone with it, or else on the one that takes less time to begin."""


def test_some_features_of_fit_give_what_plain_keras_gives(tmp_path: Path) -> None:
    for backend, names in SOME.items():
        outputs = check_features(tmp_path / backend, backend, names)
        assert not any("not compiled by XLA" in output for output in outputs)
        num_warnings = "".join(outputs).count(
            "learning rates that differ between the workers"
        )  # by the first one, once
        assert num_warnings == sum(name.startswith("rates_that_differ") for name in names)


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
@pytest.mark.thorough
def test_features_of_fit_give_what_plain_keras_gives(tmp_path: Path, backend: str) -> None:
    check_features(tmp_path, backend, None)


@needs_jax
@pytest.mark.parametrize("names", OF_JAX, ids=["steps", "updates"])
@pytest.mark.thorough
def test_features_that_jax_has_its_own_way_for_give_what_plain_keras_gives(tmp_path: Path, names: list[str]) -> None:
    check_features(tmp_path, "jax", names)


def test_data_of_unknown_length_give_what_plain_keras_gives(tmp_path: Path) -> None:
    check_features(tmp_path, "torch", ["stream_of_unknown_length", "generators_without_an_end"])


@pytest.mark.thorough
def test_report_of_a_stream_of_batches_counts_samples(tmp_path: Path) -> None:
    check_features(tmp_path, "tensorflow", ["stream_of_batches"])
    timeline = Timeline(tmp_path / "run")
    timeline.update()
    assert timeline.ledger.samples == 3 * 192


def check_features(tmp_path: Path, backend: str, names: list[str] | None) -> list[str]:
    """Train with these features, or with all. Returns what the workers have printed."""
    target = {"tensorflow": train_tensorflow, "torch": train_torch, "jax": train_jax}[backend]
    with Job(tmp_path / "run", preload=warm.KERAS[backend], guard_s=1200.0) as job:
        workers = job.start_world(2, target, names)
        first, second = (worker.result() for worker in workers)
        job.audit()
    assert first.keys() == second.keys() >= set(names or ())
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
    return [worker.output.read_text() for worker in workers]
