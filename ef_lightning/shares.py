"""One worker's share of a checkpoint file: what it copies, and how it writes that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ef_common.collectives.torch_codec import as_bytes
from ef_common.storage.layout import Layout, Path, Slice
from ef_lightning.file_layout import kind_of
from ef_lightning.host_copy import HostCopies

LEAST_TENSOR_BYTES = 4096
"""Smaller tensors are sent to everybody with the layout."""


class ShareCopy:
    """A copy of what lies in some ranges of a file.

    Args:
        copies: Makes it.
        layout: Of the file.
        tree: This worker's state.
        ranges: What this worker writes.

    Raises:
        ValueError: The state lacks what the layout says of it.
    """

    def __init__(self, copies: HostCopies, layout: Layout, tree: Any, ranges: Sequence[tuple[int, int]]) -> None:
        self._layout = layout
        for path, kind in layout.kinds.items():
            _find(tree, path, kind)
        self._copy = copies.of({part: _bytes_of(tree, part, layout.kinds[part.path]) for part in layout.slices(ranges)})

    def write(self, file: Any, start: int, stop: int) -> None:
        """Write one of the ranges."""
        self._layout.write(file, start, stop, lambda part: as_bytes(self._copy.tree[part]).numpy())

    def release(self) -> None:
        """It is not written any more."""
        self._copy.release()


def _bytes_of(tree: Any, part: Slice, kind: str) -> Tensor:
    flat = _find(tree, part.path, kind).detach().contiguous().view(-1)
    return flat.view(torch.uint8)[part.start : part.stop]


def _find(tree: Any, path: Path, kind: str) -> Tensor:
    found = tree
    for key in path:
        try:
            found = found[key]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"its state has nothing at {path}") from None
    if not isinstance(found, Tensor) or kind_of(found) != kind:
        received = kind_of(found) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"its state differs from rank 0's at {path}. Expected: {kind}. Received: {received}")
    return found
