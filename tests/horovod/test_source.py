from __future__ import annotations

from pathlib import Path

import pytest

from ef_common.errors import UsageError
from ef_common.horovod import source


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source that holds what is to be changed, and something around it."""
    for change in source.CHANGES:
        path = tmp_path / change.path
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() if path.exists() else "begin\n"
        path.write_text(f"{before}{change.old}\nbetween\n")
    for target in source.ADDED:
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
    return tmp_path


def test_every_change_is_made_once(tree: Path) -> None:
    source.apply(tree)
    for change in source.CHANGES:
        text = (tree / change.path).read_text()
        assert text.startswith("begin\n")
        assert change.old not in text or change.old in change.new
        assert change.new in text
    for target in source.ADDED:
        assert (tree / target).read_text()


def test_source_that_is_changed_already_is_refused(tree: Path) -> None:
    source.apply(tree)
    with pytest.raises(UsageError, match=r"expected once, and found 0 times"):
        source.apply(tree)
