"""Keras's optimizers follow the global batch, and only the update sees it.

The closed forms are those that Lightning's trainings are held against: both frameworks give these weights.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ef_common.events import expand
from ef_common.testing.harness import Job
from tests import closed_forms, warm
from tests.jax_installed import ON_JAX
from tests.keras.launch import call_all, call_in

pytestmark = [pytest.mark.processes, pytest.mark.timeout(530)]

BACKENDS = ["tensorflow", "torch"]
BATCH_SIZE = 4
LENGTH = 203
RATE = 0.02
SCENARIOS = [
    "follow_closed_forms",
    "follow_closed_forms_with_more",
    "look_at_rates",
    "look_at_logs",
    "keep_checkpoints",
    "start_with_another_reference",
    "use_other_features",
    "train_without_a_rule",
    "train_with_several_optimizers",
    "hold_parts_of_optimizers",
    "leave_settings_after_an_error",
    "tell_kinds",
    "refuse",
]


@pytest.fixture(scope="module", params=["tensorflow", pytest.param("torch", marks=pytest.mark.thorough), ON_JAX])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the scenarios have found."""
    directory = tmp_path_factory.mktemp(request.param)
    with Job(directory / "run", preload=warm.KERAS[request.param], guard_s=500.0) as job:
        results: dict[str, Any] = job.start(call_all, "compensated", request.param, SCENARIOS).result()
    return results


# ---------------------------------------------------------------- the weights


def test_weights_over_a_trace_are_those_of_the_closed_form(found: dict[str, Any]) -> None:
    off = found["follow_closed_forms"]
    assert len(off) == 14
    assert off == pytest.approx(dict.fromkeys(off, 0.0), abs=1e-6)


def test_weights_are_those_of_the_closed_form_with_what_else_keras_has(found: dict[str, Any]) -> None:
    off = found["follow_closed_forms_with_more"]
    assert set(off) == {"accumulation", "loss scale", "two fits", "reference", "schedule", "step of one's own"}
    assert off == pytest.approx(dict.fromkeys(off, 0.0), abs=1e-6)


def test_checkpoint_of_an_epochs_end_is_one_of_plain_keras(found: dict[str, Any]) -> None:
    assert found["keep_checkpoints"] == pytest.approx({"plain": 0.0, "ours": 0.0}, abs=1e-6)


def test_other_reference_batch_than_that_of_the_checkpoint_begins_anew(found: dict[str, Any]) -> None:
    assert found["start_with_another_reference"] == {"steps": [5, 19], "off": pytest.approx(0.0, abs=1e-6)}


def test_other_features_of_optimizers_go_on_working(found: dict[str, Any]) -> None:
    assert found["use_other_features"] == dict.fromkeys(["nadam", "clipping", "centered", "amsgrad"], True)


# ---------------------------------------------------------------- who sees it


def test_nobody_but_the_update_sees_other_settings(found: dict[str, Any]) -> None:
    seen = found["look_at_rates"]
    assert seen["same"]
    assert seen["others"]  # the weights
    assert seen["last"][1:5] == [0.9, 0.999, 1e-7, 0.004]
    assert seen["clean"]
    assert found["leave_settings_after_an_error"] == {"rate": RATE, "betas": [0.9, 0.999]}


def test_logs_of_each_epoch_have_the_scale_and_the_batch(found: dict[str, Any]) -> None:
    seen = found["look_at_logs"]
    assert seen["history"]["lr_scale"] == pytest.approx([math.sqrt(2), math.sqrt(3)])
    assert seen["history"]["global_batch_size"] == [3 * BATCH_SIZE] * 2
    assert {"lr_scale", "global_batch_size"} <= set(seen["csv"].split(","))
    assert seen["plain"] == ["loss"]


def test_logs_without_the_scale_have_the_columns_of_plain_keras(found: dict[str, Any]) -> None:
    columns, csv, csv_of_keras = found["look_at_logs"]["off"]
    assert columns == ["loss"]
    assert csv == csv_of_keras


