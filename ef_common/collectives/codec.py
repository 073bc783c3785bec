"""A codec that turns Python values into bytes and arrays, without pickle.

A codec turns a tree of plain values into a JSON header and a list of *leaves*, and builds it again. Leaves stay
arrays (here of NumPy; tensors in `torch_codec`), so a large state is sent at memory speed. A type that is not
listed here raises: what comes over a network must not be able to run code.
"""

from __future__ import annotations

import base64
import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from ef_common.collectives.module_versions import versions_of, with_versions
from ef_common.errors import ProtocolError, UnsupportedError


class ArrayLeaves:
    """NumPy arrays as leaves. A framework's codec has a subclass of this for its own tensors."""

    def take(self, value: Any) -> tuple[str, Any] | None:
        """The tag and the leaf of a value that travels as a leaf; None for anything else."""
        if type(value) in (np.ndarray, np.memmap) and _travels(value.dtype):
            return "a", np.ascontiguousarray(value, value.dtype.newbyteorder("="))
        return None

    def give(self, tag: str, leaf: Any, shape: Sequence[int]) -> Any:
        """The value of a leaf; inverse of `take`.

        Raises:
            ValueError: Unknown tag.
        """
        if tag != "a":
            raise ValueError(f"unknown leaf. Received: tag={tag!r}")
        return np.asarray(leaf).reshape(shape)

    def spec(self, leaf: Any) -> tuple[str, list[int]]:
        """Name of the leaf's type, and its shape."""
        return leaf.dtype.name, list(leaf.shape)

    def empty(self, dtype: str, shape: Sequence[int]) -> Any:
        """Room for a leaf.

        Raises:
            TypeError, ValueError: There is no such type or shape.
        """
        return np.empty(shape, dtype=type_of_numbers(dtype))

    def as_bytes(self, leaf: Any) -> np.ndarray:
        """The leaf's memory, shape (bytes,), uint8; a view where it is contiguous."""
        return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)

    def encode_other(self, value: Any) -> list[Any] | None:
        """A node for a value of the framework's own that is no leaf."""
        return None

    def decode_other(self, tag: str, content: Any) -> Any:
        """Inverse of `encode_other`.

        Raises:
            ValueError: Unknown tag.
        """
        raise ValueError(f"unknown tag. Received: {tag!r}")


