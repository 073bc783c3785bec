"""What `torch.save` writes for a tree, before anything of its large tensors has been copied.

torch hands each tensor's memory to the file in one piece. So a tree in which large tensors are replaced by memory that
nobody has touched is saved into a recorder, which keeps all bytes but those: it notes where they belong. What it has
noted is enough for any worker that holds the same tensors to write any range of the file.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ef_common.errors import UnsupportedError
from ef_lightning.host_copy import Path, copy_tree, identity_of, is_plain

IsShared = Callable[[Path, Tensor], bool]
_ALIGNMENT = 64


class Slice(NamedTuple):
    """Some bytes of a tensor."""

    path: Path
    start: int
    stop: int


class Segment(NamedTuple):
    """Bytes of the file that belong together.

    Args:
        size: How many.
        path: Of the tensor that they are; empty if they are literal.
        kind: Type and shape of that tensor.
    """

    size: int
    path: Path = ()
    kind: str = ""


class Layout:
    """A file in segments.

    Args:
        segments: In order.
        literal: What is no tensor, one after the other.
    """

    def __init__(self, segments: Sequence[Segment], literal: bytes) -> None:
        self.segments = tuple(segments)
        self.literal = literal
        self.kinds = {segment.path: segment.kind for segment in self.segments if segment.path}
        self.size = sum(segment.size for segment in self.segments)

    def parts(self, start: int, stop: int) -> Iterator[memoryview | Slice]:
        """What a range of the file consists of, in order."""
        literal, at, used = memoryview(self.literal), 0, 0
        for size, path, _ in self.segments:
            first, last = max(start - at, 0), min(stop - at, size)
            if first < last:
                yield Slice(path, first, last) if path else literal[used + first : used + last]
            at += size
            used += 0 if path else size

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        segments = [[size, list(path), kind] for size, path, kind in self.segments]
        return {"segments": segments, "literal": np.frombuffer(self.literal, dtype=np.uint8)}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Layout:
        """Inverse of `plain`."""
        segments = [Segment(size, tuple(path), kind) for size, path, kind in plain["segments"]]
        return cls(segments, np.asarray(plain["literal"]).tobytes())


def save(tree: Any, file: Any) -> None:
    """As `torch.save`, without checksums of its own: those of the manifest are there, and cost a tenth."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tree, file)
    finally:
        torch.serialization.set_crc32_options(before)


def layout_of(tree: Any, is_shared: IsShared) -> Layout:
    """The layout of the file that a host copy of this tree is saved to with `save`.

    Args:
        tree: Dicts, lists, tuples, tensors and other values; see `host_copy`.
        is_shared: Which tensors of it all workers hold; not asked for empty ones.

    Raises:
        UnsupportedError: torch does not write its files as expected.
    """
    stand_ins = _StandIns(is_shared)
    stand_ins.measure(tree)
    recorder = _Recorder(stand_ins)
    save(copy_tree(tree, stand_ins.tensor), recorder)
    layout = Layout(recorder.segments, bytes(recorder.literal))
    if sum(bool(segment.path) for segment in layout.segments) != len(stand_ins.found):
        raise UnsupportedError("this version of torch does not write the memory of a tensor in one piece")
    return layout


def kind_of(tensor: Tensor) -> str:
    """Type and shape."""
    return f"{tensor.dtype} {tuple(tensor.shape)}"


class _StandIns:
    """Copies tensors as `HostCopy` does, with untouched memory in place of what is shared.

    Attributes:
        found: What is shared, by the address of what stands for it.
    """

    def __init__(self, is_shared: IsShared) -> None:
        self._is_shared = is_shared
        self._copies: dict[Any, Tensor] = {}
        self._room: mmap.mmap | None = None
        self._used = 0
        self.found: dict[int, Segment] = {}

    def measure(self, tree: Any) -> None:
        """Take as much memory as the tensors of a tree will need."""
        size = sum(_aligned(tensor.nbytes) for tensor in _tensors(tree))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._room = mmap.mmap(-1, max(1, size), flags=flags)

    def tensor(self, value: Tensor, path: Path) -> Tensor:
        """What stands for a tensor of the tree, which lies there."""
        if not is_plain(value):
            return value.cpu().clone()
        key = identity_of(value)
        if key not in self._copies or not value.numel():
            if value.numel() and self._is_shared(path, value):
                self._copies[key] = self._stand_in(value, path)
            else:
                self._copies[key] = torch.empty(value.shape, dtype=value.dtype).copy_(value)
        return self._copies[key]

    def _stand_in(self, value: Tensor, path: Path) -> Tensor:
        if self._room is None:
            raise RuntimeError("measure first")
        flat = torch.frombuffer(self._room, dtype=value.dtype, count=value.numel(), offset=self._used)
        self._used += _aligned(value.nbytes)
        self.found[flat.data_ptr()] = Segment(value.nbytes, path, kind_of(value))
        return flat.view(value.shape)


class _Recorder:
    """A file to write to, which keeps what is literal."""

    def __init__(self, stand_ins: _StandIns) -> None:
        self._found = stand_ins.found
        self.literal = bytearray()
        self.segments: list[Segment] = []

    def write(self, data: Any) -> int:
        """Keep it, or note what it stands for."""
        view = memoryview(data).cast("B")
        if not len(view):
            return 0
        tensor = self._found.get(np.frombuffer(view, dtype=np.uint8).ctypes.data)
        if tensor is not None and tensor.size == len(view):
            self.segments.append(tensor)
            return len(view)
        self.literal += view
        before = 0
        if self.segments and not self.segments[-1].path:
            before = self.segments.pop().size
        self.segments.append(Segment(before + len(view)))
        return len(view)

    def flush(self) -> None:
        """Nothing to do."""


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        if tree.layout is torch.strided:
            yield tree
    elif isinstance(tree, dict) or type(tree) in (list, tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(part)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
