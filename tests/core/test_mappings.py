"""Mappings in the state of the membership, which grow by a copy for each report."""

from __future__ import annotations

from types import MappingProxyType
from typing import NoReturn

from ef_common.core.membership.model import extended


class Unasked(dict[str, int]):
    """It can be copied at once, and must not be asked for each of its keys."""

    def __getitem__(self, key: str) -> NoReturn:
        raise AssertionError(f"asked for {key}")


def test_mapping_is_extended_by_one_copy() -> None:
    known = MappingProxyType(Unasked(a=1, b=2))
    assert dict(extended(known, {"b": 3, "c": 4})) == {"a": 1, "b": 3, "c": 4}
    assert sorted(known.items()) == [("a", 1), ("b", 2)]


def test_mapping_of_another_type_can_be_extended() -> None:
    known = {"a": 1, "b": 2}
    assert dict(extended(known, {"b": 3})) == {"a": 1, "b": 3}
    assert known == {"a": 1, "b": 2}
