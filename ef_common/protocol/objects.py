"""Messages as objects of JSON: each kind of message is a dataclass, whose annotations say how its fields are written.

What has come has exactly the fields of its kind, each of them valid, or it raises `ProtocolError`, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar, get_type_hints

from ef_common.errors import ProtocolError
from ef_common.protocol.fields import FieldCodec

Fields = Mapping[str, FieldCodec]
"""How the fields of a kind of message are written, by their names."""
_Kind = TypeVar("_Kind", bound=type)


def fields_of(kind: type) -> Fields:
    """The fields of a dataclass, each of which is `Annotated` with its codec."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def dump(message: object, fields: Fields) -> dict[str, Any]:
    """The fields of a message, as JSON has them."""
    return {name: codec.dump(getattr(message, name)) for name, codec in fields.items()}


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


def load(record: Mapping[str, Any], fields: Fields, *, name: str) -> dict[str, Any]:
    """Read the fields of a message.

    Args:
        record: As JSON has them.
        fields: Those of its kind.
        name: Of the kind.

    Raises:
        ProtocolError: A field is missing, is one too many, or is wrong.
    """
    if record.keys() != fields.keys():
        raise ProtocolError(f"{name} must have the fields ({', '.join(fields)}). Received: {brief(list(record))}")
    return {field: _load(codec, record[field], f"{name}.{field}") for field, codec in fields.items()}


def _load(codec: FieldCodec, value: Any, where: str) -> Any:
    try:
        return codec.load(value)
    except (ValueError, OverflowError) as error:
        raise ProtocolError(f"{where}: {error}. Received: {brief(value)}") from None


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
