"""Each worker draws random numbers of its own in a step, and all have the same generators between two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import Job
from tests import warm
from tests.jax_installed import needs_jax
from tests.keras.launch import call_in

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.parametrize("backend", ["tensorflow", "torch", pytest.param("jax", marks=needs_jax)])
def test_workers_draw_different_numbers_from_generators_that_stay_equal(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        workers = job.start_world(2, call_in, "drawing", backend, "draw")
        first, second = (worker.result() for worker in workers)
        job.audit()
    assert first["after"] == second["after"]
    for name, mine in first["fits"].items():
        theirs: dict[str, Any] = second["fits"][name]
        assert len(mine["outputs"]) == 8
        assert all(one != other for one, other in zip(mine["outputs"], theirs["outputs"], strict=True)), name
        assert mine["seeds"] == theirs["seeds"], name
        numbers, counts = zip(*(state for states in mine["seeds"] for state in states), strict=True)
        assert len(set(numbers)) == 1
        assert backend == "torch" or counts[-1] == 8
