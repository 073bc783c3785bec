"""Data of any kind becomes a DataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

from ef_common.errors import UsageError
from ef_lightning.columns import Columns, loader_of

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


def test_frame_and_series_of_pandas_give_their_rows_in_their_order() -> None:
    pandas = pytest.importorskip("pandas")
    index = [4, 2, 0, 3, 1]  # as after a random split
    (x, y), (last, _) = batches((pandas.DataFrame(X, index=index), pandas.Series(Y.numpy(), index=index)))
    assert x.tolist() == X[:4].tolist()
    assert y.tolist() == [0, 1, 2, 3]
    assert last.tolist() == [[8, 9]]
    ((alone,), _) = batches(pandas.DataFrame(X, index=index))
    assert alone.tolist() == X[:4].tolist()


class WithLabels:
    """What can be made an array, and is indexed by something else."""

    shape = X.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return X

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, label: Any) -> Any:
        raise KeyError(label)


def test_rows_are_those_of_the_array_whatever_an_index_means() -> None:
    for data in (WithLabels(), (WithLabels(),)):
        ((x,), _) = batches(data)
        assert x.tolist() == X[:4].tolist()


class Table:
    """A data set with columns, as Hugging Face's."""

    shape = (5, 2)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return {"x": X[index], "y": int(Y[index])}


class Typed(Table):
    """One that is told which type it makes."""

    dtype = torch.float32

    @property
    def shape(self) -> Any:  # type: ignore[override]
        raise AttributeError


@pytest.mark.parametrize("data_set", [Table(), Typed()])
def test_data_set_that_has_a_shape_or_a_type_is_read_by_its_numbers(data_set: Table) -> None:
    first, _ = batches(data_set)
    assert first["y"].tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("error")
def test_array_in_a_file_is_not_copied(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    (column,) = Columns((mapped,))._columns
    assert np.shares_memory(column.numpy(), mapped)


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
    ((X, np.array(["a"] * 5)), "arrays or tensors of numbers. Received: ndarray: "),
    (iter([1]), "must be a DataLoader, a Dataset, or arrays"),
]


@pytest.mark.parametrize(("data", "message"), MISTAKES)
def test_other_data_raise(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loader_of(data, batch_size=2, shuffle=False)
