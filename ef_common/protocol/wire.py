"""Messages between workers and coordinator: JSON lines with a version, completely validated.

One message is one line: an object with the version ``v``, the type ``t`` and exactly the fields of its dataclass below.
Any other input raises `ProtocolError`, and nothing else. Texts are printable, so they can be logged.

::

    worker                       coordinator
      |  <---------------- challenge  |    at once after the connection
      |  hello ---------------------> |    the worker's proof that it knows the token
      |  <------- welcome | finish    |    the coordinator's proof; nothing before it can be trusted
      |  heartbeat, ready, ... -----> |
      |  <------ view, announce, ...  |

A worker that comes from another coordinator says so in its hello, and reports its standing in `return`. A coordinator
introduces itself to another one in the same way, and continues with `follow`. A standby answers a hello with
`redirect`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar, get_type_hints

from ef_common.core.place import Place
from ef_common.core.progress import KINDS, SETTLING, Progress
from ef_common.core.quorum import Link
from ef_common.core.view import Member, View
from ef_common.errors import ProtocolError, UsageError
from ef_common.protocol.addresses import is_address, parse_address

VERSION = 7
MAX_STRANGER_BYTES = 4 * 1024
"""Longest line of a peer that has not proved that it knows the token."""
MAX_LINE_BYTES = 2 * 1024 * 1024
"""Longest line of any other."""
MAX_MEMBERS_BYTES = MAX_LINE_BYTES // 2
"""So much of it the members of a view may take; the names of those that are gone take less."""
MAX_NAME_CHARS = 128
MAX_REASON_CHARS = 1000
MAX_FAILURE_CHARS = 500
"""Length of the reason why the job has failed, which a worker may get before it trusts the coordinator."""
MAX_RETURNED = 1000
"""Positions that a place may name."""
_MAX_COUNT = 2**53
_MAX_RETURNED_GENERATION = 5 * 10**8  # views can follow, with claims of 9 digits, whatever one that comes back makes up
_MAX_AMOUNT = 1e9  # seconds, for one: 30 years
_MAX_LINKS = 2**11  # of a chain: what a coordinator does with one takes time in its square
_MAX_NAMED = 2**20  # members of all views of a message: to name one again costs the sender next to nothing


_NO_VIEW = View(0, ())
_PROGRESS = tuple(field.name for field in fields(Progress))
_T = TypeVar("_T")


class _Codec(NamedTuple):
    """The JSON form of a field: `load` validates it (or raises ValueError), `dump` is its inverse."""

    load: Callable[[Any], Any]
    dump: Callable[[Any], Any] = lambda value: value


# ---------------------------------------------------------------- fields


def _text(max_chars: int, *, min_chars: int = 1) -> _Codec:
    def load(value: Any) -> str:
        if type(value) is not str or not min_chars <= len(value) <= max_chars or not value.isprintable():
            raise ValueError(f"expected a printable text of {min_chars} to {max_chars} characters")
        return value

    return _Codec(load)


def _integer(low: int, high: int = _MAX_COUNT) -> _Codec:
    def load(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"expected an integer from {low} to {high}")
        return value

    return _Codec(load)


def _load_flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("expected true or false")
    return value


def _load_duration(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= _MAX_AMOUNT:
        raise ValueError("expected a positive number of seconds")
    return float(value)


def _hex(num_chars: int, *, or_empty: bool = False) -> _Codec:
    def load(value: Any) -> str:
        if type(value) is str and or_empty and not value:
            return value
        if type(value) is not str or len(value) != num_chars or not set(value) <= set("0123456789abcdef"):
            raise ValueError(f"expected {num_chars} hexadecimal digits")
        return value

    return _Codec(load)


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


def _one_of(*choices: str) -> _Codec:
    def load(value: Any) -> str:
        if type(value) is not str or value not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return value

    return _Codec(load)


_NAME = _text(MAX_NAME_CHARS)
_STORE = _hex(32, or_empty=True)
_ADDRESS = _Codec(_load_address)
_COUNT = _integer(0)
_TRAINING = _integer(1)
_PORT = _integer(0, 65535)
_REASON = _Codec(_text(MAX_REASON_CHARS, min_chars=0).load, lambda reason: reason[:MAX_REASON_CHARS])


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
    return len(_json(_dump_member(member)).encode()) + 1


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
    if len(value) > _MAX_LINKS:
        raise ValueError(f"expected at most {_MAX_LINKS} views")
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
Flag = Annotated[bool, _Codec(_load_flag)]
Duration = Annotated[float, _Codec(_load_duration)]
Nonce = Annotated[str, _hex(32)]
Proof = Annotated[str, _hex(64)]
Reason = Annotated[str, _REASON]
Failure = Annotated[str, _Codec(_text(MAX_FAILURE_CHARS, min_chars=0).load, _dump_failure)]
ClaimName = Annotated[str, _Codec(_load_claim)]
Ids = Annotated[tuple[str, ...], _Codec(_load_ids, list)]

# ---------------------------------------------------------------- messages of a worker


@dataclass(frozen=True, slots=True)
class Hello:
    """The introduction of a worker; the coordinator fills in an empty address with the one that it sees.

    `key`: a secret of this worker, by which the coordinator knows it again: nobody else can come in its name.
    `returning`: it has been with another coordinator, or with this one; more follows.
    """

    member: Annotated[Member, _Codec(_load_member, _dump_member)]
    nonce: Nonce
    key: Nonce
    proof: Proof
    returning: Flag


@dataclass(frozen=True, slots=True)
class Return:
    """The standing of a worker; see :class:`~ef_common.core.membership.Returned`."""

    phase: Annotated[str, _one_of("warming", "ready", "member", "leaving")]
    promised: Annotated[int, _integer(0, _MAX_RETURNED_GENERATION)]
    settled: Count
    received: Annotated[tuple[Link, ...], _Codec(_load_links, _dump_links)]
    at_boundary: Flag
    suspects: Flag
    closed: Flag
    failed: Failure
    store: Annotated[str | None, _Codec(_load_store)]
    training: Training = 1


@dataclass(frozen=True, slots=True)
class Moved:
    """This worker lives and goes to another coordinator."""


@dataclass(frozen=True, slots=True)
class Follow:
    """From another coordinator: it listens on this port, and leads (`leads`) or gathers members so far.

    `failed`: why the job has failed; "" if it has not.
    """

    port: Annotated[int, _integer(1, 65535)]
    leads: Flag
    failed: Failure = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """This worker lives. A member also reports its progress and, if newcomers need it, its place."""

    place: Annotated[Place | None, _Codec(_load_place_or_null)]
    progress: Annotated[Progress | None, _Codec(_load_progress, _dump_progress)] = None


@dataclass(frozen=True, slots=True)
class Ready:
    """This newcomer is warm and waits at its first boundary, in this training of its program."""

    training: Training = 1


@dataclass(frozen=True, slots=True)
class Begin:
    """The program of this member has come to another training."""

    training: Training


@dataclass(frozen=True, slots=True)
class AtBoundary:
    """This member waits at the boundary that the members of the view agreed on."""

    generation: Count


@dataclass(frozen=True, slots=True)
class Suspect:
    """This member's group broke."""

    generation: Count


