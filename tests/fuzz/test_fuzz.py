"""A short run of each target; `make fuzz` takes longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import BROKEN, TARGETS

ROOT = Path(__file__).parents[2]
NUM_RUNS = 20_000


@pytest.mark.parametrize("name", [name for name in TARGETS if name != BROKEN])
def test_whatever_comes_is_taken_or_refused_as_promised(name: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="there is no atheris for this platform or Python")
    command = [sys.executable, "-m", "tests.fuzz", name, f"--runs={NUM_RUNS}", "--seed=1", f"--findings={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Done {NUM_RUNS} runs" in done.stderr


def test_finding_is_reported_and_can_be_given_again(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="there is no atheris for this platform or Python")
    command = [sys.executable, "-m", "tests.fuzz", BROKEN, "--runs=1000", "--seed=1", f"--findings={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    (finding,) = tmp_path.glob(f"{BROKEN}-crash-*")
    again = subprocess.run([*command, f"--input={finding}"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert again.returncode != 0
    assert "in _broken" in again.stderr
