"""A short run of each target: a shorter one each day, and one that is guided by coverage. `make fuzz` takes longer."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.mutations import mutate_json
from tests.fuzz.targets import BROKEN, TARGETS

ROOT = Path(__file__).parents[2]
NUM_RUNS = 20_000
NUM_CHANGES = 500
NAMES = [name for name in TARGETS if name != BROKEN]


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_changed_is_taken_or_refused_as_promised(name: str) -> None:
    rng = random.Random(1)
    target = TARGETS[name]
    for number in range(NUM_CHANGES):
        data = target.seeds[number % len(target.seeds)]
        for _ in range(rng.randint(1, 3)):
            data = mutate_json(data, rng)
        target.run(data)


def test_change_that_breaks_a_reader_is_a_finding() -> None:
    target, rng = TARGETS[BROKEN], random.Random(1)

    def run_changed() -> None:
        for _ in range(NUM_CHANGES):
            target.run(mutate_json(target.seeds[0], rng))

    with pytest.raises((KeyError, TypeError)):
        run_changed()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_whatever_comes_is_taken_or_refused_as_promised(name: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="there is no atheris for this platform or Python")
    command = [sys.executable, "-m", "tests.fuzz", name, f"--runs={NUM_RUNS}", "--seed=1", f"--findings={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Done {NUM_RUNS} runs" in done.stderr


@pytest.mark.thorough
def test_finding_is_reported_and_can_be_given_again(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="there is no atheris for this platform or Python")
    command = [sys.executable, "-m", "tests.fuzz", BROKEN, "--runs=1000", "--seed=1", f"--findings={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    (finding,) = tmp_path.glob(f"{BROKEN}-crash-*")
    again = subprocess.run([*command, f"--input={finding}"], cwd=ROOT, capture_output=True, text=True)
    assert again.returncode != 0
    assert "in _broken" in again.stderr
