from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.tiers.changes import of_the_last_day

AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@example.org")


@pytest.fixture
def commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def act(hour: int, *files: str, removed: str = "") -> None:
        for file in files:
            (tmp_path / file).write_text(f"{hour}")
        if removed:
            (tmp_path / removed).unlink()
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"2026-01-{1 + hour // 24:02}T{hour % 24:02}:00:00Z")
        git("add", "--all")
        git(*AUTHOR, "commit", "--quiet", "--message=some")

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)

    git("init", "--quiet")
    return act


def test_changes_are_those_of_the_day_before_the_newest_commit(commit, tmp_path: Path) -> None:
    commit(0, "old", "removed")
    commit(30, "between")
    commit(50, "new")
    commit(53, "newer", removed="removed")
    assert of_the_last_day(tmp_path) == ["between", "new", "newer"]


def test_changes_without_a_history_are_none(commit, tmp_path: Path) -> None:
    assert of_the_last_day(tmp_path) == []
    commit(0, "first")
    assert of_the_last_day(tmp_path) == []