@dataclass(frozen=True, slots=True)
class Settled:
    """This member has built the group of this view."""

    generation: Count


@dataclass(frozen=True, slots=True)
class Store:
    """The store on which all members have agreed: the digest of a marker in it, or "" for none."""

    store: Annotated[str, _STORE]


@dataclass(frozen=True, slots=True)
class Claimed:
    """An answer to `claim`: it names these members."""

    claim: ClaimName
    named: Ids


@dataclass(frozen=True, slots=True)
class Leave:
    """This member wants to leave at a boundary."""


@dataclass(frozen=True, slots=True)
class Close:
    """The program of this member ends, and so does the job."""


@dataclass(frozen=True, slots=True)
class Fail:
    """An exception of the user's own code ends this worker; see :class:`~ef_common.core.membership.Failed`."""

    why: Failure
    fatal: Flag


@dataclass(frozen=True, slots=True)
class Inquire:
    """From an agent: do others continue without this worker? The answers are `evicted` and `alive`."""

    worker: Annotated[str, _NAME]


@dataclass(frozen=True, slots=True)
class Bye:
    """This worker closes the connection."""


@dataclass(frozen=True, slots=True)
class Relay:
    """A value for the other members of the view (in both directions)."""

    generation: Count
    key: Annotated[str, _NAME]
    value: Annotated[bytes, _Codec(_load_bytes, _dump_bytes)]


# ---------------------------------------------------------------- messages of the coordinator


@dataclass(frozen=True, slots=True)
class Challenge:
    """First message on a connection."""

    nonce: Nonce


@dataclass(frozen=True, slots=True)
class Welcome:
    """Warm up (the job already runs), or wait for the first view. It is sent again to a new spare.

    `standbys`: (host, port) of some, for one who knows no view yet. `training`: the one that the members are in.
    """

    warm_up: Flag
    heartbeat_timeout_s: Duration
    proof: Proof
    standbys: Annotated[tuple[tuple[str, int], ...], _Codec(_load_standbys, lambda value: [list(one) for one in value])]
    training: Training = 1


@dataclass(frozen=True, slots=True)
class NewView:
    """The newest view, for its members and for those that it drops."""

    view: Annotated[View, _Codec(_load_view, _dump_view)]


@dataclass(frozen=True, slots=True)
class Announce:
    """A change of this view is pending."""

    generation: Count


@dataclass(frozen=True, slots=True)
class JobPlace:
    """To a newcomer that warms up, in answer to its heartbeats: the newest place of the members."""

    place: Annotated[Place, _Codec(_load_place)]


@dataclass(frozen=True, slots=True)
class Skip:
    """To a newcomer: the members are in this training of the program, so the earlier ones are over."""

    training: Training


@dataclass(frozen=True, slots=True)
class Finish:
    """The job has ended. It may replace the welcome, so it carries the same proof."""

    proof: Proof


@dataclass(frozen=True, slots=True)
class Alive:
    """An answer to a heartbeat; to an inquiry: as far as is decided, nobody continues without this worker."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """This view continues under this coordinator."""

    generation: Count


@dataclass(frozen=True, slots=True)
class Republish:
    """A member of this view has come back: publish again what you have published, as it may lack that."""

    generation: Count


@dataclass(frozen=True, slots=True)
class Claim:
    """Try to get this claim in the store for these members."""

    claim: ClaimName
    members: Ids


@dataclass(frozen=True, slots=True)
class Agreed:
    """All members of this view have reported the same store."""

    generation: Count
    members: Annotated[tuple[str, ...], _Codec(_load_names, list)]


@dataclass(frozen=True, slots=True)
class Resign:
    """Leave, because another worker has taken the place of this one."""


@dataclass(frozen=True, slots=True)
class Redirect:
    """This is a standby. The coordinator is at this address, or unknown (""). It may replace the welcome."""

    address: Annotated[str, _Codec(_load_endpoint)]
    proof: Proof


@dataclass(frozen=True, slots=True)
class Evicted:
    """The others continue without this worker. `hung`: its main thread may never hear of it."""

    reason: Reason
    hung: Flag = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The job has failed. It may replace the welcome, so it carries the same proof."""

    why: Failure
    proof: Proof


@dataclass(frozen=True, slots=True)
class Straggler:
    """To a member: it is slower than the others (`slow`), or no longer; see `core.stragglers.Report`."""

    slow: Flag
    ratio: Annotated[float, _Codec(_load_amount)]
    waiting: Annotated[float, _Codec(_load_amount)]


@dataclass(frozen=True, slots=True)
class Error:
    """The coordinator closes the connection because of what the worker did."""

    code: Annotated[str, _one_of("authentication", "protocol")]
    reason: Reason


FromWorker = (
    Hello
    | Return
    | Moved
    | Follow
    | Heartbeat
    | Ready
    | Begin
    | AtBoundary
    | Suspect
    | Settled
    | Store
    | Claimed
    | Leave
    | Close
    | Fail
    | Inquire
    | Bye
    | Relay
)
FromCoordinator = (
    Challenge
    | Welcome
    | NewView
    | Announce
    | JobPlace
    | Skip
    | Finish
    | Alive
    | Resumed
    | Republish
    | Claim
    | Agreed
    | Resign
    | Redirect
    | Evicted
    | Failed
    | Straggler
    | Relay
    | Error
)

