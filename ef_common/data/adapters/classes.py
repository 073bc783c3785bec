"""Classes of libraries that may not be installed."""

from __future__ import annotations

from typing import Any


def is_a(value: Any, name: str) -> bool:
    """Whether a value is an instance of the class of this name (`module.Class`), which is not imported for that.

    >>> is_a(True, "builtins.int"), is_a(1, "builtins.bool")
    (True, False)
    """
    return any(f"{cls.__module__}.{cls.__name__}" == name for cls in type(value).__mro__)
