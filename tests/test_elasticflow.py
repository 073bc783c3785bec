"""`elasticflow` is a table of contents that imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

import elasticflow
from ef_common.program.result import Result

HEAVY = (
    "torch",
    "tensorflow",
    "keras",
    "lightning",
    "pytorch_lightning",
    "numpy",
    "fsspec",
    "ef_lightning",
    "ef_keras",
)


def test_contents() -> None:
    settings = ["Compensation", "Autoscale", "Checkpointing", "Retention", "StreamDataset"]
    assert elasticflow.__all__ == ["train", "launch", "audit", "Result", "Launched", *settings]
    assert dir(elasticflow) == sorted([*elasticflow.__all__, "__version__"])
    assert all(getattr(elasticflow, name) is not None for name in elasticflow.__all__)
    assert elasticflow.Result is Result


def test_unknown_name_raises() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = elasticflow.Nothing


def test_import_brings_nothing_heavy() -> None:
    code = "import sys, elasticflow; elasticflow.train, dir(elasticflow); print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    imported = {name.partition(".")[0] for name in output.split()}
    assert imported.isdisjoint(HEAVY)
    assert "elasticflow" in imported
