"""The command line: one line per property, and the exit status says whether they hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ef_common.cli import main
from ef_common.events import EventLog
from ef_common.launch import run_directory

ROOT = Path(__file__).parents[1]


def _elasticflow(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def _run(path: Path, *, lost: int = 0) -> None:
    step = {"step": 1, "epoch": 0, "generation": 1, "world_size": 1, "returned": [], "loss": 0.5}
    with EventLog(path, "a") as log:
        log.write("epoch", epoch=0, length=8)
        log.write("step", committed=[[0, 8 - lost]], mine=[[0, 8 - lost]], **step)
        log.write("epoch_end", epoch=0, length=8, exact=True)


def test_audit_of_an_honest_run_prints_each_property_and_exits_0(tmp_path: Path) -> None:
    _run(tmp_path)
    result = _elasticflow("audit", tmp_path)
    assert result.exit_code == 0
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == [
        "✓ samples",
        "✓ updates",
        "– weights",
        "– views",
        "– evaluation",
    ]


def test_audit_as_json_and_of_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_directory.create("train.py")
    run_directory.write_launcher(run, run_directory.this_launcher(["train.py"], max_workers=1, local=True))
    _run(run)
    result = _elasticflow("audit", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["ok"] is True
    assert {name: one["checked"] for name, one in found["properties"].items()} == {
        "samples": True,
        "updates": True,
        "weights": False,
        "views": False,
        "evaluation": False,
    }


def test_audit_of_a_violation_names_it_and_exits_1(tmp_path: Path) -> None:
    _run(tmp_path, lost=1)
    result = _elasticflow("audit", tmp_path)
    assert result.exit_code == 1
    first = result.stdout.splitlines()[0]
    assert first.startswith("✗ samples: ")
    assert first.endswith("(worker a, epoch 0, step 1, position 7)")


def test_audit_of_unusable_input_exits_2(tmp_path: Path) -> None:
    result = _elasticflow("audit", tmp_path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "No event log" in result.stderr
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "a.jsonl").write_text("garbage\n")
    result = _elasticflow("audit", tmp_path)
    assert result.exit_code == 2
    assert "a.jsonl:1:" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["audit", "a", "b"], ["unknown"]])
def test_misuse_exits_2(arguments: list[str]) -> None:
    assert _elasticflow(*arguments).exit_code == 2


def test_version_is_printed() -> None:
    result = _elasticflow("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("elasticflow ")


@pytest.mark.parametrize(("encoding", "mark"), [("utf-8", "✓"), ("ascii", "ok  ")])
def test_module_runs_on_a_terminal_of_any_encoding(tmp_path: Path, encoding: str, mark: str) -> None:
    _run(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "ef_common.cli", "audit", str(tmp_path)],
        cwd=ROOT,
        env={"PYTHONIOENCODING": encoding},
        capture_output=True,
        encoding=encoding,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{mark} samples: ")


def test_version_imports_neither_numpy_nor_torch() -> None:
    script = (
        "import sys\n"
        "from ef_common.cli import main\n"
        "main(['--version'], standalone_mode=False)\n"
        "print(sorted({'numpy', 'torch', 'lightning'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
