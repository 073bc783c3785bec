"""The command line: one line per property, and the exit status says whether they hold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.shell_completion import get_completion_class
from click.testing import CliRunner, Result

from ef_common.cli import main
from ef_common.events import EventLog
from ef_common.launch import run_directory

ROOT = Path(__file__).parents[2]
HEAVY = {"numpy", "torch", "lightning", "keras", "tensorflow", "rich"}


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


def test_run_hands_on_what_it_is_given_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr("ef_common.launch.command.main", lambda arguments: given.extend(arguments) or 0)
    line = ["--nnodes", "1:2", "-m", "train", "a", "--", "-b", "--help", "", "--", "--version"]
    assert _elasticflow("run", *line).exit_code == 0
    assert given == line


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


def test_what_a_terminal_has_no_character_for_ends_no_command(tmp_path: Path) -> None:
    with EventLog(tmp_path, "a") as log:
        for generation, members in ((1, ["a", "b"]), (2, ["a", "b", "c"])):
            view = {"generation": generation, "members": members, "rank": 0, "world_size": len(members)}
            log.write("view", **view, reason="", pause_s=0.0)
    done = subprocess.run(
        [sys.executable, "-m", "ef_common.cli", "logs", str(tmp_path)],
        cwd=ROOT,
        env={"PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        encoding="latin-1",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 ? 3 workers" in done.stdout


def test_version_imports_neither_numpy_nor_torch_nor_what_a_job_needs() -> None:
    script = (
        "import sys\n"
        "from ef_common.cli import main\n"
        "main(['--version'], standalone_mode=False)\n"
        "print(sorted({'numpy', 'torch', 'lightning', 'asyncio', 'ef_common.protocol'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_stop_returns_when_the_launcher_has_ended_although_its_parent_does_not_reap_it(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "600"])
    began = psutil.Process(process.pid).create_time()
    launcher = run_directory.Launcher(process.pid, began, ["train.py"], num_workers=1, max_workers=1, local=True)
    run_directory.write_launcher(tmp_path, launcher)
    try:
        stop = [sys.executable, "-m", "ef_common.cli", "stop", str(tmp_path)]
        done = subprocess.run(stop, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- completion


def _runs(place: Path, *names: str) -> list[str]:
    """Directories of runs, the first one the oldest."""
    for number, name in enumerate(names):
        launcher = place / "elasticflow-runs" / name / "launcher.json"
        launcher.parent.mkdir(parents=True)
        launcher.write_text("{}")
        os.utime(launcher, (number, number))
    return [f"elasticflow-runs/{name}" for name in names]


def _completed(shell: str, *words: str) -> list[str]:
    """What click's class for a shell offers for the last word."""
    found = get_completion_class(shell)
    assert found is not None
    completions = found(main, {}, "elasticflow", "_ELASTICFLOW_COMPLETE").get_completions(list(words[:-1]), words[-1])
    return [one.value if one.type == "plain" else f"<{one.type}>" for one in completions]


@pytest.mark.parametrize("command", ["audit", "status", "stop", "scale"])
def test_completion_of_a_run_offers_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    old, new, other = _runs(tmp_path, "train-1", "train-2", "eval-3")
    (tmp_path / "elasticflow-runs" / "no-run").mkdir()
    assert _completed("bash", command, "") == [other, new, old]
    assert _completed("bash", command, "elasticflow-runs/t") == [new, old]
    assert _completed("bash", command, "/mnt/") == ["<dir>"]
    assert _completed("bash", command, new, "") == []


def test_completion_of_a_script_offers_files() -> None:
    assert _completed("bash", "run", "--nproc-per-node", "4", "tr") == ["<file>"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_asks_this_command(shell: str) -> None:
    result = _elasticflow("completion", shell)
    assert result.exit_code == 0
    assert f"_ELASTICFLOW_COMPLETE={shell}_complete" in result.stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_answers_other_shells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.chdir(tmp_path)
    (run,) = _runs(tmp_path, "train-1")
    # zsh says which word it is, fish what has been typed of it.
    typed = {"zsh": ("elasticflow status ", "2"), "fish": ("elasticflow status ", "")}[shell]
    environment = {"COMP_WORDS": typed[0], "COMP_CWORD": typed[1], "_ELASTICFLOW_COMPLETE": f"{shell}_complete"}
    result = CliRunner().invoke(main, [], env=environment, prog_name="elasticflow")
    assert run in result.stdout.replace(",", "\n").split("\n")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_runs(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "elasticflow"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom ef_common.cli import main\nmain()\n")
    program.chmod(0o755)
    old, new = _runs(tmp_path, "train-1", "train-2")
    script = """
        set -e
        eval "$(elasticflow completion bash)"
        complete -p elasticflow
        compopt() { echo "compopt $1 $2"; }  # bash lets only a completion that it has begun itself call it
        ask() {
            COMP_WORDS=(elasticflow "$@") COMP_CWORD=$# COMPREPLY=()
            _elasticflow_completion elasticflow
            echo "$* -> ${COMPREPLY[*]}"
        }
        ask comp; ask completion ""; ask doctor --th; ask scale ""; ask scale "$RUN" ""; ask run tr
    """
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=tmp_path,
        env={"PATH": path, "PYTHONPATH": str(ROOT), "RUN": new, "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "complete -o nosort -F _elasticflow_completion elasticflow",
        "comp -> completion",
        "completion  -> bash zsh fish",
        "doctor --th -> --thorough",
        f"scale  -> {new} {old}",
        f"scale {new}  -> ",
        "compopt -o default",
        "run tr -> ",
    ]


def test_completion_imports_nothing_heavy(tmp_path: Path) -> None:
    _runs(tmp_path, "train-1")
    script = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print(sorted({HEAVY!r} & set(sys.modules))))\n"
        "from ef_common.cli import main\n"
        "main(prog_name='elasticflow')\n"
    )
    environment = {"PYTHONPATH": str(ROOT), "COMP_WORDS": "elasticflow status ", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**environment, "_ELASTICFLOW_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["plain,elasticflow-runs/train-1", "[]"], done.stderr
