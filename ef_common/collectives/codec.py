"""Python values as bytes and tensors, without pickle.

`encode` turns a tree of plain values into a JSON header and a list of tensors; `decode` builds it again. Tensors
stay tensors, so a large state is sent at memory speed. A type that is not listed here raises: what comes over a
network must not be able to run code.
"""

from __future__ import annotations

import base64
import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ef_common.errors import ProtocolError, UnsupportedError


def encode(value: Any, *, what: str = "value") -> tuple[bytes, list[Tensor]]:
    """Encode a tree of plain values.

    That is: None, bool, int, float, str, bytes, list, tuple, set, deque, dict, tensor, numpy array or number,
    Path, timedelta, torch dtype or device.

    Args:
        value: The tree.
        what: What it is, for the error.

    Returns:
        A header, and the tensors in it (not copied), in the order in which `decode` wants them.

    Raises:
        UnsupportedError: It holds something else; the message tells where.
    """
    tensors: list[Tensor] = []
    tree = _encode(value, tensors, what)
    specs = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    return json.dumps({"tree": tree, "tensors": specs}).encode(), tensors


def room(header: bytes, spare: Iterable[Tensor] = ()) -> list[Tensor]:
    """Tensors on the CPU for what `header` describes.

    Args:
        header: Of :func:`encode`.
        spare: Tensors that may be used for it.

    Raises:
        ProtocolError: The header is not one that `encode` makes.
    """
    specs = _load(header)["tensors"]
    free: dict[Any, list[Tensor]] = {}
    for tensor in spare:
        free.setdefault((tensor.dtype, tensor.shape), []).append(tensor)
    try:
        kinds = [(_dtype(name), torch.Size(shape)) for name, shape in specs]
        return [free[kind].pop() if free.get(kind) else torch.empty(kind[1], dtype=kind[0]) for kind in kinds]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ProtocolError(f"malformed tensors in a header: {error}") from None


def decode(header: bytes, tensors: Sequence[Tensor]) -> Any:
    """Build the tree again; tensors are used as they are, not copied.

    Raises:
        ProtocolError: The header is not one that `encode` makes.
    """
    try:
        return _decode(_load(header)["tree"], tensors)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise ProtocolError(f"a state that cannot be read: {error!r}") from None


def dumps(value: Any, *, what: str = "value") -> bytes:
    """Encode a small tree into one byte string."""
    header, tensors = encode(value, what=what)
    return len(header).to_bytes(8, "big") + header + b"".join(as_bytes(t).numpy().tobytes() for t in tensors)


def loads(payload: bytes) -> Any:
    """Inverse of :func:`dumps`."""
    length = int.from_bytes(payload[:8], "big")
    header, rest = payload[8 : 8 + length], payload[8 + length :]
    tensors = room(header)
    offset = 0
    for tensor in tensors:
        flat = as_bytes(tensor)
        raw = rest[offset : offset + flat.numel()]
        if len(raw) != flat.numel():
            raise ProtocolError("a value that is cut short")
        if raw:
            flat.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        offset += flat.numel()
    return decode(header, tensors)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous CPU tensor as bytes, without a copy where it is contiguous already."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def _load(header: bytes) -> dict[str, Any]:
    try:
        document = json.loads(header)
    except ValueError as error:
        raise ProtocolError(f"a header that is not JSON: {error}") from None
    if not isinstance(document, dict) or not {"tree", "tensors"} <= document.keys():
        raise ProtocolError("a header without tree and tensors")
    return document


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"unknown type of tensor. Received: {name!r}")
    return dtype


def _encode(value: Any, tensors: list[Tensor], where: str) -> Any:
    """Scalars stand for themselves; everything else is [tag, content]."""
    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
        return value
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return ["t", len(tensors) - 1]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        tensors.append(torch.from_numpy(np.ascontiguousarray(value)))
        return ["a", len(tensors) - 1, list(value.shape)]
    if isinstance(value, np.generic):
        return ["n", value.dtype.str, value.item()]
    if isinstance(value, bytes):
        return ["b", base64.b64encode(value).decode()]
    if isinstance(value, Path):
        return ["p", str(value)]
    if isinstance(value, timedelta):
        return ["s", value.total_seconds()]
    if isinstance(value, torch.dtype):
        return ["y", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["v", str(value)]
    for tag, kind in _SEQUENCES.items():
        if type(value) is kind:
            return [tag, [_encode(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)]]
    if isinstance(value, dict):
        tag = "o" if isinstance(value, OrderedDict) else "d"
        pairs = [[_encode(k, tensors, where), _encode(v, tensors, f"{where}[{k!r}]")] for k, v in value.items()]
        return [tag, pairs]
    if isinstance(value, bool | int | float):  # their subclasses, enums of numbers among them
        return value.real
    raise UnsupportedError(
        f"{where} cannot be sent to another worker: only plain values, tensors and arrays can. "
        f"Received: type={type(value).__module__}.{type(value).__qualname__}"
    )


_SEQUENCES: dict[str, Any] = {"l": list, "u": tuple, "e": set, "f": frozenset, "q": deque}


def _decode(node: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(node, list):
        return node
    tag, content = node[0], node[1]
    match tag:
        case "t":
            return tensors[content]
        case "a":
            return tensors[content].numpy().reshape(node[2])
        case "n":
            return np.dtype(content).type(node[2])
        case "b":
            return base64.b64decode(content, validate=True)
        case "p":
            return Path(content)
        case "s":
            return timedelta(seconds=content)
        case "y":
            return _dtype(content)
        case "v":
            return torch.device(content)
        case "d" | "o":
            pairs = ((_decode(k, tensors), _decode(v, tensors)) for k, v in content)
            return OrderedDict(pairs) if tag == "o" else dict(pairs)
        case _:
            return _SEQUENCES[tag](_decode(item, tensors) for item in content)
