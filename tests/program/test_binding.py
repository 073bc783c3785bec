"""Entries of a batch reach the parameters of a `forward`, or the message says which do not."""

from __future__ import annotations

from typing import Any

import pytest

from ef_common.errors import UsageError
from ef_common.program.binding import binding_of

MODEL = {"net": "the model"}


def both(x: Any, y: Any, params: Any) -> Any:
    return x, y, params


def optional(x: Any, params: Any, weight: float = 1.0) -> Any:
    return x, params, weight


def renamed(x: Any, y: Any, p: Any) -> Any:
    return x, y, p


def knowing(x: Any, params: Any, training: bool) -> Any:
    return x, params, training


def open_(x: Any, params: Any, **others: Any) -> Any:
    return x, params, others


def named_only(*, x: Any, params: Any) -> Any:
    return x, params


CASES = [
    (both, (1, 2), (1, 2, MODEL)),
    (both, [1, 2], (1, 2, MODEL)),
    (both, {"y": 2, "x": 1}, (1, 2, MODEL)),
    (optional, (1,), (1, MODEL, 1.0)),
    (optional, 1, (1, MODEL, 1.0)),
    (optional, (1, 0.5), (1, MODEL, 0.5)),
    (optional, {"x": 1, "weight": 2}, (1, MODEL, 2)),
    (renamed, (1, 2), (1, 2, MODEL)),
    (knowing, (1,), (1, MODEL, True)),
    (open_, {"x": 1, "a": 2}, (1, MODEL, {"a": 2})),
    (named_only, {"x": 1}, (1, MODEL)),
]


@pytest.mark.parametrize(("function", "batch", "expected"), CASES)
def test_call_binds_entries(function: Any, batch: Any, expected: Any) -> None:
    assert binding_of(function).call(batch, MODEL, training=True) == expected


MISTAKES = [
    (both, (1, 2, 3), r"a batch has more entries than forward\(\) has parameters .* Received: 3"),
    (both, (1,), r"no entry of the batch is for `y` of forward\(\).* Received: entries for `x`"),
    (both, {"x": 1}, r"no entry of the batch is for `y`"),
    (both, {}, r"Received: entries for none"),
    (both, {"x": 1, "y": 2, "z": 3}, r"no parameter of forward\(\) is named as `z` of the batch"),
]


@pytest.mark.parametrize(("function", "batch", "message"), MISTAKES)
def test_call_with_entries_that_do_not_fit_raises_naming_them(function: Any, batch: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        binding_of(function).call(batch, MODEL, training=True)


def test_call_partly_leaves_out_what_is_not_named() -> None:
    assert binding_of(knowing).call({"x": 1, "y": 2}, MODEL, training=False, partly=True) == (1, MODEL, False)
    assert binding_of(knowing).call((1, 2), MODEL, training=False, partly=True) == (1, MODEL, False)


FUNCTIONS = [
    (lambda *x: x, "neither `\\*args`"),
    (lambda x, /, params: x, "before a `/`"),
    (lambda: 0, "needs a parameter for the model"),
    (3, "evaluate must be a function. Received: int"),
]


@pytest.mark.parametrize(("function", "message"), FUNCTIONS)
def test_binding_of_a_function_that_cannot_be_called_so_raises(function: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        binding_of(function, role="evaluate")
