"""Trains on a stream of shards and on something else, in turn, in the same processes, and reports the times.

Arguments: what the stream is compared with ("files" or "map"), number of turns, a folder with files of lines.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ef_common.data.torch_stream import StreamDataset
from tests.benchmarks import strategies
from tests.benchmarks.lightning_module import Module, trainer
from tests.benchmarks.models import BATCH_SIZE, loader
from tests.benchmarks.pair import WORLD_SIZE, report
from tests.benchmarks.processes import die_with_parent
from tests.benchmarks.step_time_worker import WARM_UP_STEPS, Clock

NUM_FILES = 8
LINES_PER_FILE = 4_000
LINES_BATCH_SIZE = 64
MAP_STEPS = 300


def parsed(line: str) -> tuple[Tensor, int]:
    """A sample of a line of text: what a tokenizer would do."""
    return torch.tensor([float(word) for word in line.split()]), 0


class Lines:
    """Files of lines, each a shard."""

    def __init__(self, folder: Path) -> None:
        self._files = sorted(map(str, folder.glob("*.txt")))

    def shards(self) -> list[str]:
        return self._files

    def open(self, shard: str, offset: int) -> Iterator[tuple[Tensor, int]]:
        with open(shard) as lines:
            yield from map(parsed, islice(lines, offset, None))


class SplitByHand(IterableDataset[Any]):
    """The same files as everybody writes it: rank and data worker choose theirs."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._files = sorted(folder.glob("*.txt"))
        self._rank = rank

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        for file in self._files[self._rank * count + number :: WORLD_SIZE * count]:
            with open(file) as lines:
                yield from map(parsed, lines)


class InMemory:
    """Shards of samples that are all equal."""

    def shards(self) -> range:
        return range(100)

    def open(self, shard: int, offset: int) -> Iterator[tuple[Tensor, Tensor]]:
        sample = (torch.zeros(16), torch.tensor(0))
        return (sample for _ in range(offset, 100_000))


def read_files(side: str, folder: Path, rank: int) -> float:
    """Seconds per sample of an epoch, from its first batch on."""
    data = StreamDataset(Lines(folder)) if side == "ours" else SplitByHand(folder, rank)
    clock = Clock()
    fitter = trainer(clock, max_epochs=1, **strategies.arguments("ours" if side == "ours" else "ddp"))
    fitter.fit(Module("50k"), DataLoader(data, LINES_BATCH_SIZE, num_workers=1))
    gc.collect()
    times = clock.times[WARM_UP_STEPS:]
    num_samples = NUM_FILES * LINES_PER_FILE * (len(times) - 1) / len(clock.times)
    return (times[-1] - times[0]) / num_samples


def step(side: str) -> float:
    """Median seconds of a step."""
    clock = Clock()
    fitter = trainer(clock, max_steps=MAP_STEPS, **strategies.arguments("ours"))
    stream = DataLoader(StreamDataset(InMemory()), BATCH_SIZE)
    fitter.fit(Module("50k"), stream if side == "ours" else loader(4 * MAP_STEPS * BATCH_SIZE * WORLD_SIZE))
    gc.collect()
    return float(np.median(np.diff(clock.times[WARM_UP_STEPS:])))


def main() -> None:
    """Measure both sides, in turn."""
    die_with_parent()
    what, num_turns, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    rank = int(os.environ["RANK"])
    found: dict[str, list[float]] = {"ours": [], "peer": []}
    for turn in range(num_turns):
        for side in ("ours", "peer") if turn % 2 == 0 else ("peer", "ours"):
            time.sleep(0.1)
            found[side].append(read_files(side, folder, rank) if what == "files" else step(side))
    report(found)


if __name__ == "__main__":
    main()
