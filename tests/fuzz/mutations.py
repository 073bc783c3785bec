"""Mutations of lines of JSON that are JSON again: mutated bytes alone would hardly come behind the parser."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

_VALUES: list[Any] = [
    *(None, True, False, "", "a", "\x00", "\ud800", "é" * 200, "x" * 5000, "../a", "0f" * 32),
    *(0, -1, 1, 2, 0.5, -0.0, 1e308, float("nan"), float("inf"), 2**31, 2**53, 2**63, -(2**63), 10**400),
    *([], {}, [[]], [0, 1], [[0, 1]], [[1, 0]], {"a": 1}, {"": None}, ["a", "a"]),
]
_DEEP = 2000


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Change, drop, double or exchange one value in one of the lines; as it is if that is no JSON."""
    lines = data.split(b"\n")
    index = rng.randrange(len(lines))
    try:
        document = json.loads(lines[index])
        for _ in range(rng.choice((1, 1, 2, 3))):
            document = _changed(document, rng)
        text = json.dumps(document, ensure_ascii=rng.random() < 0.5)
    except (LookupError, ValueError, OverflowError, RecursionError):
        return data
    if rng.random() < 0.02:
        text = text.replace(rng.choice(("null", "0", '"a"')), "[" * _DEEP + "]" * _DEEP, 1)
    lines[index] = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        lines.insert(rng.randrange(len(lines)), lines[index])
    return b"\n".join(lines)


def _changed(value: Any, rng: random.Random) -> Any:
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys or rng.random() < 0.15:
        return _replacement(value, rng)
    key = rng.choice(keys)
    ways: list[Callable[[], Any]] = [
        *5 * [lambda: value.__setitem__(key, _changed(value[key], rng))],
        lambda: value.pop(key),
        lambda: value.__setitem__(key, value[rng.choice(keys)]),
        lambda: value.append(value[key]) if isinstance(value, list) else value.__setitem__(f"{key}2", value[key]),
        lambda: value.__setitem__(key, [value[key]]),
    ]
    rng.choice(ways)()
    return value


def _replacement(value: Any, rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.3 and isinstance(value, int | float):
        return value + rng.choice((-1, 1, 0.5, 2**32))
    if kind < 0.3 and isinstance(value, str):
        return value[: rng.randrange(len(value) + 1)] + rng.choice(("", "0", "-", "\n"))
    return rng.choice(_VALUES)
