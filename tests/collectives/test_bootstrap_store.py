"""Values that process groups exchange to connect."""

from __future__ import annotations

import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ef_common.collectives.bootstrap_store import pack, unpack
from ef_common.errors import ProtocolError


@given(st.binary(max_size=100))
def test_packed_value_comes_back(value: bytes) -> None:
    assert unpack(pack(value)) == value


def test_numbers_that_grow_by_one_take_no_room() -> None:
    value = b"the address of a device" + b"".join((7000 + pair).to_bytes(8, "little") for pair in range(1024))
    packed = pack(value)
    assert len(packed) < 100
    assert unpack(packed) == value


def test_packing_needs_little_memory() -> None:
    """malloc keeps for each thread what that has needed, and each new group has new threads."""
    value = b"".join((7000 + pair).to_bytes(8, "little") for pair in range(1024))
    tracemalloc.start()
    try:
        pack(value)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize(
    "packed", [b"", b"\0", b"\0none", b"\3" + zlib.compress(b"x" * 7), b"\x09" + zlib.compress(b"")]
)
def test_what_nobody_has_packed_raises_protocol_error(packed: bytes) -> None:
    with pytest.raises(ProtocolError, match="no address"):
        unpack(packed)
