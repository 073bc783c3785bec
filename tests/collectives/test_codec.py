"""Values as bytes and tensors: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ef_common.collectives.codec import ARRAYS
from ef_common.collectives.torch_codec import TENSORS
from ef_common.errors import ProtocolError, UnsupportedError

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner) | st.frozensets(scalars),
    max_leaves=20,
)


def _through(value: Any) -> Any:
    header, tensors = TENSORS.encode(value)
    room = TENSORS.room(header)
    for empty, tensor in zip(room, tensors, strict=True):
        empty.copy_(tensor)
    return TENSORS.decode(header, room)


@given(trees)
def test_tree_round_trip_gives_an_equal_tree_of_the_same_types(value: Any) -> None:
    for copy in (_through(value), TENSORS.loads(TENSORS.dumps(value))):
        assert copy == value
        assert type(copy) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(b=1, a=2),
        deque([1, 2]),
        deque([(1,), "a"], maxlen=2),
        {3, 4},
        Path("a/b"),
        timedelta(seconds=1.5),
        timedelta(days=200_000, microseconds=1),
        torch.float16,
        torch.device("cpu"),
        np.float32(0.5),
        np.int64(7),
        np.bool_(True),
        np.uint8(200),
        np.float16(-0.1),
        np.longdouble(1) / 3,
        np.complex64(1 + 2j),
    ],
)
def test_special_value_round_trip_is_equal(value: Any) -> None:
    copy = TENSORS.loads(TENSORS.dumps({"x": [value]}))["x"][0]
    assert copy == value
    assert type(copy) is type(value)
    assert repr(copy) == repr(value)


def test_state_of_a_module_keeps_the_versions_of_its_parts() -> None:
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    state._metadata["0"]["of the user's"] = object()
    copy = TENSORS.loads(TENSORS.dumps({"x": [state]}))["x"][0]
    assert type(copy) is OrderedDict
    assert copy._metadata == {"": {"version": 1}, "0": {"version": 2}}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(3, dtype=torch.int64),
        torch.tensor([], dtype=torch.float32),
        torch.tensor([True, False]),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    ],
)
def test_tensor_round_trip_keeps_type_shape_and_bits(tensor: torch.Tensor) -> None:
    copy = TENSORS.loads(TENSORS.dumps(("t", tensor)))[1]
    assert copy.dtype == tensor.dtype
    assert copy.shape == tensor.shape
    assert torch.equal(copy, tensor)


@pytest.mark.parametrize("codec", [ARRAYS, TENSORS])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.uint32).reshape(3, 4),
        np.arange(12.0).reshape(3, 4)[::2, ::-1],
        np.arange(3, dtype=">i4"),
        np.frombuffer(b"abcd", np.uint16),  # cannot be written to
        np.broadcast_to(np.float16(1.5), (2, 2)),
        np.array([True, False]),
        np.zeros((2, 0), np.complex64),
        np.array(3, np.int8),
    ],
)
@pytest.mark.filterwarnings("error")
def test_array_round_trip_is_equal(codec: Any, array: Any) -> None:
    copy = codec.loads(codec.dumps(array))
    np.testing.assert_array_equal(copy, array)
    assert copy.dtype == array.dtype.newbyteorder("=")
    assert copy.shape == array.shape


@pytest.mark.parametrize("codec", [ARRAYS, TENSORS])
@pytest.mark.parametrize(
    "array", [np.ma.masked_equal([1, 2], 2), np.array(["a"]), np.array([{}]), np.zeros(2, "f4,i4")]
)
def test_arrays_of_another_kind_raise(codec: Any, array: Any) -> None:
    with pytest.raises(UnsupportedError, match="rray"):
        codec.dumps([array])


def test_what_is_received_is_on_the_host_whatever_the_default_device_is() -> None:
    sent = [torch.ones(3), np.ones(2)]
    with torch.device("meta"):
        copies = [_through(sent), TENSORS.loads(TENSORS.dumps(sent))]
    for tensor, array in copies:
        assert tensor.tolist() == [1.0] * 3
        assert array.tolist() == [1.0] * 2


def test_array_that_torch_does_not_know_raises() -> None:
    with pytest.raises(UnsupportedError, match="ndarray"):
        TENSORS.dumps(np.zeros(2, np.longdouble))


@pytest.mark.parametrize("value", [np.datetime64("2026-01-01"), np.void(b"x"), Fraction(1, 2)])
def test_value_of_another_type_raises_and_tells_which(value: Any) -> None:
    with pytest.raises(UnsupportedError, match=type(value).__name__):
        TENSORS.dumps([value])


class Strange:
    """Something that only pickle could carry."""


def test_unknown_type_raises_and_tells_where() -> None:
    with pytest.raises(UnsupportedError, match=r"state\['a'\]\[1\] .*Strange"):
        TENSORS.encode({"a": [0, Strange()]}, what="state")


@given(st.binary(max_size=64))
def test_garbage_raises_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        TENSORS.room(payload)
    with pytest.raises(ProtocolError):
        TENSORS.decode(payload, [])


@pytest.mark.parametrize(
    "document",
    [
        {"tree": ["t", 0], "tensors": []},
        {"tree": ["?", 0], "tensors": []},
        {"tree": [], "tensors": []},
        {"tree": ["b", 5], "tensors": []},
        {"tree": ["s", 1e308], "tensors": []},
        {"tree": ["n", "O", "AAAAAAAAAAA="], "tensors": []},
        {"tree": ["n", "float64", "AAAA"], "tensors": []},
        {"tree": ["n", "float64", ""], "tensors": []},
        {"tree": ["n", 3, ""], "tensors": []},
        {"tree": ["n", "U1", "AAAAAA=="], "tensors": []},
        {"tree": ["n", "float64", "AAAAAAAAAAA=!"], "tensors": []},
        {"tree": ["s", 3], "tensors": []},
        {"tree": ["s", ["a", 0, 0]], "tensors": []},
        {"tree": ["q", [-1, []]], "tensors": []},
        {"tree": ["q", [1]], "tensors": []},
        {"tree": ["m", [[], 3]], "tensors": []},
        {"tree": ["m", [[]]], "tensors": []},
    ],
)
def test_malformed_tree_raises_a_protocol_error(document: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        TENSORS.decode(json.dumps(document).encode(), [])


@pytest.mark.parametrize(
    "specs", [[["nonsense", [1]]], [["float32", [-1]]], [["load", [1]]], [["quint8", [1]]], [["bits8", [1]]], [[1]], 3]
)
def test_malformed_tensor_specs_raise_a_protocol_error(specs: Any) -> None:
    header = json.dumps({"tree": None, "tensors": specs}).encode()
    with pytest.raises(ProtocolError):
        TENSORS.room(header)


@pytest.mark.parametrize("name", ["O", "object", "U5", "V8", "f4,f4", ",", "M8[s]", "", "nonsense"])
def test_types_of_arrays_that_do_not_travel_raise_a_protocol_error(name: str) -> None:
    header = json.dumps({"tree": None, "tensors": [[name, [2]]]}).encode()
    with pytest.raises(ProtocolError):
        ARRAYS.room(header)


def test_value_that_is_cut_short_raises_a_protocol_error() -> None:
    payload = TENSORS.dumps(torch.arange(10))
    with pytest.raises(ProtocolError):
        TENSORS.loads(payload[:-3])


def test_room_is_taken_from_spare_tensors_of_the_same_type_and_shape() -> None:
    header, _ = TENSORS.encode([torch.ones(2, 3), torch.ones(2, 3), torch.ones(3, dtype=torch.float64), torch.ones(1)])
    spare = [torch.zeros(2, 3), torch.zeros(3), torch.zeros(3, dtype=torch.float64), torch.zeros(2, 3, 1)]
    room = TENSORS.room(header, spare)
    assert [any(tensor is other for other in spare) for tensor in room] == [True, False, True, False]
    assert [(t.dtype, tuple(t.shape)) for t in room] == [
        (torch.float32, (2, 3)),
        (torch.float32, (2, 3)),
        (torch.float64, (3,)),
        (torch.float32, (1,)),
    ]
