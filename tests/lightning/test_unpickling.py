"""Checkpoints that hold more than tensors and plain values, among them some that want to run code."""

from __future__ import annotations

import enum
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ef_common.errors import UsageError
from ef_lightning.unpickling import load, warn_if_unreadable


class Color(enum.Enum):
    RED = "red"


@dataclass
class Settings:
    """Hyper-parameters of a user."""

    path: Path
    color: Color
    sizes: frozenset[int]


@dataclass(frozen=True, slots=True)
class Slotted:
    depth: int


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


class Innocent:
    """Has what an attacker would look for: `type(self).act`, and its globals."""

    class Inner:
        pass

    def act(self) -> None:
        pass


SETTINGS = Settings(Path("/data"), Color.RED, frozenset((1, 2)))


def saved(tree: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    return file


def nothing() -> dict[str, Any]:
    return {}


def test_tensors_and_plain_values_are_loaded_whoever_wrote_them() -> None:
    tree = {"state_dict": {"w": torch.arange(3.0)}, "epoch": 3, "names": ["a", None, True, (1.5, b"x")]}
    found = load(saved(tree), lambda: pytest.fail("nobody asks for that"))
    assert found["state_dict"]["w"].tolist() == [0, 1, 2]
    assert {key: found[key] for key in ("epoch", "names")} == {key: tree[key] for key in ("epoch", "names")}


@pytest.mark.parametrize("value", [SETTINGS, Slotted(3), torch.nn.Linear(2, 2), np.random.default_rng(3), Settings])
def test_objects_of_kinds_that_this_worker_would_save_are_loaded(value: Any) -> None:
    before = set(torch.serialization.get_safe_globals())
    found = load(saved({"hyper_parameters": {"value": value}}), lambda: {"mine": [value]})["hyper_parameters"]["value"]
    assert type(found) is type(value)
    assert str(found) == str(value) or isinstance(value, np.random.Generator)
    assert set(torch.serialization.get_safe_globals()) == before


def test_other_objects_are_refused_with_their_name_and_what_helps() -> None:
    with pytest.raises(UsageError, match=r"weights_only=False.*add_safe_globals.*test_unpickling\.Settings"):
        load(saved({"a": SETTINGS}), nothing)
    with torch.serialization.safe_globals([Settings]), pytest.raises(UsageError, match=r"PosixPath|Color"):
        load(saved({"a": SETTINGS}), nothing)


def test_objects_that_the_user_has_named_are_loaded_and_stay_named() -> None:
    marks = [Settings, Color, type(SETTINGS.path), frozenset]
    with torch.serialization.safe_globals(marks):
        assert load(saved({"a": SETTINGS}), nothing)["a"] == SETTINGS
        load(saved({"a": SETTINGS, "b": Slotted(1)}), lambda: {"c": SETTINGS, "d": Slotted(2)})
        assert set(marks) <= set(torch.serialization.get_safe_globals())


@pytest.mark.parametrize("weights_only", [None, True])
@pytest.mark.parametrize("own", [{}, {"hyper_parameters": SETTINGS, "other": [Innocent(), Slotted(1)]}])
def test_code_in_a_checkpoint_does_not_run(own: dict[str, Any], weights_only: bool | None, tmp_path: Path) -> None:
    file = saved({"state_dict": {}, "a": Malicious(f"touch {tmp_path / 'hacked'}")})
    with pytest.raises(UsageError, match=r"system"):
        load(file, lambda: own, weights_only=weights_only)
    assert not (tmp_path / "hacked").exists()


def test_python_itself_is_not_handed_out_with_a_class_within_a_class() -> None:
    """It is named by `getattr`, by which one could get from any function to all modules."""
    own = {"a": Innocent.Inner()}
    with pytest.raises(UsageError, match="getattr"):
        load(saved(own), lambda: own)


def test_everything_is_loaded_if_the_user_says_so() -> None:
    assert load(saved({"a": SETTINGS}), nothing, weights_only=False)["a"] == SETTINGS


def test_only_tensors_and_plain_values_are_loaded_if_the_user_says_so() -> None:
    with pytest.raises(UsageError):
        load(saved({"a": SETTINGS}), lambda: {"a": SETTINGS}, weights_only=True)


@pytest.mark.parametrize("kind", ["float64", "float32", "int64", "bool", "complex128"])
def test_numbers_of_numpy_are_loaded_whoever_wrote_them(kind: str) -> None:
    tree = {"best": np.dtype(kind).type(1), "history": np.ones(3, kind)}
    found = load(saved(tree), nothing)
    assert found["best"] == 1
    assert found["history"].dtype == kind


def test_hooks_of_the_user_that_fail_before_the_training_cost_only_their_objects(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def own() -> dict[str, Any]:
        raise IndexError("no optimizer yet")

    assert load(saved({"a": np.float64(2)}), own)["a"] == 2
    assert "no optimizer yet" in caplog.text


@pytest.mark.parametrize("value", [Innocent.Inner(), lambda: None])
def test_warning_comes_with_the_first_checkpoint_that_could_not_be_loaded(
    value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_unreadable({"w": torch.ones(3), "hyper_parameters": {"a": SETTINGS, "b": Slotted(1)}})
    assert not caplog.text
    warn_if_unreadable({"w": torch.ones(3), "hyper_parameters": {"a": value}})
    assert "will not go on from its checkpoints" in caplog.text
