"""Data of any kind becomes a DataLoader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

from ef_common.errors import UsageError
from ef_lightning.columns import loader_of

X, Y = np.arange(10, dtype=np.float32).reshape(5, 2), torch.arange(5)


def batches(data: Any, **kwargs: Any) -> list[Any]:
    return list(loader_of(data, **{"batch_size": 4, "shuffle": False, **kwargs}))


def test_tuple_gives_tuples_in_its_order() -> None:
    (x, y), (last, _) = batches((X, Y))
    assert x.tolist() == X[:4].tolist()
    assert y.tolist() == [0, 1, 2, 3]
    assert last.tolist() == [[8, 9]]


def test_dict_gives_dicts() -> None:
    first, _ = batches({"y": Y, "x": X})
    assert list(first) == ["y", "x"]
    assert first["x"].tolist() == X[:4].tolist()


def test_one_array_is_the_only_entry() -> None:
    ((x,), _) = batches(X)
    assert x.tolist() == X[:4].tolist()


def test_dataset_is_shuffled_if_it_is_trained_on() -> None:
    dataset = TensorDataset(Y)
    assert isinstance(loader_of(dataset, batch_size=2, shuffle=True).sampler, RandomSampler)
    assert isinstance(loader_of(dataset, batch_size=2, shuffle=False).sampler, SequentialSampler)


def test_loader_is_left_as_it_is() -> None:
    loader: DataLoader[Any] = DataLoader(TensorDataset(Y), 3)
    assert loader_of(loader, batch_size=2, shuffle=True) is loader


MISTAKES: list[tuple[Any, str]] = [
    ((X, Y[:3]), r"as many samples. Received: \{0: 5, 1: 3\}"),
    ({"x": X, "y": Y[:3]}, r"Received: \{'x': 5, 'y': 3\}"),
    ((), r"Received: \{\}"),
    (iter([1]), "must be a DataLoader, a Dataset, or arrays"),
]


@pytest.mark.parametrize(("data", "message"), MISTAKES)
def test_other_data_raise(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loader_of(data, batch_size=2, shuffle=False)
