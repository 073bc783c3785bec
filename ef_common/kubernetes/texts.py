"""Objects as text, as people and their tools read it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import yaml

from ef_common.kubernetes.resource import Json


class _Plain(yaml.SafeDumper):  # type: ignore[misc]
    """Writes what occurs in several places in full at each of them, without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def as_yaml(things: Iterable[Json]) -> str:
    """YAML, one document for each object."""
    return "".join(f"---\n{document(thing)}" for thing in things)


def document(thing: Json) -> str:
    """One document, whose lines are not folded."""
    text: str = yaml.dump(thing, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=math.inf)
    return text


def one_line(text: str) -> str:
    r"""What a pod says, in one line that does nothing to a terminal.

    Example:
        >>> one_line("lost\n  its \x1b[31mhead")
        'lost its [31mhead'
    """
    return "".join(char for char in " ".join(text.split()) if char.isprintable())
