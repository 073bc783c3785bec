"""A user's arrays as a data set for a DataLoader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ef_common.errors import UsageError


class Columns(Dataset[Any]):
    """Arrays or tensors of the same length, in a tuple or a dict; a sample has one row of each.

    Args:
        columns: Arrays or tensors of shape (number of samples, …).

    Raises:
        UsageError: The lengths differ, or there is no column.
    """

    def __init__(self, columns: tuple[Any, ...] | Mapping[str, Any]) -> None:
        named = isinstance(columns, Mapping)
        self._names: list[str] | None = list(columns) if isinstance(columns, Mapping) else None
        found = columns.values() if isinstance(columns, Mapping) else columns
        self._columns = [torch.as_tensor(column) for column in found]
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


def loader_of(data: Any, *, batch_size: int, shuffle: bool) -> DataLoader[Any]:
    """A DataLoader over data of any kind.

    Args:
        data: A DataLoader, which is returned as it is; a dataset; arrays or tensors in a tuple or a dict, or one alone.
        batch_size: Samples of a batch.
        shuffle: Whether each epoch has another order.

    Raises:
        UsageError: The data are of another kind.
    """
    if isinstance(data, DataLoader):
        return data
    if isinstance(data, tuple | Mapping):
        data = Columns(data)
    elif hasattr(data, "shape") and hasattr(data, "dtype"):
        data = Columns((data,))
    elif not isinstance(data, Dataset) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UsageError(
            "data for a model of torch must be a DataLoader, a Dataset, or arrays or tensors (a tuple or a dict of "
            f"them). Received: {type(data).__module__}.{type(data).__qualname__}"
        )
    return DataLoader(data, batch_size, shuffle=shuffle and not isinstance(data, IterableDataset))