def _travels(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" or dtype.name == "bfloat16"


def type_of_numbers(name: object) -> np.dtype[Any]:
    """A NumPy type, by its name.

    Raises:
        TypeError: It is not a type of numbers.
    """
    # NumPy would parse another name, as a list of fields, say; and NumPy 1 knows types by numbers, too.
    found = np.dtype(np.sctypeDict.get(name, object) if isinstance(name, str) else object)
    if not _travels(found):
        raise TypeError(f"arrays of this type do not travel. Received: {name!r}")
    return found


class Codec:
    """Encodes trees of plain values and of the leaves that `leaves` knows.

    Plain are: None, bool, int, float, str, bytes, list, tuple, set, frozenset, deque, dict, Path, timedelta,
    and NumPy's numbers and arrays. Of a subclass, an enum of numbers say, it makes the class itself. A dict that
    torch's `state_dict()` returned keeps the versions of the modules.
    """

    def __init__(self, leaves: ArrayLeaves) -> None:
        self._leaves = leaves

    def takes(self, value: Any) -> bool:
        """Whether this value travels as a leaf."""
        return self._leaves.take(value) is not None

    def knows(self, value: Any) -> bool:
        """Whether `encode` accepts this value."""
        try:
            self.encode(value)
        except UnsupportedError:
            return False
        return True

    def encode(self, value: Any, *, what: str = "value") -> tuple[bytes, list[Any]]:
        """Encode a tree of plain values.

        Args:
            value: The tree.
            what: Description of the value, for the error.

        Returns:
            A header, and the leaves in it (not copied), in the order in which `decode` wants them.

        Raises:
            UnsupportedError: The tree contains something else; the message says where.
        """
        leaves: list[Any] = []
        tree = self._encode(value, leaves, what)
        specs = [self._leaves.spec(leaf) for leaf in leaves]
        return json.dumps({"tree": tree, "tensors": specs}).encode(), leaves

    def room(self, header: bytes, spare: Iterable[Any] = ()) -> list[Any]:
        """Leaves in the host's memory for what `header` describes.

        Args:
            header: Header from :meth:`encode`.
            spare: Leaves that may be used for it.

        Raises:
            ProtocolError: The header is not one that `encode` makes.
        """
        free: dict[tuple[str, tuple[int, ...]], list[Any]] = {}
        for leaf in spare:
            dtype, shape = self._leaves.spec(leaf)
            free.setdefault((dtype, tuple(shape)), []).append(leaf)
        try:
            kinds = [(str(dtype), tuple(shape)) for dtype, shape in _load(header)["tensors"]]
            return [free[kind].pop() if free.get(kind) else self._leaves.empty(*kind) for kind in kinds]
        except (TypeError, ValueError, RuntimeError, OverflowError, MemoryError) as error:
            raise ProtocolError(f"malformed tensors in a header: {error}") from None

    def decode(self, header: bytes, leaves: Sequence[Any]) -> Any:
        """Build the tree again; leaves are used as they are, not copied.

        Raises:
            ProtocolError: The header is not one that `encode` makes.
        """
        try:
            return self._decode(_load(header)["tree"], leaves)
        except (KeyError, IndexError, OverflowError, TypeError, ValueError, RuntimeError) as error:
            raise ProtocolError(f"a state that cannot be read: {error!r}") from None

    def dumps(self, value: Any, *, what: str = "value") -> bytes:
        """Encode a small tree into one byte string."""
        header, leaves = self.encode(value, what=what)
        return len(header).to_bytes(8, "big") + header + b"".join(self._leaves.as_bytes(x).tobytes() for x in leaves)

    def loads(self, payload: bytes) -> Any:
        """Inverse of :meth:`dumps`."""
        length = int.from_bytes(payload[:8], "big")
        header, rest = payload[8 : 8 + length], payload[8 + length :]
        leaves = self.room(header)
        offset = 0
        for leaf in leaves:
            flat = self._leaves.as_bytes(leaf)
            raw = rest[offset : offset + flat.size]
            if len(raw) != flat.size:
                raise ProtocolError("a value that is cut short")
            flat[:] = np.frombuffer(raw, dtype=np.uint8)
            offset += flat.size
        return self.decode(header, leaves)

    def _encode(self, value: Any, leaves: list[Any], where: str) -> Any:
        """Scalars stand for themselves; everything else is [tag, content]."""
        if value is None or isinstance(value, bool | str) or type(value) in (int, float):
            return value
        taken = self._leaves.take(value)
        if taken is not None:
            leaves.append(taken[1])
            return [taken[0], len(leaves) - 1, list(value.shape)]
        if isinstance(value, np.generic) and _travels(value.dtype):
            return ["n", value.dtype.name, base64.b64encode(value.tobytes()).decode()]
        if isinstance(value, deque):
            return ["q", [value.maxlen, [self._encode(item, leaves, f"{where}[{i}]") for i, item in enumerate(value)]]]
        if isinstance(value, bytes):
            return ["b", base64.b64encode(value).decode()]
        if isinstance(value, Path):
            return ["p", str(value)]
        if isinstance(value, timedelta):
            return ["s", [value.days, value.seconds, value.microseconds]]
        for tag, kind in _SEQUENCES.items():
            if type(value) is kind:
                return [tag, [self._encode(item, leaves, f"{where}[{i}]") for i, item in enumerate(value)]]
        if isinstance(value, dict):
            pairs = [
                [self._encode(k, leaves, where), self._encode(v, leaves, f"{where}[{k!r}]")] for k, v in value.items()
            ]
            versions = versions_of(value)
            if versions is not None:
                return ["m", [pairs, self._encode(versions, leaves, where)]]
            return ["o" if isinstance(value, OrderedDict) else "d", pairs]
        if isinstance(value, bool | int | float):  # their subclasses, enums of numbers among them
            return value.real
        node = self._leaves.encode_other(value)
        if node is not None:
            return node
        raise UnsupportedError(
            f"{where} cannot be sent to another worker: only plain values, tensors and arrays can. "
            f"Received: type={type(value).__module__}.{type(value).__qualname__}"
        )

    def _decode(self, node: Any, leaves: Sequence[Any]) -> Any:
        if not isinstance(node, list):
            return node
        tag, content = node[0], node[1]
        if len(node) > 2 and tag != "n":
            return self._leaves.give(tag, leaves[content], node[2])
        match tag:
            case "n":
                return np.frombuffer(base64.b64decode(node[2], validate=True), type_of_numbers(content))[0]
            case "q":
                maxlen, items = content
                return deque((self._decode(item, leaves) for item in items), maxlen)
            case "b":
                return base64.b64decode(content, validate=True)
            case "p":
                return Path(content)
            case "s":
                return timedelta(*content)
            case "d":
                return dict(self._decode_pairs(content, leaves))
            case "o":
                return OrderedDict(self._decode_pairs(content, leaves))
            case "m":
                pairs, versions = content
                return with_versions(OrderedDict(self._decode_pairs(pairs, leaves)), self._decode(versions, leaves))
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self._decode(item, leaves) for item in content)
        return self._leaves.decode_other(tag, content)

    def _decode_pairs(self, pairs: Any, leaves: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        return ((self._decode(key, leaves), self._decode(value, leaves)) for key, value in pairs)


_SEQUENCES: dict[str, Any] = {"l": list, "u": tuple, "e": set, "f": frozenset}


def _load(header: bytes) -> dict[str, Any]:
    try:
        document = json.loads(header)
    except ValueError as error:
        raise ProtocolError(f"a header that is not JSON: {error}") from None
    if not isinstance(document, dict) or not {"tree", "tensors"} <= document.keys():
        raise ProtocolError("a header without tree and tensors")
    return document


ARRAYS = Codec(ArrayLeaves())
"""The codec of trees with NumPy arrays in them."""
