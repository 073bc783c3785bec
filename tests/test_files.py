"""Files that others read are whole."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from ef_common.files import read_whole, write_whole


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


def test_writers_on_several_machines_with_the_same_process_id_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, the first process has the id 1."""
    replace, both_have_written = Path.replace, threading.Barrier(2, timeout=60.0)
    errors = list[OSError]()

    def replace_together(self: Path, target: Path) -> Path:
        both_have_written.wait()
        return replace(self, target)

    def write(data: bytes) -> None:
        try:
            write_whole(tmp_path / "file", data)
        except OSError as error:
            errors.append(error)

    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(Path, "replace", replace_together)
    writers = [threading.Thread(target=write, args=(data,)) for data in (b"first", b"second, longer")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert errors == []
    assert (tmp_path / "file").read_bytes() in (b"first", b"second, longer")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("num_stale", [1, 1000])
def test_file_that_another_machine_replaces_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_stale: int
) -> None:
    read, stale = Path.read_text, iter(range(num_stale))

    def read_over_network(self: Path) -> str:
        if next(stale, None) is not None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(self)

    write_whole(tmp_path / "file", b"whole")
    monkeypatch.setattr(Path, "read_text", read_over_network)
    if num_stale == 1:
        assert read_whole(tmp_path / "file") == "whole"
        return
    with pytest.raises(OSError, match=r"(?i)stale"):
        read_whole(tmp_path / "file")
