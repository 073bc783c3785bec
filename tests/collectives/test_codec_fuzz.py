"""The codec on everything that a state may hold, and on everything that a network may deliver."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from datetime import timedelta
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ef_common.collectives.torch_codec import TENSORS, as_bytes
from ef_common.collectives.torch_tensors import TorchMemory, bytes_of
from ef_common.errors import ProtocolError, UnsupportedError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def equal(a: Any, b: Any) -> bool:
    """Equal in value and in type, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            equal(ka, kb) and equal(va, vb) for (ka, va), (kb, vb) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b or (a != a and b != b))


def tensors() -> st.SearchStrategy[torch.Tensor]:
    shapes = st.lists(st.integers(0, 3), max_size=3)
    return st.builds(
        lambda shape, dtype, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
        shapes,
        st.sampled_from(DTYPES),
        st.integers(0, 9),
    )


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.builds(lambda parts: Path(*parts), st.lists(st.sampled_from("ab"), min_size=1)),
    st.builds(lambda ms: timedelta(milliseconds=ms), st.integers(-(10**6), 10**6)),
    st.sampled_from(DTYPES),
    st.just(torch.device("cpu")),
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.int64, st.integers(-(2**63), 2**63 - 1)),
)
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
values = st.recursive(
    st.one_of(scalars, tensors(), st.builds(np.arange, st.integers(0, 5))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(deque),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.frozensets(st.integers()),
        st.sets(st.text()),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=300)
@given(values)
def test_value_comes_back_as_it_was(value: Any) -> None:
    assert equal(TENSORS.loads(TENSORS.dumps(value)), value)


@settings(deadline=None, max_examples=100)
@given(values)
def test_tensors_travel_beside_the_header(value: Any) -> None:
    header, sent = TENSORS.encode(value)
    received = TENSORS.room(header)
    for target, source in zip(received, sent, strict=True):
        target.copy_(source)
    assert equal(TENSORS.decode(header, received), value)


def test_tensor_that_requires_a_gradient_or_is_not_contiguous_is_sent_by_value() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    result = TENSORS.loads(TENSORS.dumps({"p": parameter, "t": parameter.t()}))
    assert torch.equal(result["p"], parameter.detach())
    assert torch.equal(result["t"], parameter.detach().t())
    assert not result["p"].requires_grad


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_tensor_of_one_element_is_sent_and_received_whatever_its_strides_are(shape: tuple[int, ...]) -> None:
    one = torch.arange(6.0)[3:].as_strided(shape, (2, 3)[: len(shape)])
    assert one.is_contiguous()
    assert equal(TENSORS.loads(TENSORS.dumps(one)), one)
    with TorchMemory().room(one) as room:
        room[:] = TorchMemory().read(torch.tensor(5.0))
    assert one.tolist() == torch.full(shape, 5.0).tolist()


def test_bytes_of_a_column_are_refused_as_they_are_not_in_one_piece() -> None:
    with pytest.raises(RuntimeError, match="view"):
        bytes_of(torch.arange(16.0).reshape(4, 4)[:, 1])


def test_tensor_that_is_conjugate_or_negative_by_a_flag_alone_is_sent_by_value() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    for lazy in (value.conj(), value.conj().imag):
        assert lazy.is_conj() or lazy.is_neg()
        assert TENSORS.loads(TENSORS.dumps(lazy)).tolist() == lazy.tolist()


def test_number_of_an_enumeration_becomes_a_plain_number() -> None:
    level = IntEnum("level", {"high": 3})
    assert equal(TENSORS.loads(TENSORS.dumps([level.high])), [3])


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "place", "kind"),
    [
        ({"callbacks": [1, {"fn": print}]}, "state['callbacks'][1]['fn']", "builtin_function_or_method"),
        ((1, object()), "state[1]", "object"),
        ({"colour": Colour.RED}, "state['colour']", "Colour"),
        ([np.array(["text"])], "state[0]", "ndarray"),
        ({"generator": torch.Generator()}, "state['generator']", "Generator"),
    ],
)
def test_unknown_type_is_refused_naming_its_place(value: Any, place: str, kind: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        TENSORS.encode(value, what="state")
    assert str(caught.value).startswith(place + " ")
    assert str(caught.value).endswith(kind)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[]",
        b"null",
        b'{"tree": 1}',
        b'{"tree": ["t", 0], "tensors": []}',
        b'{"tree": ["?", 0], "tensors": []}',
        b'{"tree": ["t"], "tensors": []}',
        b'{"tree": [], "tensors": []}',
        b'{"tree": ["d", [[1]]], "tensors": []}',
        b'{"tree": ["y", "nonsense"], "tensors": []}',
        b'{"tree": ["b", "*"], "tensors": []}',
        b'{"tree": ["l", 5], "tensors": []}',
        b'{"tree": ["s", "x"], "tensors": []}',
        b'{"tree": ["v", "nonsense"], "tensors": []}',
        b'{"tree": ["n", "nonsense", 1], "tensors": []}',
        b'{"tree": [["l"], []], "tensors": []}',
        b'{"tree": ["e", [["l", []]]], "tensors": []}',
        b'{"tree": ["a", 0, [7]], "tensors": [["float32", [2]]]}',
        b'{"tree": ["t", 0], "tensors": [["nonsense", [1]]]}',
        b'{"tree": ["t", 0], "tensors": [["float32", [-1]]]}',
        b'{"tree": ["t", 0], "tensors": [["float32"]]}',
        b'{"tree": ["t", 0], "tensors": 3}',
        b'{"tree": ["t", "x"], "tensors": [["float32", [1]]]}',
    ],
)
def test_malformed_header_is_refused(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        TENSORS.decode(header, TENSORS.room(header))


@settings(deadline=None, max_examples=200)
@given(values, st.data())
def test_damaged_payload_is_refused_or_read(value: Any, data: st.DataObject) -> None:
    """Whatever arrives: no other error than `ProtocolError`."""
    payload = bytearray(TENSORS.dumps(value))
    position = data.draw(st.integers(8, len(payload) - 1))
    payload[position] = data.draw(st.integers(0, 255))
    try:
        TENSORS.loads(bytes(payload[: data.draw(st.integers(0, len(payload)))]))
    except ProtocolError:
        return


def test_header_holds_no_code() -> None:
    header, _ = TENSORS.encode({"x": [torch.zeros(2), b"\x80\x04."]})
    assert json.loads(header)["tensors"] == [["float32", [2]]]
