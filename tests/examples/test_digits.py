import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "example",
    [
        "01-lightning-digits",
        pytest.param("02-keras-digits", marks=pytest.mark.thorough),
        pytest.param("05-forward-torch", marks=pytest.mark.thorough),
        pytest.param("06-forward-keras", marks=pytest.mark.thorough),
    ],
)
def test_digits_in_one_process_are_learnt(tmp_path: Path, example: str) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("ELASTICFLOW_")}
    run = subprocess.run(
        [sys.executable, EXAMPLES / example / "train.py", "--epochs=2"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert run.returncode == 0, run.stderr
    found = re.search(r"^test accuracy: ([\d.]+)$", run.stdout, re.MULTILINE)
    assert found is not None, run.stdout
    assert float(found[1]) > 0.9
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind
