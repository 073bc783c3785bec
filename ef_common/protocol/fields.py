"""Fields of messages in JSON: how each is written, and how it is read and validated.

A text is printable, so it can be logged; a number has bounds. What does not fit raises ValueError.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

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

_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_PROGRESS = tuple(field.name for field in fields(Progress))


def to_json(value: Any) -> str:
    """JSON without spaces."""
    return _ENCODER.encode(value)


class FieldCodec(NamedTuple):
    """The JSON form of a field: `load` validates it (or raises ValueError), `dump` is its inverse."""

    load: Callable[[Any], Any]
    dump: Callable[[Any], Any] = lambda value: value


def _text(max_chars: int, *, min_chars: int = 1) -> FieldCodec:
    def load(value: Any) -> str:
        if type(value) is not str or not min_chars <= len(value) <= max_chars or not value.isprintable():
            raise ValueError(f"expected a printable text of {min_chars} to {max_chars} characters")
        return value

    return FieldCodec(load)


def _integer(low: int, high: int = _MAX_COUNT) -> FieldCodec:
    def load(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"expected an integer from {low} to {high}")
        return value

    return FieldCodec(load)


def _load_flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("expected true or false")
    return value


def _load_duration(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= _MAX_AMOUNT:
        raise ValueError("expected a positive number of seconds")
    return float(value)


def _hex(num_chars: int, *, or_empty: bool = False) -> FieldCodec:
    def load(value: Any) -> str:
        if type(value) is str and or_empty and not value:
            return value
        if type(value) is not str or len(value) != num_chars or not set(value) <= set("0123456789abcdef"):
            raise ValueError(f"expected {num_chars} hexadecimal digits")
        return value

    return FieldCodec(load)


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


def _load_doors(value: Any) -> tuple[str, ...]:
    if type(value) is not list or len(value) > MAX_DOORS:
        raise ValueError(f"expected a list of at most {MAX_DOORS} addresses")
    return tuple(map(_load_endpoint, value))


def _load_bytes(value: Any) -> bytes:
    if type(value) is not str:
        raise ValueError("expected base64")
    try:
        return base64.b64decode(value.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise ValueError("expected base64") from None


def _dump_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _load_values(value: Any) -> tuple[tuple[str, bytes], ...]:
    if type(value) is not list or any(type(one) is not list or len(one) != 2 for one in value):
        raise ValueError("expected a list of [key, value]")
    return tuple((_NAME.load(key), _load_bytes(content)) for key, content in value)


def _dump_values(values: tuple[tuple[str, bytes], ...]) -> list[Any]:
    return [[key, _dump_bytes(content)] for key, content in values]


def _one_of(*choices: str) -> FieldCodec:
    def load(value: Any) -> str:
        if type(value) is not str or value not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return value

    return FieldCodec(load)


def _load_phase(value: Any) -> Phase:
    return Phase(_PHASE.load(value))


_NAME = _text(MAX_NAME_CHARS)
_STORE = _hex(32, or_empty=True)
_ADDRESS = FieldCodec(_load_address)
_PHASE = _one_of("warming", "ready", "member", "leaving")
_COUNT = _integer(0)
_TRAINING = _integer(1)
_PORT = _integer(0, 65535)


def clip(text: str) -> str:
    """Shorten a text so that it can be sent as a reason."""
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable[:MAX_REASON_CHARS]


_REASON = FieldCodec(_text(MAX_REASON_CHARS, min_chars=0).load, clip)


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


def _load_span(value: Any) -> Span | None:
    """The ranks that stand for what the view before has as well; None if this is something else."""
    if type(value) is not list or len(value) != 2:
        return None
    start, stop = value
    if type(start) is not int or type(stop) is not int or not 0 <= start < stop <= MAX_NAMED:
        raise ValueError("expected ranks [start, stop]")
    return Span(start, stop)


def _load_patch(value: Any) -> ViewPatch:
    if type(value) is not list or len(value) != 9 or type(value[1]) is not list or type(value[6]) is not list:
        raise ValueError("expected [generation, members, admitted_at, pending, hold, reason, gone, base, issuer]")
    below = _integer(0, _COUNT.load(value[0]))
    rest = View(
        value[0],
        members=(),
        admitted_at=below.load(value[2]),
        pending=_load_flag(value[3]),
        hold=_load_flag(value[4]),
        reason=_REASON.load(value[5]),
        base=below.load(value[7]),
        issuer=_PORT.load(value[8]),
    )
    members = tuple(_load_span(part) or _load_member(part) for part in value[1])
    return ViewPatch(rest, members, gone=tuple(_load_span(part) or _NAME.load(part) for part in value[6]))


def _dump_patch(patch: ViewPatch) -> list[Any]:
    members = [_dump_member(part) if isinstance(part, Member) else list(part) for part in patch.members]
    gone = [part if isinstance(part, str) else list(part) for part in patch.gone]
    rest = patch.rest
    texts = [_REASON.dump(rest.reason), gone]
    return [rest.generation, members, rest.admitted_at, rest.pending, rest.hold, *texts, rest.base, rest.issuer]


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


def _load_view_names(value: Any) -> tuple[ViewName, ...]:
    if type(value) is not list or any(type(one) is not list or len(one) != 4 for one in value):
        raise ValueError("expected a list of [generation, digest, over, agreed]")
    if len(value) > MAX_LINKS:
        raise ValueError(f"expected at most {MAX_LINKS} views")
    generation, digest = _integer(0, _MAX_RETURNED_GENERATION), _hex(32)
    names = tuple(
        ViewName(generation.load(one[0]), digest.load(one[1]), _load_flag(one[2]), _load_flag(one[3])) for one in value
    )
    if any(one.generation >= following.generation for one, following in pairwise(names)):
        raise ValueError("expected growing generations")
    return names


def _load_watermark(value: Any) -> Watermark:
    if type(value) is not list or len(value) != 4 or type(value[2]) is not list or len(value[2]) > MAX_RETURNED:
        raise ValueError(f"expected [epoch, cursor, at most {MAX_RETURNED} returned positions, training]")
    returned = tuple(_COUNT.load(position) for position in value[2])
    return Watermark(_COUNT.load(value[0]), _COUNT.load(value[1]), returned, _TRAINING.load(value[3]))


def _load_watermark_or_null(value: Any) -> Watermark | None:
    return None if value is None else _load_watermark(value)


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


def _load_demand(value: Any) -> Demand:
    if type(value) is not list or len(value) != 3:
        raise ValueError("expected [generation, number, nodes]")
    return Demand(_integer(0, _MAX_RETURNED_GENERATION).load(value[0]), _COUNT.load(value[1]), _COUNT.load(value[2]))


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
Flag = Annotated[bool, FieldCodec(_load_flag)]
Duration = Annotated[float, FieldCodec(_load_duration)]
Nonce = Annotated[str, _hex(32)]
Proof = Annotated[str, _hex(64)]
Reason = Annotated[str, _REASON]
Failure = Annotated[str, FieldCodec(_text(MAX_FAILURE_CHARS, min_chars=0).load, _dump_failure)]
ClaimName = Annotated[str, FieldCodec(_load_claim)]
Ids = Annotated[tuple[str, ...], FieldCodec(_load_ids, list)]
Name = Annotated[str, _NAME]
StoreName = Annotated[str, _STORE]
JobName = Annotated[str, _text(MAX_NAME_CHARS, min_chars=0)]
StoreOrNone = Annotated[str | None, FieldCodec(_load_store)]
PhaseField = Annotated[Phase, FieldCodec(_load_phase, lambda phase: phase.value)]
ReturnedGeneration = Annotated[int, _integer(0, _MAX_RETURNED_GENERATION)]
Port = Annotated[int, _integer(1, 65535)]
MemberField = Annotated[Member, FieldCodec(_load_member, _dump_member)]
ViewPatchField = Annotated[ViewPatch, FieldCodec(_load_patch, _dump_patch)]
ViewNames = Annotated[tuple[ViewName, ...], FieldCodec(_load_view_names, lambda names: [list(name) for name in names])]
Views = Annotated[tuple[View, ...], FieldCodec(_load_views, _dump_views)]
Digest = Annotated[str, _hex(32)]
WatermarkField = Annotated[Watermark, FieldCodec(_load_watermark)]
WatermarkOrNone = Annotated[Watermark | None, FieldCodec(_load_watermark_or_null)]
ProgressOrNone = Annotated[Progress | None, FieldCodec(_load_progress, _dump_progress)]
Bytes = Annotated[bytes, FieldCodec(_load_bytes, _dump_bytes)]
Values = Annotated[tuple[tuple[str, bytes], ...], FieldCodec(_load_values, _dump_values)]
Standbys = Annotated[
    tuple[tuple[str, int], ...], FieldCodec(_load_standbys, lambda value: [list(one) for one in value])
]
Names = Annotated[tuple[str, ...], FieldCodec(_load_names, list)]
Endpoint = Annotated[str, FieldCodec(_load_endpoint)]
Doors = Annotated[tuple[str, ...], FieldCodec(_load_doors, list)]
Wish = Annotated[str, _one_of(LOOK, PROMISE, COMMIT)]
Amount = Annotated[float, FieldCodec(_load_amount)]
DemandField = Annotated[Demand, FieldCodec(_load_demand, list)]
ErrorCode = Annotated[str, _one_of("authentication", "job", "protocol")]
