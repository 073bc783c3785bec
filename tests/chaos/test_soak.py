"""A short training under constant faults. A long one: ``make soak``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.soak import soak

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.thorough
def test_constant_faults_leave_nothing_behind(tmp_path: Path) -> None:
    soaked = soak("lightning", tmp_path / "run", duration_s=25.0, every_s=2.0, seed=1)
    assert sum(soaked.num_faults.values()) > 3
    assert not soaked.left_behind
    for usage in (*soaked.survivors, soaked.coordinator):
        assert not soaked.leaks(usage), usage
