"""A Keras model of a `model` and a `forward` is as one that was written by hand."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import Job
from tests import warm

pytestmark = [pytest.mark.processes, pytest.mark.timeout(530)]

WHAT = ("as_by_hand", "mixed", "dict_batches", "evaluation", "callbacks", "saved", "trained", "mistakes")


def call(backend: str, folder: str) -> dict[str, Any]:
    del os.environ["ELASTICFLOW_COORDINATOR"]
    importlib.import_module(f"tests.keras.on_{backend}")
    module = importlib.import_module("tests.keras.programs")
    found = {}
    for name in WHAT:
        (Path(folder) / name).mkdir()
        found[name] = getattr(module, name)(f"{folder}/{name}")
    return found


@pytest.fixture(scope="module", params=[pytest.param("tensorflow", marks=pytest.mark.thorough), "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, backend: str) -> dict[str, Any]:
    """What has come of the trainings, in one process without a job."""
    folder = tmp_path_factory.mktemp(backend)
    with Job(folder / "run", preload=warm.KERAS[backend], guard_s=500.0) as job:
        found: dict[str, Any] = job.start(call, backend, str(folder)).result()
        return found


def test_weights_are_bit_for_bit_those_of_the_model_by_hand(results: dict[str, Any]) -> None:
    for name, found in results["as_by_hand"].items():
        assert found["weights"] == found["optimizer"] == 0.0, name
        assert found["moved"] > 0, name


def test_mixed_precision_is_that_of_the_model_by_hand(results: dict[str, Any]) -> None:
    found = results["mixed"]
    assert found["weights"] == found["optimizer"] == 0.0
    expected = {"x": "float32", "outputs": "float16", "variables": "float32", "optimizer": "LossScaleOptimizer"}
    assert found["types"] == expected


def test_history_is_that_of_the_model_by_hand(results: dict[str, Any]) -> None:
    for name, found in results["as_by_hand"].items():
        assert found["names"] == [["accuracy", "loss", "val_accuracy", "val_loss"]] * 2
        assert found["history"] < 1e-6, name


def test_dict_batches_are_bound_by_name(results: dict[str, Any]) -> None:
    assert results["dict_batches"] == 0.0


def test_evaluation_is_the_mean_over_samples_of_its_own_function(results: dict[str, Any]) -> None:
    found, expected, history = results["evaluation"]
    assert found == {"error": pytest.approx(expected, rel=1e-5)}  # the last batch has 13 samples of 16
    assert history == ["accuracy", "loss", "val_error"]


def join_in(backend: str) -> Any:
    importlib.import_module(f"tests.keras.on_{backend}")
    return importlib.import_module("tests.keras.programs").evaluated_together()


def test_workers_see_one_evaluation_of_its_own_function(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        first, second = (worker.result() for worker in job.start_world(2, join_in, backend))
        job.audit()
    assert first == second
    history, expected = first
    assert sorted(history) == ["accuracy", "loss", "val_error"]
    assert history["val_error"][-1] == pytest.approx(expected, rel=1e-5)


def test_callbacks_schedules_and_summary_work_as_by_hand(results: dict[str, Any]) -> None:
    found = results["callbacks"]
    assert found["epochs"] == 2
    assert found["rate"] == pytest.approx(0.1 * 0.5 ** (14 / 5))
    assert found["files"] == ["best.weights.h5", "log.csv"]
    assert found["summary"]
    assert found["loaded"] == 0.0


def test_saved_model_is_loaded_with_its_optimizer_and_trains_on(results: dict[str, Any]) -> None:
    found = results["saved"]
    assert found["same"] == [0.0, 0.0, 0.0]  # the last one is of registered functions, without custom_objects
    assert found["predictions"] == 0.0
    assert found["moved"] > 0


def test_functions_that_cannot_be_found_again_raise_with_a_remedy(results: dict[str, Any]) -> None:
    assert "custom_objects={" in results["saved"]["unknown"]
    assert "register_keras_serializable" in results["saved"]["unknown"]
    assert "Received: model=model" in results["saved"]["unknown"]
    assert 'custom_objects={"tests>known_forward": known_forward, …}' in results["saved"]["not imported"]
    assert "Define it at the top of a module, or save the weights only" in results["saved"]["local"]
    assert "Received: forward=" in results["saved"]["local"]


def test_train_gives_what_fit_gives(results: dict[str, Any]) -> None:
    found = results["trained"]
    assert found["tuple"] == found["dict"] == 0.0
    assert found["metrics"] == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert found["predictions"] == [200, 2]
    assert found["stream"] == 12
    assert found["three"] == ["loss", "val_loss"]
    assert found["list"] == 26


def test_train_goes_on_from_its_checkpoint(results: dict[str, Any]) -> None:
    updates_and_steps = [results["trained"][f"epochs {epochs}"] for epochs in (2, 4)]
    assert updates_and_steps == [[26, 26], [52, 26]]


def test_training_that_goes_on_may_use_fewer_parameters_in_its_first_batch(results: dict[str, Any]) -> None:
    assert results["trained"]["fewer later"] == "nothing was raised"


def test_train_makes_updates_of_the_global_batch(results: dict[str, Any]) -> None:
    assert results["trained"]["global batch"] == 14


def test_train_refuses_what_it_sets_itself_and_a_model_without_an_optimizer(results: dict[str, Any]) -> None:
    assert "use validation=. Received: validation_data=" in results["trained"]["x"]
    assert 'the model has no "optimizer"' in results["trained"]["optimizer"]


MISTAKES = [
    ("no scalar", "scalars that are means over the samples"),
    ("no loss", 'with the cost as "loss"'),
    ("no tensor", "must be a tensor of Keras's backend"),
    ("no gradient", "has no gradient"),
    ("unused", "does not depend on these parameters"),
    ("unused", "Received: scale"),
    ("one entry too many", "a batch has more entries than forward() has parameters"),
    ("one entry missing", "no entry of the batch is for `z` of forward()"),
    ("frozen", "has no parameters to train"),
    ("scheduler", "pass a keras.optimizers.schedules"),
    ("torch", "a model is of torch or of Keras, not of both"),
    ("of torch", "this model is of torch: use ef_lightning.module"),
    ("jax", "KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch. Received: jax"),
    ("trained on jax", "KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch. Received: jax"),
    ("no predict", "it has no `predict`"),
    ("allowed", "nothing was raised"),
]


@pytest.mark.parametrize(("case", "message"), MISTAKES)
def test_mistake_raises_before_an_update(results: dict[str, Any], case: str, message: str) -> None:
    received, scale = results["mistakes"][case]
    assert message in received
    assert scale == 1.0
