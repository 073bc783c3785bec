"""Files that others read are whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ef_common.files import write_whole


def test_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", b"first", mode=0o600)
    reader = (tmp_path / "file").open("rb")
    write_whole(tmp_path / "file", b"second", mode=0o600)
    with reader:
        assert reader.read() == b"first"
    assert (tmp_path / "file").read_bytes() == b"second"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_write_that_fails_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError("no space left")

    write_whole(tmp_path / "file", b"first")
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        write_whole(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]
