"""Some cells of the grid: each fault in each framework, and each moment. All of them: ``make chaos``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import cells, trial
from tests.chaos.cells import Cell
from tests.faults.hosts import CPU_HOSTS, GPU_HOSTS, marks_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

_SLOW = ("holding the GIL", "SIGSTOP")
"""What takes as long as it takes to be noticed is tried with one host."""


def _chosen() -> Iterator[Cell]:
    """Each host meets each fault once. Moments and victims take turns."""
    for turn, host in enumerate((*CPU_HOSTS, *GPU_HOSTS, "keras-jax")):
        for number, fault in enumerate(cells.FATES):
            moments = [moment for moment in cells.MOMENTS if not cells.why_not(host, fault, moment)]
            if moments and (fault not in _SLOW or turn == number % len(CPU_HOSTS)):
                victims = list(cells.VICTIMS)
                moment = moments[(number + 3 * turn) % len(moments)]
                victim = victims[(number + turn) % 3]
                yield Cell(host, fault, victim, moment, deterministic=host not in cells.PLAIN_ONLY)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, trial.Weights]:
    return {}


@pytest.mark.thorough
@pytest.mark.parametrize("cell", [pytest.param(cell, marks=marks_of(cell.host), id=str(cell)) for cell in _chosen()])
def test_job_survives(cell: Cell, undisturbed: dict[str, trial.Weights], tmp_path: Path) -> None:
    if reason := trial.why_it_cannot_run(cell):
        pytest.skip(reason)
    if cell.deterministic and cell.host not in undisturbed:
        undisturbed[cell.host] = trial.undisturbed(cell.host, tmp_path / "undisturbed", num_steps=60)
    trial.run(cell, tmp_path / "trial", undisturbed.get(cell.host))


def test_each_moment_is_tried() -> None:
    assert {cell.moment for cell in _chosen()} == set(cells.MOMENTS)