def test_optimizer_without_a_rule_trains_unchanged_and_the_first_change_of_the_world_is_told(
    found: dict[str, Any],
) -> None:
    names = {"Adagrad", "Adadelta", "Adafactor", "Adamax", "Ftrl", "Lamb", "Lion", "Muon", "ScheduleFreeAdamW", "Own"}
    assert set(found["train_without_a_rule"]) == names
    for name, (scales, (message,), unchanged) in found["train_without_a_rule"].items():
        assert set(scales) == {1.0}
        assert f"how the settings of {name} follow it: they stay as they are. Choose 'linear'" in message
        assert unchanged, name


def test_each_of_several_optimizers_has_the_rule_of_its_own(found: dict[str, Any]) -> None:
    seen = found["train_with_several_optimizers"]
    assert [seen["map"], seen["function"]] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert sorted(seen["scales"].values()) == [1.0, 3.0]


def test_optimizer_that_is_part_of_another_one_is_compensated_once(found: dict[str, Any]) -> None:
    off = found["hold_parts_of_optimizers"]
    assert {"loss scale", "several"} <= set(off)
    assert off == pytest.approx(dict.fromkeys(off, 0.0), abs=1e-6)


# ---------------------------------------------------------------- which optimizers


def test_kinds_of_optimizers_are_told_apart(found: dict[str, Any]) -> None:
    known = {"SGD": "SGD", "Adam": "Adam", "AdamW": "AdamW", "Nadam": "NAdam", "RMSprop": "RMSprop", "Named": "Adam"}
    kinds = found["tell_kinds"]
    assert {name: kind for name, kind in kinds.items() if kind} == known
    assert {"Own", "Adagrad", "Lion"} <= set(kinds) - set(known)


def test_bad_settings_are_refused_before_training_starts(found: dict[str, Any]) -> None:
    cubic, negative, reference = found["refuse"]
    assert cubic.startswith("unknown rule of compensation")
    assert "a number above 0" in negative
    assert "reference_batch_size=0" in reference


# ---------------------------------------------------------------- real workers


@pytest.mark.parametrize("backend", [*BACKENDS, ON_JAX])
def test_workers_agree_on_the_scale_through_a_join_and_a_loss(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        founders = job.start_world(2, call_in, "compensated", backend, "run", LENGTH)
        job.wait_for_step(3)
        newcomer = job.start(call_in, "compensated", backend, "run", LENGTH)
        first, *_ = job.view(3)
        admitted = job.wait_for("admitted")[0]["step"]
        job.wait_for_step(admitted + 5)  # in the middle of the ramp
        first.kill()
        lost = max(event["step"] for event in job.events("step", worker=first.id))
        job.wait_for_step(lost + 12)
        (job.directory / "enough").touch()
        results = [worker.result() for worker in (*founders, newcomer) if worker is not first]
        job.audit()
        steps = {event["step"]: event for event in job.events("step")}
        changes = [job.events("compensation", worker=result["worker"]) for result in results]

    worlds = [steps[n]["world_size"] for n in sorted(steps)]
    samples = [expand(steps[n]["committed"]) for n in sorted(steps)]
    assert [worlds[n] for n in range(1, len(worlds)) if worlds[n] != worlds[n - 1]] == [3, 2]
    ratios = closed_forms.ramped([size / 2 for size in worlds], 8)
    problem = closed_forms.Regression(*(np.asarray(part) for part in results[0]["problem"]))
    expected = closed_forms.sgd(problem, samples, ratios, [RATE] * len(samples), momentum=0.9)
    for result in results:
        np.testing.assert_allclose(result["weights"], expected, rtol=0, atol=1e-6)
        assert result["rate"] == pytest.approx(RATE)
        assert result["history"] == results[0]["history"]
    scales = results[0]["history"]["lr_scale"]
    assert len(scales) == len(results[0]["history"]["global_batch_size"]) == len(results[0]["history"]["loss"])
    assert scales[-1] == 1.0
    assert [event["global_batch_size"] for event in changes[0]] == [size * BATCH_SIZE for size in (2, 3, 2)]
    assert {event["reference_batch_size"] for events in changes for event in events} == {2 * BATCH_SIZE}
