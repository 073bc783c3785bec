"""How dataclasses are written as objects of JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest

from ef_common.errors import ProtocolError
from ef_common.protocol.fields import COUNT, FLAG, NAME
from ef_common.protocol.objects import layout_of


@dataclass(frozen=True)
class Part:
    """Something of the core."""

    who: str
    number: int
    more: bool = False


@dataclass(frozen=True)
class Whole:
    """A message that has it as a part."""

    part: Part
    text: Annotated[str, NAME]


@dataclass(frozen=True)
class Other:
    """Something else of the core."""

    number: int
    text: str


@dataclass(frozen=True)
class Twice:
    """A message with a field that its part has, too."""

    part: Other
    text: Annotated[str, NAME]


CODECS = {"number": COUNT, "more": NAME, "Part.more": FLAG}
LAYOUT = layout_of(Whole, CODECS, unwritten=["who"])


def test_fields_of_a_part_are_written_among_the_others_and_what_the_reader_knows_is_not() -> None:
    record = LAYOUT.dump(Whole(Part("a", 3, True), "x"))
    assert record == {"text": "x", "number": 3, "more": True}
    assert LAYOUT.load(record, name="whole", known={"who": "b"}) == Whole(Part("b", 3, True), "x")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"number": -1}, r"whole\.number: expected an integer"),
        ({"more": "x"}, r"whole\.more: expected true or false"),
        ({"who": "c"}, r"whole must have the fields \(text, number, more\)"),
        ({"part": {}}, "whole must have the fields"),
    ],
    ids=str,
)
def test_part_is_read_as_strictly_as_the_rest(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        LAYOUT.load({"text": "x", "number": 3, "more": True, **change}, name="whole", known={"who": "b"})


def test_field_of_a_part_with_the_name_of_another_raises_type_error() -> None:
    with pytest.raises(TypeError, match=r"different names\. Received: text, number, text"):
        layout_of(Twice, {"number": COUNT, "text": NAME})


def test_field_without_a_codec_raises_type_error() -> None:
    with pytest.raises(TypeError, match=r"Received: Part\.number"):
        layout_of(Whole, {"more": FLAG}, unwritten=["who"])


def test_codec_of_a_field_is_that_of_its_name_and_else_that_of_its_type() -> None:
    layout = layout_of(Part, {str: NAME, int: COUNT, bool: FLAG, "who": COUNT})
    record = {"who": 3, "number": 4, "more": True}
    assert layout.load(record, name="part") == Part(3, 4, True)  # type: ignore[arg-type]
    for name in record:
        with pytest.raises(ProtocolError, match=rf"part\.{name}"):
            layout.load({**record, name: "x"}, name="part")
