"""Fields of messages in JSON: how each is written, and how it is read and validated.

A text is printable, so it can be logged; a number has bounds. What does not fit raises ValueError.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from ef_common.core.doors import COMMIT, LOOK, MAX_DOORS, PROMISE
from ef_common.core.membership import Phase
from ef_common.core.progress import KINDS, SETTLING, Progress
from ef_common.core.room import Demand
from ef_common.core.view import Member, View
from ef_common.core.watermark import Watermark
from ef_common.errors import ProtocolError, UsageError
from ef_common.protocol.addresses import is_address, parse_address
from ef_common.protocol.view_patch import MAX_NAMED, NO_VIEW, Span, ViewName, ViewPatch

MAX_NAME_CHARS = 128
MAX_REASON_CHARS = 1000
MAX_FAILURE_CHARS = 500
"""Length of the reason why the job has failed, which a worker may get before it trusts the coordinator."""
MAX_RETURNED = 1000
"""Positions that a watermark may name."""
MAX_LINKS = 2**11
"""Views of a chain: what a coordinator does with one takes time in its square."""
_MAX_COUNT = 2**53
_MAX_RETURNED_GENERATION = 5 * 10**8  # views can follow, with claims of 9 digits, whatever one that comes back makes up
_MAX_AMOUNT = 1e9  # seconds, for one: 30 years

_HEX_DIGITS = set("0123456789abcdef")
_CLAIM = re.compile("[0-9]{9}-[0-9a-f]{32}")
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def to_json(value: Any) -> str:
    """JSON without spaces."""
    return _ENCODER.encode(value)


class FieldCodec(NamedTuple):
    """The JSON form of a field: `load` validates it (or raises ValueError), `dump` is its inverse."""

    load: Callable[[Any], Any]
    dump: Callable[[Any], Any] = lambda value: value


def _value(kind: type, expected: str, *, where: Callable[[Any], bool] = lambda value: True) -> FieldCodec:
    """A value of JSON, as it is."""

    def load(value: Any) -> Any:
        if type(value) is not kind or not where(value):
            raise ValueError(f"expected {expected}")
        return value

    return FieldCodec(load)


def _text(max_chars: int, *, min_chars: int = 1) -> FieldCodec:
    expected = f"a printable text of {min_chars} to {max_chars} characters"
    return _value(str, expected, where=lambda text: min_chars <= len(text) <= max_chars and text.isprintable())


def _integer(low: int, high: int = _MAX_COUNT) -> FieldCodec:
    return _value(int, f"an integer from {low} to {high}", where=lambda number: low <= number <= high)


def _hex(num_chars: int) -> FieldCodec:
    expected = f"{num_chars} hexadecimal digits"
    return _value(str, expected, where=lambda text: len(text) == num_chars and set(text) <= _HEX_DIGITS)


def _one_of(*choices: str) -> FieldCodec:
    return _value(str, f"one of {', '.join(choices)}", where=choices.__contains__)


def _number(expected: str, *, where: Callable[[float], bool]) -> FieldCodec:
    def load(value: Any) -> float:
        if type(value) not in (int, float) or not where(value):
            raise ValueError(f"expected {expected}")
        return float(value)

    return FieldCodec(load)


def _checked(codec: FieldCodec, expected: str, holds: Callable[[Any], bool]) -> FieldCodec:
    """The values of a codec for which something more holds."""

    def load(value: Any) -> Any:
        loaded = codec.load(value)
        if not holds(loaded):
            raise ValueError(f"expected {expected}")
        return loaded

    return FieldCodec(load, codec.dump)


def _or_null(codec: FieldCodec) -> FieldCodec:
    return FieldCodec(
        lambda value: None if value is None else codec.load(value),
        lambda value: None if value is None else codec.dump(value),
    )


def _or_empty(codec: FieldCodec) -> FieldCodec:
    """A text that may also be empty."""
    return FieldCodec(lambda value: value if value == "" else codec.load(value), codec.dump)


def _or_span(codec: FieldCodec) -> FieldCodec:
    """Or the ranks [start, stop] that stand for what the view before has as well."""

    def load(value: Any) -> Any:
        if type(value) is not list or len(value) != 2:
            return codec.load(value)
        start, stop = value
        if type(start) is not int or type(stop) is not int or not 0 <= start < stop <= MAX_NAMED:
            raise ValueError("expected ranks [start, stop]")
        return Span(start, stop)

    return FieldCodec(load, lambda part: part if isinstance(part, Span) else codec.dump(part))


def _list_of(codec: FieldCodec, what: str, *, most: int | None = None) -> FieldCodec:
    """A tuple of values of one kind."""
    expected = f"a list of {what}" if most is None else f"a list of at most {most} {what}"
    values = _value(list, expected, where=lambda found: most is None or len(found) <= most)
    return FieldCodec(
        lambda value: tuple(map(codec.load, values.load(value))), lambda found: list(map(codec.dump, found))
    )


def _row(names: Sequence[str], *codecs: FieldCodec) -> FieldCodec:
    """A tuple of values that have a codec each."""
    row = _value(list, f"[{', '.join(names)}]", where=lambda found: len(found) == len(codecs))
    return FieldCodec(
        lambda value: tuple([codec.load(part) for codec, part in zip(codecs, row.load(value), strict=True)]),
        lambda found: [codec.dump(part) for codec, part in zip(codecs, found, strict=True)],
    )


def _record(kind: Any, *codecs: FieldCodec) -> FieldCodec:
    """A dataclass or a named tuple, as the list of its fields, which JSON has as they are."""
    names: tuple[str, ...] = kind.__match_args__
    row = _row(names, *codecs)
    return FieldCodec(lambda value: kind(*row.load(value)), attrgetter(*names))


def _load_endpoint(value: Any) -> str:
    text: str = _text(263, min_chars=0).load(value)
    try:
        host = parse_address(text, what="address")[0] if text else ""
    except UsageError as error:
        raise ValueError(str(error)) from None
    _ADDRESS.load(host)
    return text


def _load_bytes(value: Any) -> bytes:
    if type(value) is not str:
        raise ValueError("expected base64")
    try:
        return base64.b64decode(value.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise ValueError("expected base64") from None


def clip(text: str) -> str:
    """Shorten a text so that it can be sent as a reason."""
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable[:MAX_REASON_CHARS]


def _dump_failure(text: str) -> str:
    printable = "".join(char if char.isprintable() else " " for char in text)
    return printable[:MAX_FAILURE_CHARS]


def size_of(member: Member) -> int:
    """So many bytes a member takes in a view, at most."""
    return len(to_json(MEMBER.dump(member)).encode()) + 1


def _load_patch(value: Any) -> ViewPatch:
    generation, members, admitted_at, pending, hold, reason, gone, base, issuer = _PATCH.load(value)
    if max(admitted_at, base) > generation:
        raise ValueError(f"expected no generation above {generation}")
    rest = View(
        generation, (), admitted_at=admitted_at, pending=pending, hold=hold, reason=reason, base=base, issuer=issuer
    )
    return ViewPatch(rest, members, gone=gone)


def _dump_patch(patch: ViewPatch) -> Any:
    rest = patch.rest
    flags = rest.admitted_at, rest.pending, rest.hold, rest.reason
    return _PATCH.dump((rest.generation, patch.members, *flags, patch.gone, rest.base, rest.issuer))


def digest_of_view(view: View) -> str:
    """A digest of all that a view says, by which ends that know it can name it."""
    whole = to_json(_dump_patch(ViewPatch.between(NO_VIEW, view)))
    return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()


def _load_views(value: Any) -> tuple[View, ...]:
    if type(value) is not list or len(value) > MAX_LINKS:
        raise ValueError(f"expected a list of at most {MAX_LINKS} views")
    views: list[View] = []
    num_named = 0
    for one in value:
        try:
            views.append(_load_patch(one).onto(views[-1] if views else NO_VIEW))
        except ProtocolError as error:
            raise ValueError(str(error)) from None
        num_named += len(views[-1].members) + len(views[-1].gone)
        if num_named > MAX_NAMED:
            raise ValueError(f"expected views of {MAX_NAMED} members, all together")
    return tuple(views)


def _dump_views(views: tuple[View, ...]) -> list[Any]:
    """Each view as a patch of the one before it: of a thousand members that are lost one by one, each is named once."""
    return [
        _dump_patch(ViewPatch.between(before, view)) for before, view in zip((NO_VIEW, *views), views, strict=False)
    ]


COUNT = _integer(0)
TRAINING = _integer(1)
PORT = _integer(1, 65535)
_PORT_OR_ZERO = _integer(0, 65535)
RETURNED_GENERATION = _integer(0, _MAX_RETURNED_GENERATION)
FLAG = _value(bool, "true or false")
AMOUNT = _number(f"a number from 0 to {_MAX_AMOUNT:g}", where=lambda number: 0 <= number <= _MAX_AMOUNT)
DURATION = _number("a positive number of seconds", where=lambda seconds: 0 < seconds <= _MAX_AMOUNT)
NAME = _text(MAX_NAME_CHARS)
NAMES = _list_of(NAME, "ids")
REASON = FieldCodec(_text(MAX_REASON_CHARS, min_chars=0).load, clip)
FAILURE = FieldCodec(_text(MAX_FAILURE_CHARS, min_chars=0).load, _dump_failure)
DIGEST = _hex(32)
PROOF = _hex(64)
CLAIM = _value(str, "a generation of 9 digits and a digest", where=lambda text: bool(_CLAIM.fullmatch(text)))
IDS = _checked(NAMES, "sorted ids", lambda ids: bool(ids) and list(ids) == sorted(set(ids)))
JOB = _text(MAX_NAME_CHARS, min_chars=0)
WISH = _one_of(LOOK, PROMISE, COMMIT)
ERROR_CODE = _one_of("authentication", "job", "protocol")
_PHASE = _one_of("warming", "ready", "member", "leaving")
PHASE = FieldCodec(lambda value: Phase(_PHASE.load(value)), lambda phase: phase.value)
STORE = _or_empty(DIGEST)
STORE_OR_NONE = _or_null(STORE)
_ADDRESS = _value(str, "a name or an address of a host, or nothing", where=lambda text: not text or is_address(text))
ENDPOINT = FieldCodec(_load_endpoint)
DOORS = _list_of(ENDPOINT, "addresses", most=MAX_DOORS)
STANDBYS = _list_of(_row(("host", "port"), _ADDRESS, _PORT_OR_ZERO), "addresses")
BYTES = FieldCodec(_load_bytes, lambda value: base64.b64encode(value).decode("ascii"))
VALUES = _list_of(_row(("key", "value"), NAME, BYTES), "values")
DEMAND = _record(Demand, RETURNED_GENERATION, COUNT, COUNT)
MEMBER = _checked(
    _record(Member, NAME, NAME, _ADDRESS, COUNT, _integer(1), _PORT_OR_ZERO, _PORT_OR_ZERO),
    "a local rank below the local world size",
    lambda member: member.local_rank < member.local_world_size,
)
WATERMARK = _record(Watermark, COUNT, COUNT, _list_of(COUNT, "positions", most=MAX_RETURNED), TRAINING)
WATERMARK_OR_NONE = _or_null(WATERMARK)
PROGRESS_OR_NONE = _or_null(
    _record(Progress, COUNT, _integer(SETTLING), FLAG, _one_of(*KINDS), *[AMOUNT] * 4, COUNT, AMOUNT, AMOUNT, FLAG)
)
VIEW_NAMES = _checked(
    _list_of(_record(ViewName, RETURNED_GENERATION, DIGEST, FLAG, FLAG), "views", most=MAX_LINKS),
    "growing generations",
    lambda names: all(one.generation < following.generation for one, following in pairwise(names)),
)
_PATCH = _row(
    ("generation", "members", "admitted_at", "pending", "hold", "reason", "gone", "base", "issuer"),
    COUNT,
    _list_of(_or_span(MEMBER), "members"),
    COUNT,
    FLAG,
    FLAG,
    REASON,
    _list_of(_or_span(NAME), "ids"),
    COUNT,
    _PORT_OR_ZERO,
)
VIEW_PATCH = FieldCodec(_load_patch, _dump_patch)
VIEWS = FieldCodec(_load_views, _dump_views)
