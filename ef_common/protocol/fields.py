"""Fields of messages in JSON: how each is written, and how it is read and validated.

A text is printable, so it can be logged; a number has bounds. What does not fit raises ValueError.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, TypeVar

from ef_common.core.place import Place
from ef_common.core.progress import KINDS, SETTLING, Progress
from ef_common.core.quorum import Link
from ef_common.core.view import Member, View
from ef_common.errors import UsageError
from ef_common.protocol.addresses import is_address, parse_address

MAX_NAME_CHARS = 128
MAX_REASON_CHARS = 1000
MAX_FAILURE_CHARS = 500
"""Length of the reason why the job has failed, which a worker may get before it trusts the coordinator."""
MAX_RETURNED = 1000
"""Positions that a place may name."""
MAX_LINKS = 2**11
"""Views of a chain: what a coordinator does with one takes time in its square."""
_MAX_COUNT = 2**53
_MAX_RETURNED_GENERATION = 5 * 10**8  # views can follow, with claims of 9 digits, whatever one that comes back makes up
_MAX_AMOUNT = 1e9  # seconds, for one: 30 years
_MAX_NAMED = 2**20  # members of all views of a message: to name one again costs the sender next to nothing

_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_NO_VIEW = View(0, ())
_PROGRESS = tuple(field.name for field in fields(Progress))
_T = TypeVar("_T")


def to_json(value: Any) -> str:
    """JSON without spaces."""
    return _ENCODER.encode(value)


class Codec(NamedTuple):
    """The JSON form of a field: `load` validates it (or raises ValueError), `dump` is its inverse."""

    load: Callable[[Any], Any]
    dump: Callable[[Any], Any] = lambda value: value


def _text(max_chars: int, *, min_chars: int = 1) -> Codec:
    def load(value: Any) -> str:
        if type(value) is not str or not min_chars <= len(value) <= max_chars or not value.isprintable():
            raise ValueError(f"expected a printable text of {min_chars} to {max_chars} characters")
        return value

    return Codec(load)


def _integer(low: int, high: int = _MAX_COUNT) -> Codec:
    def load(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"expected an integer from {low} to {high}")
        return value

    return Codec(load)


def _load_flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("expected true or false")
    return value


def _load_duration(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= _MAX_AMOUNT:
        raise ValueError("expected a positive number of seconds")
    return float(value)


def _hex(num_chars: int, *, or_empty: bool = False) -> Codec:
    def load(value: Any) -> str:
        if type(value) is str and or_empty and not value:
            return value
        if type(value) is not str or len(value) != num_chars or not set(value) <= set("0123456789abcdef"):
            raise ValueError(f"expected {num_chars} hexadecimal digits")
        return value

    return Codec(load)


def _load_address(value: Any) -> str:
    if type(value) is not str or (value and not is_address(value)):
        raise ValueError("expected a name or an address of a host, or nothing")
    return value


def _load_endpoint(value: Any) -> str:
    text: str = _text(263, min_chars=0).load(value)
    try:
        host = parse_address(text, what="address")[0] if text else ""
    except UsageError as error:
        raise ValueError(str(error)) from None
    _load_address(host)
    return text


def _load_bytes(value: Any) -> bytes:
    if type(value) is not str:
        raise ValueError("expected base64")
    try:
        return base64.b64decode(value.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise ValueError("expected base64") from None


def _dump_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _one_of(*choices: str) -> Codec:
    def load(value: Any) -> str:
        if type(value) is not str or value not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return value

    return Codec(load)


_NAME = _text(MAX_NAME_CHARS)
_STORE = _hex(32, or_empty=True)
_ADDRESS = Codec(_load_address)
_COUNT = _integer(0)
_TRAINING = _integer(1)
_PORT = _integer(0, 65535)
_REASON = Codec(_text(MAX_REASON_CHARS, min_chars=0).load, lambda reason: reason[:MAX_REASON_CHARS])


def _patch(before: Sequence[_T], after: Sequence[_T], dump: Callable[[_T], Any]) -> list[Any]:
    """What is in `after`, in its order: as [start, stop] what stands so in `before`, and as it is what does not."""
    places = {value: place for place, value in enumerate(before)}
    parts: list[Any] = []
    stop = None  # of the range that stands last
    for value in after:
        place = places.get(value)
        if place is None:
            parts.append(dump(value))
        elif place == stop:
            parts[-1][1] = place + 1
        else:
            parts.append([place, place + 1])
        stop = None if place is None else place + 1
    return parts


def _patched(before: Sequence[_T], parts: Any, load: Callable[[Any], _T]) -> tuple[_T, ...]:
    """Inverse of :func:`_patch`."""
    if type(parts) is not list:
        raise ValueError("expected a list")
    found: list[_T] = []
    for part in parts:
        if type(part) is not list or len(part) != 2:
            found.append(load(part))
            continue
        stop = _integer(1, len(before)).load(part[1])
        found += before[_integer(0, stop - 1).load(part[0]) : stop]
        if len(found) > _MAX_NAMED:
            raise ValueError(f"expected at most {_MAX_NAMED} members")
    return tuple(found)


def _dump_failure(text: str) -> str:
    printable = "".join(char if char.isprintable() else " " for char in text)
    return printable[:MAX_FAILURE_CHARS]


def _load_member(value: Any) -> Member:
    if type(value) is not list or len(value) != 7:
        raise ValueError("expected [id, node, address, local_rank, local_world_size, standby, door]")
    local_rank, local_world_size = _COUNT.load(value[3]), _integer(1).load(value[4])
    if local_rank >= local_world_size:
        raise ValueError("expected a local rank below the local world size")
    names = _NAME.load(value[0]), _NAME.load(value[1]), _ADDRESS.load(value[2])
    return Member(*names, local_rank, local_world_size, _PORT.load(value[5]), _PORT.load(value[6]))


def _dump_member(member: Member) -> list[Any]:
    numbers = [member.local_rank, member.local_world_size, member.standby, member.door]
    return [member.id, member.node, member.address, *numbers]


def size_of(member: Member) -> int:
    """So many bytes a member takes in a view, at most."""
    return len(to_json(_dump_member(member)).encode()) + 1


def _load_view(value: Any, before: View = _NO_VIEW) -> View:
    """A view, with what it has in common with the one before it."""
    if type(value) is not list or len(value) != 8:
        raise ValueError("expected [generation, members, admitted_at, pending, hold, reason, gone, base]")
    generation = _COUNT.load(value[0])
    members = _patched(before.members, value[1], _load_member)
    if len({member.id for member in members}) != len(members):
        raise ValueError("expected different ids")
    admitted_at = _integer(0, generation).load(value[2])
    pending, hold = _load_flag(value[3]), _load_flag(value[4])
    gone = _patched(before.gone, value[6], _NAME.load)
    base = _integer(0, generation).load(value[7])
    return View(generation, members, admitted_at, pending, hold, _REASON.load(value[5]), gone, base)


def _dump_view(view: View, before: View = _NO_VIEW) -> list[Any]:
    members = _patch(before.members, view.members, _dump_member)
    texts = [_REASON.dump(view.reason), _patch(before.gone, view.gone, str)]
    return [view.generation, members, view.admitted_at, view.pending, view.hold, *texts, view.base]


def _load_links(value: Any) -> tuple[Link, ...]:
    if type(value) is not list or any(type(link) is not list or len(link) != 3 for link in value):
        raise ValueError("expected a list of [view, over, agreed]")
    if len(value) > MAX_LINKS:
        raise ValueError(f"expected at most {MAX_LINKS} views")
    links: list[Link] = []
    before, num_named = _NO_VIEW, 0
    for view, over, agreed in value:
        before = _load_view(view, before)
        num_named += len(before.members) + len(before.gone)
        if num_named > _MAX_NAMED:
            raise ValueError(f"expected views of {_MAX_NAMED} members, all together")
        links.append(Link(before, over=_load_flag(over), agreed=_load_flag(agreed)))
    if any(one.view.generation >= next_.view.generation for one, next_ in pairwise(links)):
        raise ValueError("expected growing generations")
    if any(link.view.generation > _MAX_RETURNED_GENERATION for link in links):
        raise ValueError(f"expected generations up to {_MAX_RETURNED_GENERATION}")
    return tuple(links)


def _dump_links(links: tuple[Link, ...]) -> list[Any]:
    """Each view as a patch of the one before it: of a thousand members that are lost one by one, each is named once."""
    views = [link.view for link in links]
    dumped = [_dump_view(view, before) for before, view in zip([_NO_VIEW, *views], views, strict=False)]
    return [[view, link.over, link.agreed] for view, link in zip(dumped, links, strict=True)]


def _load_place(value: Any) -> Place:
    if type(value) is not list or len(value) != 4 or type(value[2]) is not list or len(value[2]) > MAX_RETURNED:
        raise ValueError(f"expected [epoch, cursor, at most {MAX_RETURNED} returned positions, training]")
    returned = tuple(_COUNT.load(position) for position in value[2])
    return Place(_COUNT.load(value[0]), _COUNT.load(value[1]), returned, _TRAINING.load(value[3]))


def _load_place_or_null(value: Any) -> Place | None:
    return None if value is None else _load_place(value)


def _load_amount(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MAX_AMOUNT:
        raise ValueError(f"expected a number from 0 to {_MAX_AMOUNT:g}")
    return float(value)


def _load_progress(value: Any) -> Progress | None:
    if value is None:
        return None
    if type(value) is not list or len(value) != 12:
        raise ValueError("expected null or the 12 fields of a progress")
    generation, number, waits, kind, *spans, num_samples, computing_s, waiting_s, evicts = value
    for_s, longest_step_s, longest_first_s, longest_other_s = map(_load_amount, spans)
    return Progress(
        _COUNT.load(generation),
        _integer(SETTLING).load(number),
        _load_flag(waits),
        _one_of(*KINDS).load(kind),
        for_s,
        longest_step_s,
        longest_first_s,
        longest_other_s,
        _COUNT.load(num_samples),
        _load_amount(computing_s),
        _load_amount(waiting_s),
        _load_flag(evicts),
    )


def _dump_progress(progress: Progress | None) -> list[Any] | None:
    return None if progress is None else [getattr(progress, name) for name in _PROGRESS]


def _load_standbys(value: Any) -> tuple[tuple[str, int], ...]:
    if type(value) is not list or any(type(one) is not list or len(one) != 2 for one in value):
        raise ValueError("expected a list of [host, port]")
    return tuple((_ADDRESS.load(host), _PORT.load(port)) for host, port in value)


def _load_store(value: Any) -> str | None:
    return None if value is None else _STORE.load(value)


def _load_claim(value: Any) -> str:
    claim: str = _text(42, min_chars=42).load(value)
    if not (claim[:9].isdecimal() and claim.isascii() and claim[9] == "-"):
        raise ValueError("expected a generation of 9 digits and a digest")
    _hex(32).load(claim[10:])
    return claim


def _load_names(value: Any) -> tuple[str, ...]:
    if type(value) is not list:
        raise ValueError("expected a list of ids")
    return tuple(_NAME.load(worker) for worker in value)


def _load_ids(value: Any) -> tuple[str, ...]:
    ids = _load_names(value)
    if not ids or list(ids) != sorted(set(ids)):
        raise ValueError("expected sorted ids")
    return ids


Count = Annotated[int, _COUNT]
Training = Annotated[int, _TRAINING]
Flag = Annotated[bool, Codec(_load_flag)]
Duration = Annotated[float, Codec(_load_duration)]
Nonce = Annotated[str, _hex(32)]
Proof = Annotated[str, _hex(64)]
Reason = Annotated[str, _REASON]
Failure = Annotated[str, Codec(_text(MAX_FAILURE_CHARS, min_chars=0).load, _dump_failure)]
ClaimName = Annotated[str, Codec(_load_claim)]
Ids = Annotated[tuple[str, ...], Codec(_load_ids, list)]
Name = Annotated[str, _NAME]
StoreName = Annotated[str, _STORE]
StoreOrNone = Annotated[str | None, Codec(_load_store)]
Phase = Annotated[str, _one_of("warming", "ready", "member", "leaving")]
ReturnedGeneration = Annotated[int, _integer(0, _MAX_RETURNED_GENERATION)]
Port = Annotated[int, _integer(1, 65535)]
MemberField = Annotated[Member, Codec(_load_member, _dump_member)]
ViewField = Annotated[View, Codec(_load_view, _dump_view)]
Links = Annotated[tuple[Link, ...], Codec(_load_links, _dump_links)]
PlaceField = Annotated[Place, Codec(_load_place)]
PlaceOrNone = Annotated[Place | None, Codec(_load_place_or_null)]
ProgressOrNone = Annotated[Progress | None, Codec(_load_progress, _dump_progress)]
Bytes = Annotated[bytes, Codec(_load_bytes, _dump_bytes)]
Standbys = Annotated[tuple[tuple[str, int], ...], Codec(_load_standbys, lambda value: [list(one) for one in value])]
Names = Annotated[tuple[str, ...], Codec(_load_names, list)]
Endpoint = Annotated[str, Codec(_load_endpoint)]
Amount = Annotated[float, Codec(_load_amount)]
ErrorCode = Annotated[str, _one_of("authentication", "protocol")]
