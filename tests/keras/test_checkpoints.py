"""A `fit` that breaks off, and the same command that goes on from what it has saved."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from ef_common.testing.harness import Job

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

BACKENDS = ("tensorflow", "torch")
STEPS = 3  # of an epoch


def call(backend: str, folder: str) -> dict[str, Any]:
    del os.environ["ELASTICFLOW_COORDINATOR"]
    importlib.import_module(f"tests.keras.on_{backend}")
    module = importlib.import_module("tests.keras.checkpoints")
    return {name: getattr(module, name)(f"{folder}/{name}") for name in ("started_again", "formats", "ended")}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, backend: str) -> dict[str, Any]:
    """What has come of the trainings, in one process without a job."""
    folder = tmp_path_factory.mktemp(backend)
    with Job(folder / "run", preload=[f"tests.keras.on_{backend}"]) as job:
        found: dict[str, Any] = job.start(call, backend, str(folder)).result()
        return found


def test_fit_started_again_at_any_step_ends_as_an_undisturbed_one(results: dict[str, Any]) -> None:
    assert results["started_again"] == {"each step": [3 * STEPS, []], "end of an epoch": [False, []]}


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


def test_file_is_one_of_keras_that_needs_nothing_of_us(results: dict[str, Any], backend: str) -> None:
    found = results["formats"]
    environ = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    command = [sys.executable, "-W", "ignore", "-c", PLAIN, found["model"]]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=True)
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert loaded["predictions"] == found["predictions"]
    assert loaded["optimizer"] == found["optimizer"]
    assert loaded["strange"] == []
    assert found["subclassed"] == [True, True]
    assert found["subclassed again"] == ["history"]


def test_fit_that_has_ended_goes_on_only_for_more_epochs(results: dict[str, Any]) -> None:
    found = results["ended"]
    message, untouched = found.pop("another model")
    assert message.startswith("the checkpoints there are of another model")
    assert untouched
    assert found == {
        "epochs": [3 * STEPS, 0, True, STEPS],
        "stopped": [2 * STEPS, 0, True, STEPS],
        "two": [0, 3 * STEPS - 1, []],
    }
