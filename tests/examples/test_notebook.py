"""The notebook, in a kernel of Jupyter, as somebody runs it from its first cell to its last."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "10-notebook" / "elastic.ipynb"


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the client of the kernel imports
def test_notebook_trains_loses_a_worker_and_passes_its_audits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="pip install '.[notebook]'")
    pytest.importorskip("ipykernel", reason="pip install '.[notebook]'")
    nbformat = pytest.importorskip("nbformat")
    for name, value in {
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_PLATFORM_DIRS": "1",
        "ELASTICFLOW_HEARTBEAT_TIMEOUT": "10",  # a busy machine makes no worker look dead
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for part in ("lightning", "keras"):
        printed = text_of(notebook, f"launch-{part}")
        assert "elasticflow: training with 2 workers" in printed
        assert "was killed by SIGKILL; restarting it" in printed
        assert "outcome='finished'" in printed
        assert float(re.findall(r"accuracy': ([\d.]+)", printed)[0]) > 0.8  # no seed is set
        audit = text_of(notebook, f"audit-{part}")
        assert len(re.findall(r"^✓ (?:samples|updates|weights|views|evaluation): ", audit, re.MULTILINE)) == 5, audit
        assert re.search(r"worker [12] killed", audit)
    assert len(list((tmp_path / "elasticflow-runs").iterdir())) == 2


def text_of(notebook: Any, cell_id: str) -> str:
    (cell,) = (cell for cell in notebook.cells if cell.id == cell_id)
    return "".join(output.get("text", "") + "".join(output.get("data", {}).values()) for output in cell.outputs)
