"""The order of a DataLoader's samples: what a sampler draws, and which samplers divide the samples themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ef_common.collectives.torch_codec import TENSORS
from ef_common.data.torch_order import is_divided, order_from, sent

INDICES: dict[str, list[Any]] = {
    "pairs": [(4, 224), (1, 192), (0, 160)],
    "pairs of other types": [(0, "dog"), (3, 0.5), (2, None)],
    "pairs and numbers": [(0, 1), 7],
    "names": ["cat", "dog\0", ""],
    "lists": [[0, 1], [2, 3]],
    "large numbers": [0, 2**80],
    "fractions": [0, 0.5],
}


@pytest.mark.parametrize("indices", INDICES.values(), ids=INDICES)
def test_indices_that_are_no_numbers_are_those_that_the_sampler_has_drawn(indices: list[Any]) -> None:
    order = order_from(TENSORS.loads(TENSORS.dumps(sent(order_from(indices)))))
    assert order.tolist() == indices
    assert list(map(type, order.tolist())) == list(map(type, indices))
    assert order[[2 % len(indices), 0]].tolist() == [indices[2 % len(indices)], indices[0]]
    assert order[:1].tolist() == indices[:1]


def test_numbers_are_kept_small() -> None:
    drawn: list[Any] = [3, np.int64(1), torch.tensor(2)]
    for order in (order_from(drawn), order_from(np.asarray([3, 1, 2])), order_from(torch.tensor([3, 1, 2]))):
        assert order.dtype == np.int32
        assert order.tolist() == [3, 1, 2]
        assert sent(order) is order
    assert order_from([2**40]).tolist() == [2**40]
    assert order_from([]).tolist() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"num_replicas": 2, "rank": 0},
        {"world_size": 2, "rank": 1},
        {"_world_size": 3, "_rank": 0},
        {"num_shards": 2, "shard_id": 0},
        {"num_processes": 2, "process_index": 0},
    ],
)
def test_sampler_with_a_rank_among_several_divides_the_samples(fields: dict[str, int]) -> None:
    assert is_divided(SimpleNamespace(**fields))
    assert not is_divided(SimpleNamespace(**{name: min(value, 1) for name, value in fields.items()}))


def test_sampler_without_a_rank_or_in_a_world_of_one_draws_all_samples() -> None:
    for fields in ({}, {"rank": 1}, {"world_size": 2}, {"rank": 0, "world_size": None}, {"num_replicas": None}):
        assert not is_divided(SimpleNamespace(**fields))


def test_property_of_a_sampler_is_not_asked() -> None:
    """It may need a process group that is not there yet."""

    class Asking:
        world_size = 2

        @property
        def rank(self) -> int:
            raise ValueError("no process group")

    assert not is_divided(Asking())
