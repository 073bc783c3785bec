"""A streaming data set of Hugging Face's is recognized, and its shards are dealt."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ef_common.data.adapters.hugging_face import HuggingFaceShards
from ef_common.data.adapters.recognition import shards_of
from ef_common.data.shard_list import digest
from ef_common.data.torch_stream import stream_dataset_of
from ef_common.errors import UnsupportedError, UsageError
from tests.adapters.contract import check_stream

datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install -e '.[streams]'")
pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[streams]'")
importlib.import_module("pyarrow.parquet")


def numbers(starts: list[int]) -> Iterator[dict[str, Any]]:
    for start in starts:
        for number in range(start, start + 5):
            yield {"n": number, "text": f"text {number}"}


def dataset(num_shards: int = 3) -> Any:
    starts = [10 * shard for shard in range(num_shards)]
    return datasets.IterableDataset.from_generator(numbers, gen_kwargs={"starts": starts})


def raised(row: Any) -> Any:
    return {"n": row["n"] + 100}


def doubled(row: Any) -> Any:
    return {"m": 2 * row["n"]}


def in_batches(rows: Any) -> Any:
    return {"m": rows["n"]}


def is_even(row: Any) -> bool:
    return bool(row["n"] % 2 == 0)


KINDS = {
    "plain": (lambda data: data, lambda number: number),
    "mapped": (lambda data: data.map(raised), lambda number: number + 100),
    "of torch": (lambda data: data.with_format("torch"), lambda number: number),
}


@pytest.mark.parametrize("name", KINDS)
def test_shards_are_its_own(name: str) -> None:
    change, expected = KINDS[name]
    stream, shuffle = shards_of(change(dataset())) or pytest.fail("not recognized")
    assert not shuffle
    found = check_stream(stream, lambda row: int(row["n"]))
    assert found == [[expected(10 * shard + number) for number in range(5)] for shard in range(3)]


def test_samples_are_those_that_the_data_set_yields() -> None:
    data = dataset().with_format("torch")
    stream = HuggingFaceShards(data)
    for ours, theirs in zip(stream.open(stream.shards()[0], 0), data, strict=False):
        assert ours.keys() == theirs.keys()
        assert torch.equal(ours["n"], theirs["n"])
        assert ours["text"] == theirs["text"]


def test_filtered_samples_are_counted_after_the_filter() -> None:
    stream = HuggingFaceShards(dataset().filter(is_even))
    assert check_stream(stream, lambda row: row["n"]) == [[0, 2, 4], [10, 12, 14], [20, 22, 24]]


def test_shuffled_data_set_has_the_same_order_again_and_another_one_in_each_epoch() -> None:
    stream = HuggingFaceShards(dataset().shuffle(seed=5, buffer_size=4))
    orders = []
    for epoch in (0, 1):
        stream.set_epoch(epoch)
        found = check_stream(stream, lambda row: row["n"])
        assert sorted(n for shard in found for n in shard) == [10 * s + n for s in range(3) for n in range(5)]
        orders.append(found)
    assert orders[0] != orders[1]
    assert stream_dataset_of(dataset().shuffle(seed=5)).shuffle


def test_files_of_hugging_face_are_shards(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{line}\n" for line in range(3)))
    data = datasets.load_dataset(
        "text", data_files=f"{tmp_path}/*.txt", split="train", streaming=True, cache_dir=str(tmp_path / "cache")
    )
    stream = HuggingFaceShards(data)
    found = check_stream(stream, lambda row: row["text"])
    assert sorted(found) == [["a0", "a1", "a2"], ["b0", "b1", "b2"]]
    assert sorted(shard.name for shard in stream.shards()) == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        (lambda data: data, lambda number: True),
        (lambda data: data.with_format("numpy"), lambda number: True),
        (lambda data: data.select_columns(["n"]), lambda number: True),
        (lambda data: data.map(doubled), lambda number: True),
        (lambda data: data.map(doubled).with_format("torch"), lambda number: True),
        (lambda data: data.map(in_batches, batched=True, batch_size=2), lambda number: True),
        (lambda data: data.filter(is_even), lambda number: number % 2 == 0),
    ],
    ids=["plain", "arrays", "some columns", "mapped", "mapped to tensors", "batches", "filtered"],
)
def test_tables_of_a_file_are_continued_at_each_row(tmp_path: Path, change: Any, is_kept: Any) -> None:
    for number in range(2):
        rows = range(10 * number, 10 * number + 7)
        table = pyarrow.table({"n": list(rows), "text": [str(row) for row in rows]})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=3)
    data = datasets.load_dataset(
        "parquet", data_files=f"{tmp_path}/*.parquet", split="train", streaming=True, cache_dir=str(tmp_path / "cache")
    )
    stream = HuggingFaceShards(change(data))
    expected = [[row for row in range(first, first + 7) if is_kept(row)] for first in (0, 10)]
    for epoch in (0, 1):
        stream.set_epoch(epoch)
        assert check_stream(stream, lambda row: int(row["n"])) == expected


@pytest.mark.parametrize("is_counted", [False, True])
def test_samples_before_an_offset_are_not_made(is_counted: bool) -> None:
    made: list[int] = []

    def noted(row: Any, *numbers: int) -> Any:
        made.append(row["n"])
        return {"place": [*numbers]}

    stream = HuggingFaceShards(dataset().map(noted, with_indices=is_counted))
    found = list(stream.open(stream.shards()[1], 3))
    assert [(row["n"], row["place"]) for row in found] == [(13, [3][:is_counted]), (14, [4][:is_counted])]
    assert made == [10, 11, 13, 14]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.filter(is_even),
        lambda data: data.map(lambda rows: {"n": rows["n"] * 2, "text": rows["text"] * 2}, batched=True, batch_size=2),
        lambda data: data.shuffle(seed=1),
        lambda data: data.take(100),
        lambda data: datasets.interleave_datasets([data, data], seed=1),
    ],
    ids=["filtered", "batches", "shuffled", "taken", "interleaved"],
)
def test_state_of_what_is_not_made_of_one_row_is_not_computed(change: Any) -> None:
    stream = HuggingFaceShards(change(dataset()))
    assert stream._state_at(stream.shards()[0], 2) is None


def concatenated() -> Any:
    return datasets.concatenate_datasets([dataset(2), dataset(3)])


def interleaved(seed: int | None, num_shards: int = 3) -> Any:
    return datasets.interleave_datasets([dataset(), dataset(num_shards)], probabilities=[0.5, 0.5], seed=seed)


@pytest.mark.parametrize(
    ("data", "other"),
    [
        (
            lambda: dataset(3),
            lambda: datasets.IterableDataset.from_generator(numbers, gen_kwargs={"starts": [5, 6, 7]}),
        ),
        (lambda: dataset().shuffle(seed=1), lambda: dataset().shuffle(seed=2)),
        (lambda: dataset(1).shuffle(seed=1).map(raised), lambda: dataset(1).shuffle(seed=2).map(raised)),
        (lambda: interleaved(1), lambda: interleaved(2)),
        (lambda: interleaved(1, 4), lambda: interleaved(1, 5)),
        (concatenated, lambda: datasets.concatenate_datasets([dataset(3), dataset(2)])),
    ],
    ids=[
        "other sources",
        "another order",
        "another buffer",
        "interleaved otherwise",
        "others interleaved",
        "concatenated otherwise",
    ],
)
def test_data_sets_with_other_samples_have_other_shards(data: Any, other: Any) -> None:
    names = [digest(HuggingFaceShards(made()).shards()) for made in (data, data, other)]
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize(
    "made",
    [
        lambda: dataset().shuffle(),
        lambda: dataset(1).shuffle().map(raised),
        lambda: interleaved(None),
        lambda: datasets.concatenate_datasets([dataset(), dataset().shuffle()]),
    ],
    ids=["shuffled", "one shard", "interleaved", "shuffled in part"],
)
def test_data_set_that_is_shuffled_without_a_seed_is_refused(made: Any) -> None:
    with pytest.raises(UsageError, match=r"`\.shuffle\(seed=0\)`"):
        shards_of(made())


def test_generator_with_the_state_of_another_one_has_its_seed() -> None:
    """So old versions of NumPy copy generators."""
    copied = np.random.default_rng()
    copied.bit_generator.state = np.random.default_rng(7).bit_generator.state
    assert HuggingFaceShards(dataset().shuffle(generator=copied)).shards()


def test_generator_is_a_seed() -> None:
    first, second = (
        HuggingFaceShards(pickle.loads(pickle.dumps(dataset().shuffle(generator=np.random.default_rng(7)))))  # noqa: S301
        for _ in range(2)
    )
    assert first.shards() == second.shards()


def test_data_set_that_is_divided_already_is_refused() -> None:
    from datasets.distributed import split_dataset_by_node

    with pytest.raises(UnsupportedError, match="split_dataset_by_node"):
        shards_of(split_dataset_by_node(dataset(), rank=0, world_size=3))


def read(stream: Any) -> list[int]:
    return [int(number) for batch in DataLoader(stream, 4, num_workers=2) for number in batch["n"]]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_data_workers_read_all_samples_of_the_shards_that_they_open() -> None:
    assert sorted(read(stream_dataset_of(dataset(1)))) == list(
        range(5)
    )  # Hugging Face's own would be the first's alone
    assert sorted(read(stream_dataset_of(dataset(3)))) == [10 * shard + n for shard in range(3) for n in range(5)]
