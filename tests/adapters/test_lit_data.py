"""A data set of litdata's is recognized, and its chunks are dealt."""

from __future__ import annotations

from pathlib import Path

import pytest

from ef_common.data.adapters.recognition import shards_of
from tests.adapters.contract import check_stream

litdata = pytest.importorskip("litdata", reason="litdata is not installed: pip install litdata")
pytestmark = pytest.mark.thorough  # it starts processes to write its files


def square(number: int) -> dict[str, int]:
    return {"n": number, "square": number * number}


@pytest.mark.parametrize("shuffle", [False, True])
def test_chunks_are_shards_whatever_the_rank_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool) -> None:
    litdata.optimize(square, list(range(23)), output_dir=str(tmp_path), chunk_size=5, num_workers=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    stream, is_shuffled = shards_of(litdata.StreamingDataset(str(tmp_path), shuffle=shuffle)) or pytest.fail("?")
    assert is_shuffled == shuffle
    found = check_stream(stream, lambda sample: sample["n"])
    assert [shard.name.split()[0] for shard in stream.shards()] == [f"chunk-0-{number}.bin" for number in range(5)]
    assert found == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14], [15, 16, 17, 18, 19], [20, 21, 22]]
