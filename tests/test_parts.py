"""Private parts of other packages: how they are looked for, and what is said of those that have moved."""

from __future__ import annotations

from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.errors import UnsupportedError
from ef_common.parts import Package, Part, check, find, listed


def passed_on(function: Any) -> Any:
    """As decorators do."""

    @wraps(function)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return outer


class Loop:
    """Stands for a class of another package."""

    LIMIT = 3

    def __init__(self) -> None:
        self._state = 1
        self.add_state("named_by_a_text")

    def add_state(self, name: str) -> None:
        setattr(self, name, 0)

    @property
    def _in_training_only(self) -> int:
        raise RuntimeError("there is no training")

    @passed_on
    def run(self, batch: Any, *, index: int = 0) -> int:
        inner_value = self.LIMIT + index
        return inner_value

    @staticmethod
    def _static(one: Any, two: Any) -> None:
        pass


def package(*parts: Part, version: str = "2.6.1", **roots: Any) -> Package:
    return Package("framework", version, "2.5", "2.6.6", parts=parts, roots=roots)


@pytest.mark.parametrize("root", [Loop, Loop()], ids=["class", "object"])
@pytest.mark.parametrize(
    "names",
    ["_state", "named_by_a_text", "_in_training_only", "LIMIT", "run(_)", "run(_, index=)", "_static(_, _)"],
)
def test_part_that_is_there_is_found_in_a_class_as_in_its_objects(root: Any, names: str) -> None:
    assert package(*listed("loop", names, "nobody"), loop=root).problems() == []


def test_name_in_the_code_of_a_class_is_not_enough_in_a_training() -> None:
    loop = Loop()
    del loop._state
    (part,) = listed("loop", "_state", "nobody")
    for root in (loop, Loop):
        assert part.look({"loop": root}, in_training=True) == "no `Loop._state`"


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ("_gone", "no `Loop._gone`"),
        ("inner_value", "no `Loop.inner_value`"),  # a local variable is no attribute
        ("_state()", "no `Loop._state`"),  # what is called is a method
        ("run()", "`Loop.run(batch, *, index=0)` in place of `run()`"),
        ("run(_, _)", "`Loop.run(batch, *, index=0)` in place of `run(_, _)`"),
        ("run(_, number=)", "`Loop.run(batch, *, index=0)` in place of `run(_, number=)`"),
        ("_static(_)", "`Loop._static(one, two)` in place of `_static(_)`"),
    ],
)
def test_part_that_has_moved_or_is_called_otherwise_is_told(names: str, problem: str) -> None:
    assert package(*listed("loop", names, "nobody"), loop=Loop).problems() == [problem]


@pytest.mark.parametrize(
    ("takes", "fits"),
    [
        ("batch, index", True),
        ("_, _", True),
        ("batch, ...", True),
        ("batch, index, ...", True),
        ("batch", False),  # what stands in its place would not take the other one
        ("batch, number", False),
        ("batch, index, more", False),
        ("index, batch", False),
    ],
)
def test_what_stands_in_the_place_of_a_method_takes_what_the_method_takes(takes: str, fits: bool) -> None:
    part = Part("loop", "run", "nobody", takes=takes, replaced=True)
    assert (package(part, loop=Loop).problems() == []) == fits


def test_method_that_was_replaced_in_an_object_is_judged_by_its_class() -> None:
    loop = Loop()
    loop.run = lambda *args, **kwargs: 0  # type: ignore[method-assign]
    part = Part("loop", "run", "nobody", takes="batch, index", replaced=True)
    assert package(part, loop=loop).problems() == []


def test_names_in_a_function_are_its_parts() -> None:
    parts = listed("loop.run", "inner_value LIMIT batch", "nobody")
    assert package(*parts, loop=Loop).problems() == package(*parts, loop=Loop()).problems() == []
    assert package(*listed("loop.run", "other", "nobody"), loop=Loop).problems() == ["no `other` in `Loop.run`"]


def test_constant_of_another_value_is_told() -> None:
    part = Part("loop", "LIMIT", "nobody", equals=4)
    assert package(part, loop=Loop).problems() == ["`Loop.LIMIT` = 3, not 4"]


def test_what_is_made_later_is_looked_for_in_a_training() -> None:
    part = Part("trainer.loop", "_gone", "nobody", kind=int)
    early, training = SimpleNamespace(loop=None), SimpleNamespace(loop=Loop())
    assert part.look({"trainer": early}) == ""
    assert part.look({"trainer": training}, in_training=True) == "no `Loop._gone`"
    training.loop._gone = "text"
    wrong = part.look({"trainer": training}, in_training=True)
    assert wrong == "`Loop._gone` of type str, not int"


def test_class_that_only_the_search_needs_may_have_moved() -> None:
    part = Part("loop", "_gone", "nobody")
    assert package(part, loop=None).problems() == []
    assert part.look({"loop": None}, in_training=True) == "no `loop`"


@pytest.mark.parametrize(("version", "is_needed"), [("2.5.9", False), ("2.6.1rc1", True), ("2.7", True), ("3.0", True)])
def test_part_that_came_with_a_release_is_needed_since_then(version: str, is_needed: bool) -> None:
    new = package(*listed("loop", "_new", "nobody", since=(2, 6, 1)), version=version, loop=Loop)
    assert bool(new.problems()) == is_needed


def test_one_sentence_says_what_has_moved_and_what_to_use() -> None:
    owner = "first second third fourth fifth"
    with pytest.raises(UnsupportedError) as refused:
        check([package(), package(*listed("loop", owner, "nobody"), loop=Loop)])
    assert str(refused.value) == (
        "framework 2.6.1 has no `Loop.first`, no `Loop.second`, no `Loop.third` and 2 more differences, which "
        "ElasticFlow relies on: use framework 2.5 to 2.6.6, or a newer ElasticFlow"
    )


def test_an_owner_that_has_moved_is_told_once() -> None:
    parts = (*listed("loop.gone", "one two", "nobody"), *listed("loop", "gone", "nobody"))
    assert package(*parts, loop=Loop()).problems() == ["no `Loop.gone`"]


def test_find_follows_a_path() -> None:
    assert find(SimpleNamespace(a=SimpleNamespace(b=1)), "a.b") == 1
    assert find(SimpleNamespace(a=None), "a.b.c") is None
