"""A worker of ours that trains on a stream of shards, until it is killed.

Arguments: size, seconds of a step.
"""

from __future__ import annotations

from torch.utils.data import DataLoader

from ef_common.data.torch_stream import StreamDataset
from tests.benchmarks.elasticflow_worker import train
from tests.benchmarks.models import BATCH_SIZE
from tests.benchmarks.streams_worker import InMemory

if __name__ == "__main__":
    train(DataLoader(StreamDataset(InMemory()), BATCH_SIZE))
