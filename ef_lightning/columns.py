"""A user's arrays as a data set for a DataLoader."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ef_common.errors import UsageError

_CUDA = "__cuda_array_interface__"
"""What arrays on a GPU have, such as CuPy's, which make no array of NumPy's."""


class Columns(Dataset[Any]):
    """Arrays or tensors of the same length, in a tuple or a dict; a sample has one row of each.

    Args:
        columns: Arrays, tensors, or frames and series of pandas, of shape (number of samples, …).

    Raises:
        UsageError: The lengths differ, there is no column, or one is not of numbers.
    """

    def __init__(self, columns: tuple[Any, ...] | Mapping[str, Any]) -> None:
        named = isinstance(columns, Mapping)
        self._names: list[str] | None = list(columns) if isinstance(columns, Mapping) else None
        found = columns.values() if isinstance(columns, Mapping) else columns
        self._columns = [_tensor_of(column) for column in found]
        lengths = [len(column) for column in self._columns]
        if len(set(lengths)) != 1:
            names = list(columns) if named else list(range(len(lengths)))
            raise UsageError(
                f"all arrays of the data must have as many samples. Received: {dict(zip(names, lengths, strict=True))}"
            )

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._columns[0])

    def __getitem__(self, index: int) -> Any:
        """A sample."""
        rows = [column[index] for column in self._columns]
        return tuple(rows) if self._names is None else dict(zip(self._names, rows, strict=True))


def _is_array(data: Any) -> bool:
    """Whether it is one array. A data set may have a shape, or a type, too."""
    return hasattr(data, "shape") and any(hasattr(data, name) for name in ("dtype", "__array__", _CUDA))


def _tensor_of(column: Any) -> Tensor:
    try:
        if hasattr(column, "__array__") and not isinstance(column, Tensor) and not hasattr(column, _CUDA):
            column = np.asarray(column)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writ")  # nobody writes there
            return torch.as_tensor(column)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"the data for a model of torch must be arrays or tensors of numbers. Received: {type(column).__name__}: "
            f"{error}"
        ) from error


def loader_of(data: Any, *, batch_size: int, shuffle: bool) -> DataLoader[Any]:
    """A DataLoader over data of any kind.

    Args:
        data: A DataLoader, which is returned as it is; a dataset; arrays, tensors or pandas objects in a tuple or a
            dict, or one alone.
        batch_size: Samples of a batch.
        shuffle: Whether each epoch has another order.

    Raises:
        UsageError: The data are of another kind.
    """
    if isinstance(data, DataLoader):
        return data
    if isinstance(data, tuple | Mapping):
        data = Columns(data)
    elif _is_array(data) and not isinstance(data, Dataset):
        data = Columns((data,))
    elif not isinstance(data, Dataset) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UsageError(
            "data for a model of torch must be a DataLoader, a Dataset, or arrays or tensors (a tuple or a dict of "
            f"them). Received: {type(data).__module__}.{type(data).__qualname__}"
        )
    return DataLoader(data, batch_size, shuffle=shuffle and not isinstance(data, IterableDataset))
