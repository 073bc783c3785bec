import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = Path(__file__).parents[2] / "examples" / "01-lightning-digits" / "train.py"


@pytest.mark.slow
def test_lightning_digits_in_one_process_learns(tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("ELASTICFLOW_")}
    run = subprocess.run(
        [sys.executable, TRAIN, "--epochs=2"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stderr
    found = re.search(r"^test accuracy: ([\d.]+)$", run.stdout, re.MULTILINE)
    assert found is not None, run.stdout
    assert float(found[1]) > 0.9
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind
