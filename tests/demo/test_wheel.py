"""`elasticflow demo` of an installed wheel, in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_OF_THE_WHEEL = shutil.ignore_patterns("__pycache__", "*.egg-info")


def run(*command: object, cwd: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The programs of a new environment, with a wheel of this checkout, and the packages of this one beside it."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("ef_common", "ef_keras", "ef_lightning", "elasticflow"):
        shutil.copytree(ROOT / name, source / name, ignore=NOT_OF_THE_WHEEL)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source, cwd=tmp_path)
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    programs = tmp_path / "venv" / "bin"
    (wheel,) = tmp_path.glob("*.whl")
    run(*pip, "--python", programs / "python", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # What is editable there is not found by this: files .pth are read in the environment's own folder alone.
    (others,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (others / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    return programs


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_demo_of_a_wheel_runs_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    output = run(installed / "elasticflow", "demo", "--limit-s=800", cwd=empty)
    assert "✓ samples: " in output
    (made,) = empty.iterdir()
    (run_dir,) = made.iterdir()
    assert (run_dir / "kill-and-join.svg").exists()
    code = "import ef_lightning.demo; print(ef_lightning.demo.__file__)"
    assert run(installed / "python", "-c", code, cwd=empty).startswith(str(installed.parent))
