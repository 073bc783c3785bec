"""A WebDataset is recognized, and its tar files are dealt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ef_common.data.adapters.recognition import shards_of
from ef_common.data.adapters.web_dataset import TarShards
from ef_common.errors import UnsupportedError
from tests.adapters.contract import check_stream

wds = pytest.importorskip("webdataset", reason="webdataset is not installed: pip install -e '.[streams]'")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    found = []
    for shard in range(3):
        found.append(str(tmp_path / f"{shard}.tar"))
        with wds.TarWriter(found[-1]) as writer:
            for number in range(10 * shard, 10 * shard + 5):
                writer.write({"__key__": f"{number:03}", "txt": f"text {number}", "cls": number})
    return found


EXPECTED = [[10 * shard + number for number in range(5)] for shard in range(3)]


def label(sample: Any) -> int:
    return int(sample["cls"]) if isinstance(sample, dict) else int(sample[1])


PIPELINES: dict[str, Callable[[list[str]], Any]] = {
    "plain": lambda urls: wds.WebDataset(urls, shardshuffle=False),
    "decoded": lambda urls: wds.WebDataset(urls, shardshuffle=False).decode().to_tuple("txt", "cls"),
    "split by node": lambda urls: wds.WebDataset(urls, shardshuffle=False, nodesplitter=wds.split_by_node),
    "stages": lambda urls: wds.DataPipeline(
        wds.SimpleShardList(urls), wds.split_by_node, wds.split_by_worker, wds.tarfile_to_samples(), wds.decode()
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_tar_files_are_shards_whatever_divides_them(
    urls: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    stream, shuffle = shards_of(PIPELINES[name](urls)) or pytest.fail("not recognized")
    assert not shuffle
    assert check_stream(stream, label) == EXPECTED


@pytest.mark.parametrize("detshuffle", [False, True])
def test_tar_files_are_shuffled_if_the_pipeline_shuffles_them(urls: list[str], detshuffle: bool) -> None:
    stream, shuffle = shards_of(wds.WebDataset(urls, shardshuffle=100, detshuffle=detshuffle)) or pytest.fail("?")
    assert shuffle
    assert check_stream(stream, label) == EXPECTED


def shuffled(urls: list[str]) -> Any:
    return wds.WebDataset(urls, shardshuffle=False).shuffle(4).decode()


def shuffled_by_seed(urls: list[str]) -> Any:
    return wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples(), wds.detshuffle(4, seed=3))


@pytest.mark.parametrize("make", [shuffled, shuffled_by_seed])
def test_samples_are_shuffled_in_the_same_way_again_and_in_another_one_in_each_epoch(
    urls: list[str], make: Callable[[list[str]], Any]
) -> None:
    stream = TarShards(make(urls))
    orders = []
    for epoch in (0, 1):
        stream.set_epoch(epoch)
        orders.append(check_stream(stream, label))
        assert [sorted(shard) for shard in orders[-1]] == EXPECTED
    assert orders[0] != orders[1] != EXPECTED


REFUSED: dict[str, tuple[Callable[[list[str]], Any], str]] = {
    "resampled": (lambda urls: wds.WebDataset(urls, resampled=True, shardshuffle=False), "begins with Resampled"),
    "repeated": (lambda urls: wds.WebDataset(urls, shardshuffle=False).repeat(2), r"Leave them out"),
    "with an epoch": (lambda urls: wds.WebDataset(urls, shardshuffle=False).with_epoch(7), r"Leave them out"),
    "no tar files": (lambda urls: wds.DataPipeline(wds.SimpleShardList(urls)), "begins with SimpleShardList"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pipeline_whose_tar_files_cannot_be_dealt_is_refused(urls: list[str], name: str) -> None:
    make, hint = REFUSED[name]
    with pytest.raises(UnsupportedError, match=hint):
        shards_of(make(urls))
