"""A dataclass as a JSON file in the directory of a run, where anything else may have been left in its place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ef_common.errors import UsageError
from ef_common.events import TIME_LIMIT_S
from ef_common.files import read_whole

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Kind = TypeVar("_Kind", bound="DataclassInstance")
_INT_LIMIT = 1 << 31


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_moment(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value < TIME_LIMIT_S


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "str": _is_text,
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: type(value) is int and 0 <= value < _INT_LIMIT,
    "float": _is_moment,
    "list[str]": lambda value: isinstance(value, list) and all(map(_is_text, value)),
}
"""What a field may hold, by its type. All integers are process ids and counts, and all floats are moments."""


def read_record(kind: type[_Kind], file: Path) -> _Kind | None:
    """Read a dataclass with fields of the types in `_CHECKS`.

    Args:
        kind: The dataclass.
        file: Its file.

    Returns:
        What the file holds; None if there is no such file.

    Raises:
        UsageError: The file cannot be read, or does not hold such a dataclass; names the file, and the field.
    """
    try:
        found = kind(**json.loads(read_whole(file)))
        for field in fields(found):
            value = getattr(found, field.name)
            if not _CHECKS[str(field.type)](value):
                raise ValueError(f"field {field.name!r} is malformed. Received: {field.name}={str(value)[:100]}")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not one of this version: {error}") from None
    return found
