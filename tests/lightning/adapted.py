"""Trainings on other libraries' data sets, as their users write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from ef_common.data.checkpointer import Checkpointing
from tests.lightning import training, walked

LENGTH = 96
SHARD = 12
"""Samples of a shard."""


def starts() -> list[int]:
    return list(range(0, LENGTH, SHARD))


def rows(first: list[int]) -> Any:
    """Samples of shards, as dicts of plain values."""
    samples = training.data(LENGTH)
    for start in first:
        for number in range(start, start + SHARD):
            _, features, target = samples[number]
            yield {"n": number, "features": features.tolist(), "target": target.tolist()}


def write_parquet(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    for start in starts():
        table = pyarrow.Table.from_pylist(list(rows([start])))
        parquet.write_table(table, folder / f"{start:03}.parquet", row_group_size=5)


def write_tars(folder: Path) -> None:
    import webdataset as wds

    for start in starts():
        with wds.TarWriter(str(folder / f"{start:03}.tar")) as writer:
            for row in rows([start]):
                writer.write({"__key__": f"{row['n']:03}", "json": row})


def write_chunks(folder: Path) -> None:
    import litdata

    litdata.optimize(by_number, list(range(LENGTH)), output_dir=str(folder), chunk_size=SHARD, num_workers=1)


def by_number(number: int) -> Any:
    _, features, target = training.data(LENGTH)[number]
    return number, features, target


WRITERS = {"parquet": write_parquet, "webdataset": write_tars, "litdata": write_chunks}


def loader(kind: str, folder: Path, **kwargs: Any) -> DataLoader[Any]:
    """What a user passes to the Trainer."""
    data: Any
    if kind == "parquet":
        from elasticflow.streams import ParquetRows, StreamDataset

        data = StreamDataset(ParquetRows(f"{folder}/*.parquet"))
    elif kind == "webdataset":
        import webdataset as wds

        urls = sorted(map(str, folder.glob("*.tar")))
        data = wds.WebDataset(urls, shardshuffle=False).decode().map(lambda sample: sample["json"])
    elif kind == "litdata":
        import litdata

        return DataLoader(litdata.StreamingDataset(str(folder)), 4, **kwargs)
    elif kind == "datasets, map-style":
        import datasets

        made = datasets.Dataset.from_generator(rows, gen_kwargs={"first": starts()}, cache_dir=str(folder))
        return DataLoader(made, 4, shuffle=True, collate_fn=tensors, **kwargs)
    else:
        import datasets

        data = datasets.IterableDataset.from_generator(rows, gen_kwargs={"first": starts()})
        data = data.shuffle(seed=3, buffer_size=8) if kind == "datasets, shuffled" else data
    return DataLoader(data, 4, collate_fn=tensors, **kwargs)


def tensors(batch: list[Any]) -> Any:
    import torch

    return [torch.tensor([row[name] for row in batch]) for name in ("n", "features", "target")]


def run(host: str, kind: str, folder: str, loading: dict[str, Any] | None = None) -> dict[str, Any]:
    return walked.train(host, loader(kind, Path(folder), **(loading or {})), {})


def stateful(host: str) -> dict[str, Any]:
    """Train with torchdata's loader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return walked.train(host, StatefulDataLoader(training.data(29), 4, shuffle=True, num_workers=1), {})


def until(host: str, kind: str, folder: str, world_size: int, notes: str | None) -> dict[str, Any]:
    """Train, with a loss and newcomers; see `walked.run_until`."""
    return walked.until(host, lambda: loader(kind, Path(folder)), world_size, notes)


def with_checkpoints(host: str, kind: str, folder: str, store: str, last: int) -> dict[str, Any]:
    """Train with a checkpoint after every second step, and make no step after the last one, unless workers change."""
    pl = training.use(host)
    holds = training.holding(pl, lambda trainer: trainer.global_step >= last)
    checkpoint = Checkpointing(store, every_steps=2)
    return walked.train(host, loader(kind, Path(folder)), {}, callbacks=[holds], checkpoint=checkpoint)
