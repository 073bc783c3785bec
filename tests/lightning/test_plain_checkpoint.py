"""Checkpoints with more than tensors and plain values, among them some that want to run code."""

from __future__ import annotations

import copy
import enum
import io
import os
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ef_common.collectives.torch_codec import TENSORS
from ef_common.errors import ProtocolError, UsageError
from ef_lightning.host_copy import copy_tree
from ef_lightning.plain_checkpoint import CHECKPOINT_KEY, PlainCheckpoints


@dataclass
class Normalizer:
    """An object of a user's."""

    mean: float


class Scaler(Normalizer):
    """Another one."""


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Pair(NamedTuple):
    first: int
    second: int


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._folder),)


def saved(tree: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    return file


def there_and_back(checkpoint: dict[str, Any], weights_only: bool | None = None) -> dict[str, Any]:
    checkpoints = PlainCheckpoints(weights_only)
    return checkpoints.load(saved(checkpoints.of(checkpoint)))


PLAIN = {
    "epoch": 3,
    "state_dict": OrderedDict(w=torch.arange(3.0), b=torch.zeros(())),
    "callbacks": {"a": [None, True, 1.5, "x", (1, 2)], ("b", 1): {2: b"x", (3, 4): {5}}, "c": Counter("aab")},
    "kinds": [torch.float16, torch.device("cpu"), torch.Size((1, 2)), complex(1, 2)],
    "hyper_parameters": {"width": 4, "rates": [0.1, 0.2]},
    "hparams_name": "kwargs",
    CHECKPOINT_KEY: {"running": torch.ones(2)},
}


def test_plain_checkpoint_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    plain = PlainCheckpoints(None).of(PLAIN)
    assert plain == PLAIN
    assert str(torch.load(saved(plain), weights_only=True)) == str(plain)
    assert not caplog.text


VALUES = [
    np.float64(0.1),
    np.int32(7),
    np.bool_(True),
    np.complex64(1j),
    np.longdouble(1) / 3,
    np.arange(6.0).reshape(2, 3)[:, ::-1],
    np.array([True, False]),
    np.zeros((0, 2), np.uint16),
    np.broadcast_to(np.float32(1.5), (2, 2)),
    Path("a/b"),
    timedelta(seconds=1.5),
    deque([1, np.float32(2)], maxlen=2),
    frozenset({1, "a"}),
    b"",
    {b"x"},
    {Path("a"), "b"},
    {Path("a"): 1, (np.int64(2), 3): [np.ones(2), torch.ones(2)]},
    {float("nan"): np.ones(1)},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_that_newcomers_get_are_in_checkpoints_too(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = {"callbacks": {"mine": {"first": value, "second": [1, (value, 2)]}}, "optimizer_states": [value]}
    found = there_and_back(checkpoint)
    mine = found["callbacks"]["mine"]
    for copied in (mine["first"], mine["second"][1][0], found["optimizer_states"][0]):
        assert type(copied) is type(value)
        assert repr(copied) == repr(value) or (type(value) is set and copied == value)
    assert found == {**checkpoint, **found, CHECKPOINT_KEY: {}}
    assert mine["second"][1][1] == 2
    assert not caplog.text


OTHERS = [
    Color.RED,
    Level.LOW,
    {Level.LOW: 1},
    deque([Level.LOW]),
    {1: {Path("a"): Level.LOW}},
    Pair(1, 2),
    {Pair(1, 2): 3},
    1 << 5000,
    {1 << 5000},
    {Path("a"): 1 << 5000},
    np.ma.masked_equal([1, 2], 2),
    np.zeros(2, np.longdouble),
    np.array(["a"]),
    np.array([{}], dtype=object),
    np.datetime64("2026-01-01"),
    Fraction(1, 2),
    range(3),
    lambda: 1,
]


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: type(value).__name__)
def test_values_that_would_come_back_as_others_are_warned_of(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = {"callbacks": {"mine": [1, value]}}
    plain = PlainCheckpoints(None).of(checkpoint)["callbacks"]["mine"][1]
    assert plain is value or plain == {1: value[1]}
    assert "will not go on from its checkpoints" in caplog.text
    assert "['callbacks']['mine'][1]" in caplog.text


def test_dicts_of_other_classes_become_dicts() -> None:
    found = there_and_back({"callbacks": OrderedDict(a=Counter("aab"), b=defaultdict(list, c=[np.float64(2)]))})
    assert found["callbacks"] == {"a": {"a": 2, "b": 1}, "b": {"c": [2]}}
    assert {type(part) for part in (found["callbacks"], *found["callbacks"].values())} == {dict}
    assert type(found["callbacks"]["b"]["c"][0]) is np.float64
    found = there_and_back({"callbacks": [Counter([Path("a")]), defaultdict(list, {np.int64(1): [2]})]})
    assert found["callbacks"] == [{Path("a"): 1}, {1: [2]}]


@pytest.mark.parametrize("extra", [1, np.ones(2)])
def test_state_of_a_module_keeps_the_versions_of_its_parts(extra: Any) -> None:
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    state["_extra_state"] = extra
    for tree in (state, copy_tree(state, lambda tensor, _: tensor.clone())):
        found = there_and_back({"state_dict": tree})["state_dict"]
        assert found._metadata == {"": {"version": 1}, "0": {"version": 2}}
        assert repr(found["_extra_state"]) == repr(extra)


def test_array_in_a_file_is_encoded_as_any(tmp_path: Path) -> None:
    array = np.memmap(tmp_path / "array", np.float32, "w+", shape=(3,))
    array[:] = 1
    assert there_and_back({"callbacks": [array]})["callbacks"][0].tolist() == [1, 1, 1]


def test_many_numbers_come_back_in_lists_and_tuples() -> None:
    numbers = [np.float32(i) for i in range(20_000)]
    found = there_and_back({"callbacks": {"a": numbers, "b": tuple(numbers)}})["callbacks"]
    assert (found["a"], found["b"]) == (numbers, tuple(numbers))
    assert {type(number) for number in (*found["a"], *found["b"])} == {np.float32}
    mixed = [np.float32(1), 1.0, np.float64(2), (np.int8(1), np.int8(2), np.int16(3)), [np.float32(3)], []]
    assert repr(there_and_back({"callbacks": mixed})["callbacks"]) == repr(mixed)


def test_arrays_are_not_copied_before_the_tensors_are() -> None:
    array = np.arange(6.0)
    _, _, [leaf] = PlainCheckpoints(None).of({"callbacks": {"a": array}})[CHECKPOINT_KEY]["encoded"]
    assert np.shares_memory(leaf.numpy(), array)


def test_without_us_the_rest_is_there_with_numbers_of_numpy_as_numbers() -> None:
    checkpoint = {"callbacks": {"best": np.float64(0.1), "seen": deque([1]), "epoch": 2}}
    plain = PlainCheckpoints(None).of(checkpoint)
    assert torch.load(saved(plain), weights_only=True)["callbacks"] == {"best": 0.1, "seen": None, "epoch": 2}


def test_what_is_given_is_not_changed() -> None:
    inner: list[Any] = [1, (np.float64(2), Path("a"))]
    checkpoint = {"callbacks": {"a": inner}, "hyper_parameters": {"b": Normalizer(1)}, CHECKPOINT_KEY: {"c": 1}}
    before = copy.deepcopy(checkpoint)
    PlainCheckpoints(None).of(checkpoint)
    assert checkpoint == before
    assert checkpoint["callbacks"]["a"] is inner
    assert type(inner[1][0]) is np.float64


# ---------------------------------------------------------------- hyper-parameters


@pytest.mark.parametrize("owner", ["", "datamodule_"])
@pytest.mark.parametrize("name", [None, "kwargs"])
def test_hyper_parameters_that_are_not_plain_are_left_out_by_name(
    owner: str, name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    own = [Normalizer(1), torch.nn.Linear(2, 2), partial(max, 1), Normalizer, np.ones(1), {"a": [Path("b")]}]
    values = {"width": 4, "deep": {"a": [np.int64(1)]}, **{f"own_{i}": value for i, value in enumerate(own)}}
    checkpoint = {"epoch": 1, f"{owner}hyper_parameters": values, f"{owner}hparams_name": name}
    checkpoints = PlainCheckpoints(None)
    for _ in range(2):
        found = checkpoints.load(saved(checkpoints.of(checkpoint)))
        assert found == {**checkpoint, f"{owner}hyper_parameters": {"width": 4, "deep": {"a": [1]}}}
        assert type(found[f"{owner}hyper_parameters"]["deep"]["a"][0]) is int
    assert "load_from_checkpoint. Received: own_0, own_1, own_2, own_3, own_4, own_5" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize("owner", ["", "datamodule_"])
def test_hyper_parameters_that_are_one_argument_are_left_out_together(
    owner: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Part of them would be handed to `__init__` as if it were the whole."""
    keys = [f"{owner}{key}" for key in ("hyper_parameters", "hparams_name", "hparams_type")]
    for values in ({"width": 4, "own": Normalizer(1)}, Namespace(width=4)):
        checkpoint = {"epoch": 1, **dict(zip(keys, (values, "config", type(values)), strict=True))}
        assert there_and_back(checkpoint) == {"epoch": 1}
        assert there_and_back({keys[0]: Namespace(width=4)}) == {}
    assert "Received: config" in caplog.text
    assert f"Received: {keys[0]}" in caplog.text
    kept = dict(zip(keys, ({"width": 4}, "config"), strict=False))
    assert there_and_back(kept) == kept


# ---------------------------------------------------------------- objects of other types


def test_objects_are_warned_of_once_with_their_place_and_type(caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = PlainCheckpoints(None)
    checkpoint: dict[str, Any] = {"callbacks": {"mine": [1, Normalizer(1)]}, "more": [Normalizer(2)] * 4}
    assert checkpoints.of(checkpoint) == checkpoint
    assert "will not go on from its checkpoints" in caplog.text
    assert "add_safe_globals" in caplog.text
    assert caplog.text.rstrip().endswith(f"Received: ['callbacks']['mine'][1] ({__name__}.Normalizer)")
    checkpoints.of({"callbacks": {"mine": [1, 2, Normalizer(1)]}})
    assert len(caplog.records) == 1
    checkpoints.of({"callbacks": {"mine": [Scaler(1), Fraction(1, 2), Scaler(2)]}})
    assert len(caplog.records) == 2
    assert caplog.text.rstrip().endswith(
        f"['mine'][0] ({__name__}.Scaler), ['callbacks']['mine'][1] (fractions.Fraction)"
    )


def test_objects_that_the_user_allows_are_loaded(caplog: pytest.LogCaptureFixture) -> None:
    allowed = [Normalizer(2), {Normalizer: 2}, {Path("a"): Normalizer(3)}]
    checkpoint = {"callbacks": {"mine": [1, Normalizer(1), *allowed]}, "hyper_parameters": {"a": Normalizer(2)}}
    with torch.serialization.safe_globals([Normalizer, type(Path())]):
        assert there_and_back(checkpoint) == checkpoint
        assert not caplog.text
        checkpoints = PlainCheckpoints(None)
        checkpoints.of({"callbacks": [Normalizer(1), Scaler(1)]})
        assert caplog.text.rstrip().endswith(f"Received: ['callbacks'][1] ({__name__}.Scaler)")


def test_everything_is_loaded_if_the_user_says_so(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level("INFO")
    array = np.ones(2)
    checkpoint = {
        "callbacks": [Normalizer(1), array, range(3)],
        "hyper_parameters": Namespace(a=1),
        "hparams_name": "b",
    }
    found = there_and_back(checkpoint, weights_only=False)
    assert str(found) == str(checkpoint)
    assert not caplog.text
    PlainCheckpoints(False).load(saved({"a": Malicious(tmp_path / "made")}))
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize("weights_only", [None, True])
@pytest.mark.parametrize("key", ["hyper_parameters", "callbacks", CHECKPOINT_KEY])
def test_code_in_a_checkpoint_does_not_run(weights_only: bool | None, key: str, tmp_path: Path) -> None:
    file = saved({"state_dict": {}, key: {"a": Malicious(tmp_path / "made")}})
    with pytest.raises(UsageError, match=r"could run any code.*add_safe_globals.*weights_only=False.*posix\.mkdir"):
        PlainCheckpoints(weights_only).load(file)
    assert not (tmp_path / "made").exists()


def test_object_that_somebody_else_has_saved_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=rf"GLOBAL {__name__}.Normalizer was not an allowed global"):
        PlainCheckpoints(None).load(saved({"a": Normalizer(1)}))


def test_object_that_does_not_like_to_be_saved_is_refused_without_harm(caplog: pytest.LogCaptureFixture) -> None:
    class Moody:
        def __reduce__(self) -> Any:
            raise IndexError("not now")

    checkpoint = {"callbacks": [Moody()]}
    assert PlainCheckpoints(None).of(checkpoint) == checkpoint
    assert "Moody" in caplog.text


HEADER, LEAVES = TENSORS.encode([torch.ones(2)])
PLACES = [(), ("a", "b", "c"), ("missing",), ("a", 7), ("a", -1), ("text", 0), ("tensor", 0), ("tuple", "x"), ([],), 3]
FORGED = [
    *({"encoded": ([place], HEADER, LEAVES)} for place in PLACES),
    {"encoded": ([("a", 0)], b"x", LEAVES)},
    {"encoded": ([("a", 0)], HEADER, [])},
    {"encoded": ([("a", 0)], b'{"tree": 3, "tensors": []}', [])},
    {"encoded": ([("a", 0)], None, LEAVES)},
    {"encoded": ([("a", 0)], HEADER)},
    {"encoded": ([("a", 0), ("tuple", 0)], HEADER, LEAVES)},
    {"encoded": ([("a",), ("a", 0)], TENSORS.encode([1, 2])[0], [])},
    {"encoded": ([("a", 0)] * 2, TENSORS.encode([1])[0], [])},
    {"encoded": (3, HEADER, LEAVES)},
    {"encoded": 3},
    {"numbers": {"float64": [("text",)]}},
    {"numbers": {"float64": [("a", 9)]}},
    {"numbers": {"O": [("a", 0)]}},
    {"numbers": {"M8[s]": [("a", 0)]}},
    {"numbers": {3: [("a", 0)]}},
    {"numbers": [1]},
    3,
]


@pytest.mark.parametrize("own", FORGED, ids=lambda own: str(own)[:60])
def test_values_without_a_place_are_refused(own: Any) -> None:
    checkpoint = {"a": [1], "text": "t", "tuple": (1,), "tensor": torch.ones(1), CHECKPOINT_KEY: own}
    with pytest.raises(ProtocolError):
        PlainCheckpoints(None).load(saved(checkpoint))
