"""What every stream of shards keeps, whatever it reads."""

from __future__ import annotations

import pickle
from typing import Any

from ef_common.data.shards import ShardStream, length_of


def check_stream(stream: ShardStream, plain: Any = lambda sample: sample) -> list[list[Any]]:
    """Check that a stream can be continued anywhere, by a copy, too. Returns the samples of each shard.

    Args:
        stream: The stream.
        plain: Makes something of a sample that can be compared.
    """
    found: list[list[Any]] = []
    copied = pickle.loads(pickle.dumps(stream))  # noqa: S301
    assert [repr(shard) for shard in copied.shards()] == [repr(shard) for shard in stream.shards()]
    for shard in stream.shards():
        samples = list(map(plain, stream.open(shard, 0)))
        assert length_of(stream, shard) in (None, len(samples))
        for offset in range(len(samples) + 2):
            assert list(map(plain, copied.open(shard, offset))) == samples[offset:]
        found.append(samples)
    return found
