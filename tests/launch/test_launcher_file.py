"""What a launcher says in the directory of its run, while that is there and while it is not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ef_common.launch import run_directory
from ef_common.launch.launcher_file import LauncherFile


def test_directory_that_is_lost_is_told_of_once_and_used_again_when_it_is_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    file = LauncherFile(run_dir)
    launcher = run_directory.this_launcher(["train.py"], max_workers=2, local=True)
    for _ in range(2):
        file.write(launcher)
        assert file.order() is None
    said = capsys.readouterr().err
    assert said == (
        f"elasticflow: the run directory {run_dir} cannot be written (No such file or directory): the job goes on, but "
        "`elasticflow status` cannot see it\n"
    )
    run_dir.mkdir()
    file.write(replace(launcher, num_workers=2))
    assert run_directory.read_launcher(run_dir) == replace(launcher, num_workers=2)
    made = run_directory.order(run_dir, 1)
    assert file.order() == made
    shutil.rmtree(run_dir)
    file.write(launcher)
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("content", ["{", '{"unknown": 1}', "3"])
def test_order_that_makes_no_sense_is_none_and_told_of_once(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wanted.json").write_text(content)
    file = LauncherFile(tmp_path)
    assert [file.order(), file.order()] == [None, None]
    assert capsys.readouterr().err.count("it cannot be scaled") == 1


def test_two_problems_at_a_time_are_told_of_once_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(run_directory, "write_launcher", fail)
    monkeypatch.setattr(run_directory, "read_order", fail)
    file = LauncherFile(tmp_path)
    launcher = run_directory.this_launcher(["train.py"], max_workers=2, local=True)
    for _ in range(3):
        file.write(launcher)
        assert file.order() is None
    assert len(capsys.readouterr().err.splitlines()) == 2
