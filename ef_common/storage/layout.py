"""The layout of a file, known before any of its large arrays has been copied.

Frameworks hand each array's memory to the file in one piece. So a state in which large arrays are replaced by memory
that nobody has touched is saved into a :class:`Recorder`, which keeps all bytes but those: it notes where they belong.
What it has noted is enough for any worker that holds the same arrays to write any range of the file.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ef_common.errors import UnsupportedError

LEAST_ARRAY_BYTES = 4096
"""Smaller arrays are a part of the layout, which all workers are sent."""

Path = tuple[Any, ...]
"""Where in a state something lies: keys and indices, from the outermost one on."""


class Slice(NamedTuple):
    """A range of an array's bytes."""

    path: Path
    start: int
    stop: int


class Segment(NamedTuple):
    """Bytes of the file that belong together.

    Args:
        size: How many.
        path: Path of the array that they belong to; empty if they are literal.
        kind: Type and shape of that array.
    """

    size: int
    path: Path = ()
    kind: str = ""


class FileLayout:
    """A file in segments.

    Args:
        segments: In order.
        literal: All bytes that belong to no array, one after the other.
    """

    def __init__(self, segments: Sequence[Segment], literal: bytes) -> None:
        self.segments = tuple(segments)
        self.literal = literal
        self.kinds = {segment.path: segment.kind for segment in self.segments if segment.path}
        self.size = sum(segment.size for segment in self.segments)

    @property
    def num_arrays(self) -> int:
        """Number of segments that are arrays."""
        return sum(bool(segment.path) for segment in self.segments)

    def parts(self, start: int, stop: int) -> Iterator[memoryview | Slice]:
        """The parts of a range of the file, in order."""
        literal, at, used = memoryview(self.literal), 0, 0
        for size, path, _ in self.segments:
            first, last = max(start - at, 0), min(stop - at, size)
            if first < last:
                yield Slice(path, first, last) if path else literal[used + first : used + last]
            at += size
            used += 0 if path else size

    def slices(self, ranges: Sequence[tuple[int, int]]) -> list[Slice]:
        """The parts of arrays in some ranges of the file."""
        parts = [part for start, stop in ranges for part in self.parts(start, stop)]
        return [part for part in parts if isinstance(part, Slice)]

    def write(self, file: Any, start: int, stop: int, bytes_of: Callable[[Slice], Any]) -> None:
        """Write a range.

        Args:
            file: To write to.
            start: First byte of the range.
            stop: The one behind its last.
            bytes_of: The bytes of an array.
        """
        for part in self.parts(start, stop):
            file.write(bytes_of(part) if isinstance(part, Slice) else part)

    def plain(self) -> dict[str, Any]:
        """The layout as plain values."""
        segments = [[size, list(path), kind] for size, path, kind in self.segments]
        return {"segments": segments, "literal": np.frombuffer(self.literal, dtype=np.uint8)}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> FileLayout:
        """Inverse of `plain`."""
        segments = [Segment(size, tuple(path), kind) for size, path, kind in plain["segments"]]
        return cls(segments, np.asarray(plain["literal"]).tobytes())


class Recorder(io.FileIO):
    """A file in memory that a state is saved to; stand-ins for arrays take no room in it.

    Args:
        arrays: Segments of the file, by the address of the memory that stands for them. May grow while it is written.
    """

    def __init__(self, arrays: Mapping[int, Segment]) -> None:
        super().__init__(os.memfd_create("layout", os.MFD_CLOEXEC), "r+b")
        self._arrays = arrays
        self._found: dict[int, Segment] = {}

    def write(self, data: Any) -> int:
        """Keep the bytes, or note the array that they stand in for."""
        view = memoryview(data).cast("B")
        if not len(view):
            return 0
        array = self._arrays.get(address_of(view))
        if array is None or array.size != len(view):
            return super().write(view) or 0
        self._found[self.tell()] = array
        self.seek(len(view), os.SEEK_CUR)
        return len(view)

    def layout(self) -> FileLayout:
        """The layout of what has been written; missing arrays have been written in another way."""
        segments: list[Segment] = []
        literal = bytearray()
        end = os.fstat(self.fileno()).st_size
        at = 0
        for start, array in sorted(self._found.items()):
            if start > at:
                segments.append(Segment(start - at))
                literal += os.pread(self.fileno(), start - at, at)
            segments.append(array)
            at = start + array.size
        if end > at:
            segments.append(Segment(end - at))
            literal += os.pread(self.fileno(), end - at, at)
        return FileLayout(segments, bytes(literal))


class StandIns:
    """Memory that stands in for arrays, and takes no physical memory as long as nobody touches it.

    Args:
        sizes: Bytes of each array that it may have to stand for.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, max(1, sum(map(_aligned, sizes))), flags=flags)
        self._used = 0
        self._segments: dict[int, Segment] = {}

    def take(self, segment: Segment) -> memoryview:
        """The stand-in for the array of a segment."""
        memory = memoryview(self._memory)[self._used : self._used + segment.size]
        self._used += _aligned(segment.size)
        self._segments[address_of(memory)] = segment
        return memory

    def layout(self, save: Callable[[Recorder], object], *, writer: str, array: str) -> FileLayout:
        """The layout of the file that `save` writes for a state with these stand-ins.

        Args:
            save: Writes the file.
            writer: The package whose code does.
            array: The framework's word for an array, for messages.

        Raises:
            UnsupportedError: It does not write its files as expected.
        """
        with Recorder(self._segments) as recorder:
            save(recorder)
            layout = recorder.layout()
        if layout.num_arrays != len(self._segments):
            raise UnsupportedError(f"this version of {writer} does not write the memory of a {array} in one piece")
        return layout


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


def address_of(view: memoryview) -> int:
    """The address of some bytes in memory."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
