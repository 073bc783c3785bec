"""A codec for trees that contain torch tensors; see `codec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ef_common.collectives.codec import ArrayLeaves, Codec
from ef_common.collectives.torch_tensors import bytes_of, in_one_piece


class TensorLeaves(ArrayLeaves):
    """Tensors as leaves; arrays travel as tensors too."""

    def take(self, value: Any) -> tuple[str, Any] | None:
        """See the base class."""
        if isinstance(value, Tensor):
            return "t", value.detach()
        taken = super().take(value)
        if taken is None or taken[1].dtype.name not in _ARRAYS:
            return None
        return "a", torch.from_numpy(taken[1] if taken[1].flags.writeable else taken[1].copy())

    def give(self, tag: str, leaf: Any, shape: Sequence[int]) -> Any:
        """See the base class."""
        return leaf if tag == "t" else super().give(tag, leaf.numpy(), shape)

    def spec(self, leaf: Any) -> tuple[str, list[int]]:
        """See the base class."""
        return str(leaf.dtype).removeprefix("torch."), list(leaf.shape)

    def empty(self, dtype: str, shape: Sequence[int]) -> Any:
        """See the base class. The default device may be another one, but bytes are received on the host."""
        return torch.empty(tuple(shape), dtype=dtype_of(dtype), device="cpu")

    def as_bytes(self, leaf: Any) -> np.ndarray:
        """See the base class."""
        array: np.ndarray = as_bytes(leaf).numpy()
        return array

    def encode_other(self, value: Any) -> list[Any] | None:
        """Encode types and devices."""
        if isinstance(value, torch.dtype):
            return ["y", str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["v", str(value)]
        return None

    def decode_other(self, tag: str, content: Any) -> Any:
        """See the base class."""
        match tag:
            case "y":
                return dtype_of(content)
            case "v":
                return torch.device(content)
        return super().decode_other(tag, content)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a CPU tensor as bytes, without a copy if it is contiguous."""
    return bytes_of(in_one_piece(tensor.cpu()))


_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_ARRAYS = {"bool", "float16", "float32", "float64", "complex64", "complex128", *_INTEGERS}


def dtype_of(name: str) -> torch.dtype:
    """The type of tensors that is sent under this name.

    Raises:
        ValueError: There is none.
    """
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point or dtype.is_complex or name in _ARRAYS):
        raise ValueError(f"unknown type of tensor. Received: {name!r}")
    return dtype


TENSORS = Codec(TensorLeaves())
"""The codec of trees with tensors in them."""
