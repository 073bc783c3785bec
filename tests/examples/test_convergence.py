import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENT = Path(__file__).parents[2] / "examples" / "04-convergence" / "experiment.py"
ROWS = [
    ("fixed 2", "compensation"),
    ("elastic 2→3→2", "compensation"),
    ("elastic 2→3→2", "no compensation"),
]


def run_experiment(out: Path, option: str) -> str:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("ELASTICFLOW_")}
    run = subprocess.run(
        [sys.executable, EXPERIMENT, option, "--out", out],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=880,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


def rows(output: str) -> list[tuple[str, str]]:
    """First two cells of each row of the table of final accuracies."""
    found = re.finditer(r"^\| ([^|]+) \| ([^|]+) \| [\d.]+ % \([+-][\d.]+\) \|$", output, re.MULTILINE)
    return [(row[1], row[2]) for row in found]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.thorough
def test_short_experiment_learns_passes_its_audits_and_prints_its_table(tmp_path: Path) -> None:
    output = run_experiment(tmp_path, "--short")
    results = json.loads((tmp_path / "results.json").read_text())
    assert rows(output) == ROWS, output
    assert output.count("audit holds") == len(ROWS)
    for result in results:
        assert result["accuracy"][-1] > 0.5, result  # chance is 0.1
        sizes = [size for _, size in result["world_sizes"]]
        assert sizes == ([2] if result["world"] == "fixed 2" else [2, 3, 2]), result
        assert len(result["audit"]) == 5

    again = run_experiment(tmp_path, "--report")
    assert rows(again) == ROWS
    assert (tmp_path / "accuracy.png").exists() == (importlib.util.find_spec("matplotlib") is not None)
