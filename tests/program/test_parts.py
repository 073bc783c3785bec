"""Whose a model is, told by its parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ef_common.errors import UsageError
from ef_common.program.parts import check_framework, framework_of, parts_of


def stranger(module: str) -> Any:
    """An object of another framework, which need not be imported."""
    return type("Thing", (), {"__module__": module})()


def layer() -> Any:
    """What a layer of Keras is on torch: a module of torch, too."""
    return type("Dense", (nn.Module,), {"__module__": "keras.src.layers"})()


def test_parts_keep_the_optimizer_apart() -> None:
    parts = parts_of(lambda: {"net": 1, "optimizer": 2, "scheduler": 3})
    assert (parts.params, parts.optimizer, parts.scheduler) == ({"net": 1}, 2, 3)


def test_model_that_was_made_is_not_made_again() -> None:
    made = {"net": 1, "optimizer": 2}
    assert parts_of(made).params == {"net": 1}
    assert made == {"net": 1, "optimizer": 2}


def test_leaves_tell_their_place() -> None:
    parts = parts_of({"a": {"b": [1, 2]}, "c": (3,)})
    assert dict(parts.leaves()) == {"a.b.0": 1, "a.b.1": 2, "c.0": 3}


CASES = [
    ({"net": nn.Linear(1, 1)}, "torch"),
    ({"layers": [{"w": torch.zeros(2, requires_grad=True)}], "scale": 3.0}, "torch"),
    ({"size": 1, "optimizer": partial(torch.optim.SGD, lr=0.1)}, "torch"),
    ({"net": layer()}, "keras"),
    ({"net": stranger("keras.src.layers")}, "keras"),
]


@pytest.mark.parametrize(("model", "framework"), CASES)
def test_framework_is_that_of_the_parts(model: Any, framework: str) -> None:
    assert framework_of(parts_of(model)) == framework


MISTAKES: list[tuple[Any, str]] = [
    ({"net": nn.Linear(1, 1), "head": stranger("keras.src.layers")}, "`head` is of keras"),
    ({"net": layer(), "optimizer": torch.optim.SGD}, "`optimizer` is of torch"),
    ({"net": layer(), "w": stranger("tensorflow.python")}, "keras.Variable"),
    ({"w": stranger("tensorflow.python")}, "TensorFlow alone cannot train"),
    ({"size": 1}, r"Received: \['size'\]"),
]


@pytest.mark.parametrize(("model", "message"), MISTAKES)
def test_model_of_two_frameworks_or_none_raises(model: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        framework_of(parts_of(model))


def test_model_that_is_no_dict_raises() -> None:
    with pytest.raises(UsageError, match=r"must return a dict.* Received: torch\.nn\.modules\.linear\.Linear"):
        parts_of(lambda: nn.Linear(1, 1))  # type: ignore[arg-type, return-value]


def test_model_of_the_other_framework_is_told_where_to_go() -> None:
    with pytest.raises(UsageError, match=r"this model is of torch: use ef_lightning\.module"):
        check_framework(parts_of({"net": nn.Linear(1, 1)}), "keras")
