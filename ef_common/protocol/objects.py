"""Messages as objects of JSON: each kind of message is a dataclass, and each of its fields has a codec.

What has come has exactly the fields of its kind, each of them valid, or it raises `ProtocolError`, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeVar, get_type_hints

from ef_common.errors import ProtocolError
from ef_common.protocol.fields import FieldCodec

_NOTHING: Mapping[Any, Any] = MappingProxyType({})
_Kind = TypeVar("_Kind", bound=type)


class Layout(NamedTuple):
    """How a kind of message is written.

    Args:
        kind: Its dataclass.
        own: The codecs of its fields, by their names.
        parts: Its fields that are dataclasses, whose fields are written among its own.
        unwritten: Its fields that the reader knows without the message.
        names: Of all fields that are written.
    """

    kind: type
    own: Mapping[str, FieldCodec]
    parts: Mapping[str, Layout]
    unwritten: tuple[str, ...]
    names: tuple[str, ...]

    def dump(self, message: object) -> dict[str, Any]:
        """The fields of a message, as JSON has them."""
        record = {name: codec.dump(getattr(message, name)) for name, codec in self.own.items()}
        for name, part in self.parts.items():
            record |= part.dump(getattr(message, name))
        return record

    def load(self, record: Mapping[str, Any], *, name: str, known: Mapping[str, Any] = _NOTHING) -> Any:
        """Read a message.

        Args:
            record: Its fields, as JSON has them.
            name: Of its kind.
            known: What is not written.

        Raises:
            ProtocolError: A field is missing, is one too many, or is wrong.
        """
        if record.keys() != set(self.names):
            expected = ", ".join(self.names)
            raise ProtocolError(f"{name} must have the fields ({expected}). Received: {brief(list(record))}")
        return self._load(record, name, known)

    def _load(self, record: Mapping[str, Any], kind: str, known: Mapping[str, Any]) -> Any:
        fields = {name: known[name] for name in self.unwritten}
        for name, part in self.parts.items():
            fields[name] = part._load(record, kind, known)
        for name, codec in self.own.items():
            try:
                fields[name] = codec.load(record[name])
            except (ValueError, OverflowError) as error:
                raise ProtocolError(f"{kind}.{name}: {error}. Received: {brief(record[name])}") from None
        return self.kind(**fields)


def layout_of(kind: type, codecs: Mapping[Any, FieldCodec] = _NOTHING, *, unwritten: Collection[str] = ()) -> Layout:
    """How a dataclass is written.

    Args:
        kind: The dataclass. Some of its fields may be `Annotated` with their codecs.
        codecs: Those of the others, by ``Kind.field``, by the name of the field alone, or by its type.
        unwritten: Names of the others that are not written.

    Raises:
        TypeError: How a field is written is not known, or two have one name.
    """
    own: dict[str, FieldCodec] = {}
    parts: dict[str, Layout] = {}
    left = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        keys = (f"{kind.__name__}.{name}", name, hint)
        found = [*getattr(hint, "__metadata__", ()), *(codecs[key] for key in keys if key in codecs)]
        if found:
            own[name] = found[0]
        elif name in unwritten:
            left.append(name)
        elif isinstance(hint, type) and is_dataclass(hint):
            parts[name] = layout_of(hint, codecs, unwritten=unwritten)
        else:
            raise TypeError(f"expected a codec for each field. Received: {kind.__name__}.{name}")
    names = (*own, *(name for part in parts.values() for name in part.names))
    if len(set(names)) < len(names):
        raise TypeError(f"a message and its parts need fields of different names. Received: {', '.join(names)}")
    return Layout(kind, own, parts, tuple(left), names)


def parse(line: bytes) -> dict[str, Any]:
    """Read a line.

    Raises:
        ProtocolError: It is no object of JSON.
    """
    try:
        record = _DECODER.decode(line.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"expected a line of JSON: {brief(str(error))}") from None
    if type(record) is not dict:
        raise ProtocolError(f"expected a JSON object. Received: {type(record).__name__}")
    return record


def kind_of(name: object, table: Mapping[str, _Kind]) -> _Kind:
    """The kind of message that has this name.

    Raises:
        ProtocolError: There is none.
    """
    kind = table.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"expected one of {', '.join(table)}. Received: t={brief(name)}")
    return kind


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a field stands twice")
    return record


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)


def brief(value: object) -> str:
    """What has come, in few characters, for a message."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:80] + "..."