_FROM_WORKER: Mapping[str, type[FromWorker]] = {
    "hello": Hello,
    "return": Return,
    "moved": Moved,
    "follow": Follow,
    "heartbeat": Heartbeat,
    "ready": Ready,
    "begin": Begin,
    "at_boundary": AtBoundary,
    "suspect": Suspect,
    "settled": Settled,
    "store": Store,
    "claimed": Claimed,
    "leave": Leave,
    "close": Close,
    "fail": Fail,
    "inquire": Inquire,
    "bye": Bye,
    "relay": Relay,
}
_FROM_COORDINATOR: Mapping[str, type[FromCoordinator]] = {
    "challenge": Challenge,
    "welcome": Welcome,
    "view": NewView,
    "announce": Announce,
    "place": JobPlace,
    "skip": Skip,
    "finish": Finish,
    "alive": Alive,
    "resumed": Resumed,
    "republish": Republish,
    "claim": Claim,
    "agreed": Agreed,
    "resign": Resign,
    "redirect": Redirect,
    "evicted": Evicted,
    "failed": Failed,
    "straggler": Straggler,
    "relay": Relay,
    "error": Error,
}
_NAMES = {kind: name for table in (_FROM_WORKER, _FROM_COORDINATOR) for name, kind in table.items()}
_FIELDS: Mapping[type, Mapping[str, _Codec]] = {
    kind: {name: hint.__metadata__[0] for name, hint in get_type_hints(kind, include_extras=True).items()}
    for kind in _NAMES
}

# ---------------------------------------------------------------- lines


def encode(message: FromWorker | FromCoordinator) -> bytes:
    """Encode a message as one line, with its newline.

    Raises:
        ProtocolError: The line would be too long.
    """
    kind = type(message)
    fields = {name: codec.dump(getattr(message, name)) for name, codec in _FIELDS[kind].items()}
    record = {"v": VERSION, "t": _NAMES[kind], **fields}
    line = _json(record).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolError(f"a message must fit into {MAX_LINE_BYTES} bytes. Received: {len(line)} bytes")
    return line


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _json(value: Any) -> str:
    return _ENCODER.encode(value)


def decode_from_worker(line: bytes, *, max_bytes: int = MAX_LINE_BYTES) -> FromWorker:
    """Decode a line that a worker sent (without its newline).

    Raises:
        ProtocolError: The line is not a message of a worker.
    """
    message: FromWorker = _decode(line, _FROM_WORKER, max_bytes)
    return message


def decode_from_coordinator(line: bytes, *, max_bytes: int = MAX_LINE_BYTES) -> FromCoordinator:
    """Decode a line that the coordinator sent (without its newline).

    Raises:
        ProtocolError: The line is not a message of a coordinator.
    """
    message: FromCoordinator = _decode(line, _FROM_COORDINATOR, max_bytes)
    return message


def _decode(line: bytes, table: Mapping[str, type], max_bytes: int) -> Any:
    if len(line) >= max_bytes:
        raise ProtocolError(f"a line must have less than {max_bytes} bytes. Received: {len(line)} bytes")
    record = _parse(line)
    version, name = record.pop("v", None), record.pop("t", None)
    if type(version) is not int or version != VERSION:
        raise ProtocolError(
            f"expected version {VERSION} of the protocol: use the same elasticflow everywhere. "
            f"Received: v={_brief(version)}"
        )
    kind = table.get(name) if type(name) is str else None
    if kind is None:
        raise ProtocolError(f"expected one of {', '.join(table)}. Received: t={_brief(name)}")
    codecs = _FIELDS[kind]
    if record.keys() != codecs.keys():
        raise ProtocolError(f"{name} must have the fields ({', '.join(codecs)}). Received: {_brief(list(record))}")
    return kind(**{field: _load(codec, record[field], f"{name}.{field}") for field, codec in codecs.items()})


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = _DECODER.decode(line.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"expected a line of JSON: {_brief(str(error))}") from None
    if type(record) is not dict:
        raise ProtocolError(f"expected a JSON object. Received: {type(record).__name__}")
    return record


def _load(codec: _Codec, value: Any, where: str) -> Any:
    try:
        return codec.load(value)
    except (ValueError, OverflowError) as error:
        raise ProtocolError(f"{where}: {error}. Received: {_brief(value)}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a field stands twice")
    return record


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)


def _brief(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:80] + "..."
