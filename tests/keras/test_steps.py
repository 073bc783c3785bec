"""`steps_per_epoch` means what it means to Keras, for each kind of data."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import Job
from tests import warm
from tests.jax_installed import ON_JAX

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(200),
]


def call(backend: str) -> Any:
    importlib.import_module(f"tests.keras.on_{backend}")
    return importlib.import_module("tests.keras.steps").compare_steps()


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=pytest.mark.thorough), "torch", ON_JAX])
def test_steps_of_each_epoch_are_those_of_keras(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        problems = job.start(call, backend).result()
        job.audit()
    assert not problems, "\n".join(problems)
