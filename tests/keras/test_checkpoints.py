"""A `fit` that breaks off, and the same command that goes on from what it has saved."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import Job
from tests import warm

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

STEPS = 3  # of an epoch


def call(backend: str, folder: str) -> dict[str, Any]:
    del os.environ["ELASTICFLOW_COORDINATOR"]
    importlib.import_module(f"tests.keras.on_{backend}")
    results = {}
    modules = {
        "checkpoints": (
            "started_again",
            "held",
            "formats",
            "ended",
            "of_each_class",
            "other_metrics",
            "adapted",
            "rows",
        ),
        "weights": ("files", "memory"),
    }
    for module, names in modules.items():
        functions = importlib.import_module(f"tests.keras.{module}")
        results |= {name: getattr(functions, name)(f"{folder}/{name}") for name in names}
    return results


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


def test_fit_started_again_at_any_step_ends_as_an_undisturbed_one(results: dict[str, Any]) -> None:
    assert results["started_again"] == {"each step": [3 * STEPS, []], "end of an epoch": [False, []], "complete": []}


def test_memory_of_a_checkpoint_is_free_when_the_fit_goes_on(results: dict[str, Any]) -> None:
    assert results["held"] == [False, False]


def test_checkpoint_has_the_metrics_that_are_numbers(results: dict[str, Any]) -> None:
    assert results["of_each_class"] == [[2, 2], [2], True]


def test_fit_goes_on_from_a_checkpoint_with_other_metrics(results: dict[str, Any]) -> None:
    assert results["other_metrics"] == {
        "added": [False, True, [True] * 3, 1],
        "removed": [False, True, [True] * 2, 1],
    }


def test_rows_of_a_csv_file_are_those_of_an_undisturbed_fit(results: dict[str, Any]) -> None:
    assert results["rows"] == {
        "undisturbed": ["epoch", "0", "1", "2"],
        "broken": True,
        "again": True,
        "longer": [True, "3"],
    }


def test_adapters_go_on_from_a_checkpoint_in_which_plain_keras_has_them_merged(results: dict[str, Any]) -> None:
    assert results["adapted"] == {"broken": False, "off": [], "trained": [True, True], "merged": True}


PLAIN = """
import json, sys
import keras, numpy as np
model = keras.saving.load_model(sys.argv[1])
x = np.random.default_rng(0).normal(size=(20, 12)).astype("float32")
print(json.dumps({
    "predictions": model.predict(x, verbose=0).tolist(),
    "optimizer": [np.asarray(keras.ops.convert_to_numpy(v)).tolist() for v in model.optimizer.variables],
    "strange": sorted(name for name in sys.modules if name.startswith("ef_")),
}))
"""


def plainly(backend: str, script: str, *args: object) -> dict[str, Any]:
    """What a program of plain Keras prints."""
    environ = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, args)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_file_is_one_of_keras_that_needs_nothing_of_us(results: dict[str, Any], backend: str) -> None:
    found = results["formats"]
    loaded = plainly(backend, PLAIN, found["model"])
    assert loaded["predictions"] == found["predictions"]
    assert loaded["optimizer"] == found["optimizer"]
    assert loaded["strange"] == []
    assert found["subclassed"] == [True, True]
    assert found["subclassed again"] == ["history"]


def test_weights_are_written_as_keras_does_byte_by_byte_alone_and_in_shares(results: dict[str, Any]) -> None:
    found = {name: one for name, one in results["files"].items() if name != "another model"}
    assert {name: one["wrong"] for name, one in found.items()} == {name: [] for name in found}
    # A kernel and its three companions in AdamW; those once more in the optimizer that scales the loss; a kernel in two
    # layers and its three companions in Adam and SGD.
    assert {name: one["shared"] for name, one in found.items()} == {
        "float32": 4,
        "mixed_float16": 7,
        "bfloat16": 4,
        "own": 5,
        "words": 0,
    }
    assert found["own"]["literal"] > 2 * 3000 * 8


def test_memory_for_copies_is_used_again_and_stays_that_of_one_share(results: dict[str, Any]) -> None:
    found = results["memory"]
    assert found["same"]
    assert found["shares"] == found["expected"]


def train_together(backend: str, folder: str, model: str) -> list[Any]:
    importlib.import_module(f"tests.keras.on_{backend}")
    found: list[Any] = importlib.import_module("tests.keras.checkpoints").together(folder, model)
    return found


PLAIN_FOLDER = """
import json, sys
import keras, numpy as np
model = keras.saving.load_model(sys.argv[1])
weights = [part.tolist() for part in model.get_weights()]
model.set_weights([0 * part for part in model.get_weights()])
model.load_weights(sys.argv[1] + "/model.weights.h5")
print(json.dumps({
    "step": int(model.optimizer.iterations),
    "momenta": float(np.abs(keras.ops.convert_to_numpy(model.optimizer.variables[2])).sum()) > 0,
    "weights": weights,
    "again": [part.tolist() for part in model.get_weights()],
    "strange": sorted(name for name in sys.modules if name.startswith("ef_")),
}))
"""


def test_folder_that_workers_have_written_together_is_one_of_keras(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        workers = job.start_world(2, train_together, backend, str(tmp_path), "wide")
        assert workers[0].result() == workers[1].result()
        shared = {event["id"] for event in job.events("share")} & {event["id"] for event in job.events("checkpoint")}
        assert job.events("checkpoint_failed") == []
    folder = tmp_path / "store" / "checkpoints" / max(shared)
    files = {"config.json", "metadata.json", "model.weights.h5", "elasticflow.state", "manifest.json"}
    assert {path.name for path in folder.iterdir()} == files
    loaded = plainly(backend, PLAIN_FOLDER, folder)
    assert loaded["step"] == int(folder.name.rpartition("-")[2])
    assert loaded["momenta"]
    assert loaded["weights"] == loaded["again"]
    assert loaded["strange"] == []


def test_model_with_a_vocabulary_is_written_by_rank_0_alone(tmp_path: Path) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["torch"]) as job:
        workers = job.start_world(2, train_together, "torch", str(tmp_path), "worded")
        assert workers[0].result() == workers[1].result()
        assert not job.events("share")
        assert len(job.events("checkpoint")) >= 2
        outputs = [worker.output.read_text() for worker in workers]
    assert sum("rank 0 writes checkpoints alone: the model has assets" in output for output in outputs) == 1


def test_arrays_of_another_model_are_told_apart(results: dict[str, Any]) -> None:
    found = results["files"]["another model"]
    assert found == [[["layers/dense", "0"], "float32 (12, 400)", "float32 (12, 2)"]]


def test_fit_that_has_ended_goes_on_only_for_more_epochs(results: dict[str, Any]) -> None:
    found = results["ended"]
    message, untouched = found.pop("another model")
    assert message.startswith("the checkpoints there are of another model")
    assert untouched
    assert found == {
        "epochs": [3 * STEPS, 0, True, STEPS, True],
        "stopped": [2 * STEPS, 0, True, STEPS, False],  # an undisturbed one stops before
        "grown": [3 * STEPS, 0, True, STEPS + 1, False],
        "two": [0, 3 * STEPS - 1, []],
    }
