"""Files of lines are streams of shards, wherever fsspec finds them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import fsspec
import pytest

from ef_common.data.adapters.lines import TextLines
from ef_common.errors import UsageError
from tests.adapters.contract import check_stream


def test_lines_are_samples_and_files_are_shards(tmp_path: Path) -> None:
    contents = {"b.txt": "one\ntwo\n", "a.txt": "three\r\n\nfour", "c.txt": ""}
    for name, text in contents.items():
        (tmp_path / name).write_bytes(text.encode())
    lines = TextLines(f"{tmp_path}/*.txt")
    assert lines.shards() == [f"{tmp_path}/{name}" for name in ("a.txt", "b.txt", "c.txt")]
    assert check_stream(lines) == [["three", "", "four"], ["one", "two"], []]


def test_lines_are_parsed_from_their_offset_on(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("not json\n" + "".join(f"{json.dumps({'n': n})}\n" for n in range(5)))
    lines = TextLines([str(tmp_path / "a.jsonl")], json.loads)
    assert [sample["n"] for sample in lines.open(lines.shards()[0], 3)] == [2, 3, 4]


def test_compressed_lines_are_read_by_the_name_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    assert check_stream(TextLines(str(tmp_path / "a.txt.gz"))) == [["one", "two"]]


def test_lines_of_a_store_are_found_by_a_pattern() -> None:
    store = fsspec.filesystem("memory")
    for name in ("y", "x"):
        store.pipe(f"/lines/{name}.txt", f"{name}1\n{name}2\n".encode())
    lines = TextLines("memory://lines/*.txt")
    assert check_stream(lines) == [["x1", "x2"], ["y1", "y2"]]


def test_pattern_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no files of this name"):
        TextLines(f"{tmp_path}/*.txt")
