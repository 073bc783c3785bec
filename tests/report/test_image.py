"""The picture of a run."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ef_common.cli import main
from tests.report.generated import Generated, small


def size_of(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize("num_workers", [None, 40])
def test_picture_is_drawn_beside_the_report(tmp_path: Path, num_workers: int | None) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    if num_workers is None:
        small(tmp_path)
    else:
        run = Generated(tmp_path)
        run.view([*run.start(num_workers), "$x_{$"], "start")
        run.train(2)
        run.write()
    png = tmp_path / "run.png"
    result = CliRunner().invoke(main, ["report", str(tmp_path), "--no-audit", "--png", str(png)])
    assert result.exit_code == 0, result.output
    width, height = size_of(png)
    assert width > 1000
    assert height > 500


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = CliRunner().invoke(main, ["report", str(tmp_path), "--no-audit", "--png", str(tmp_path / "run.png")])
    assert result.exit_code == 2
    assert "pip install 'elasticflow-training[plots]'" in result.output
    assert not (tmp_path / "run.png").exists()
