"""Messages between workers and coordinator: JSON lines with a version, completely validated.

One message is one line: an object with the version ``v``, the type ``t`` and exactly the fields of its dataclass.
Any other input raises `ProtocolError`, and nothing else. Texts are printable, so they can be logged.

::

    worker                       coordinator
      |  <---------------- challenge  |    at once after the connection
      |  hello ---------------------> |    the worker's proof that it knows the token
      |  <------- welcome | finish    |    the coordinator's proof; nothing before it can be trusted
      |  heartbeat, ready, ... -----> |
      |  <------ view, announce, ...  |

A worker that comes from another coordinator says so in its hello, and reports its resume state in `return`.
A coordinator introduces itself to another one in the same way, and continues with `follow`. A standby answers a hello
with `redirect`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from ef_common.core import membership
from ef_common.core.doors import DoorAnswer
from ef_common.core.quorum import ChainLink
from ef_common.core.room import NO_DEMAND, Room
from ef_common.core.view import Member
from ef_common.errors import ProtocolError
from ef_common.protocol.fields import (
    Amount,
    Bytes,
    ClaimName,
    Count,
    DemandField,
    Digest,
    Doors,
    Duration,
    Endpoint,
    ErrorCode,
    Failure,
    Flag,
    Ids,
    JobName,
    MemberField,
    Name,
    Names,
    Nonce,
    Phase,
    Port,
    ProgressOrNone,
    Proof,
    Reason,
    ReturnedGeneration,
    Standbys,
    StoreName,
    StoreOrNone,
    Training,
    Values,
    ViewNames,
    ViewPatchField,
    Views,
    WatermarkField,
    WatermarkOrNone,
    Wish,
    to_json,
)
from ef_common.protocol.objects import Fields, brief, dump, fields_of, kind_of, load, parse

VERSION = 10
MAX_STRANGER_BYTES = 4 * 1024
"""Longest line of a peer that has not proved that it knows the token."""
MAX_LINE_BYTES = 2 * 1024 * 1024
"""Longest line of any other."""
MAX_MEMBERS_BYTES = MAX_LINE_BYTES // 2
"""So much of it the members of a view may take; the names of those that are gone take less."""


# ---------------------------------------------------------------- messages of a worker


@dataclass(frozen=True, slots=True)
class Hello:
    """The introduction of a worker; the coordinator fills in an empty address with the one that it sees.

    `key`: a secret of this worker, by which the coordinator knows it again: nobody else can come in its name.
    `returning`: it has been with another coordinator, or with this one; more follows.
    """

    member: MemberField
    nonce: Nonce
    key: Nonce
    proof: Proof
    returning: Flag


@dataclass(frozen=True, slots=True)
class Return:
    """The resume state of a worker; see :class:`~ef_common.core.membership.Returned`.

    `received` names the views; a coordinator that does not know one of them asks for it with `recall`.
    """

    phase: Phase
    promised: ReturnedGeneration
    settled: Count
    received: ViewNames
    at_boundary: Flag
    suspects: Flag
    closed: Flag
    failed: Failure
    store: StoreOrNone
    training: Training = 1
    demand: DemandField = NO_DEMAND

    @classmethod
    def of(cls, state: membership.Returned, received: ViewNames) -> Return:
        """The message that says where a worker stands, with its views by name."""
        return cls(
            state.phase.value,
            state.promised,
            state.settled,
            received,
            at_boundary=state.at_boundary,
            suspects=state.suspects,
            closed=state.closed,
            failed=state.failed,
            store=state.store,
            training=state.training,
            demand=state.demand,
        )

    def event(self, member: Member, received: tuple[ChainLink, ...]) -> membership.Returned:
        """What it says, as the event: inverse of :meth:`of`, with the views themselves."""
        return membership.Returned(
            member,
            membership.Phase(self.phase),
            promised=self.promised,
            settled=self.settled,
            received=received,
            at_boundary=self.at_boundary,
            suspects=self.suspects,
            closed=self.closed,
            failed=self.failed,
            store=self.store,
            training=self.training,
            demand=self.demand,
        )


@dataclass(frozen=True, slots=True)
class Told:
    """The views that a worker names in its `return`: an answer to `recall`, or sent before it."""

    views: Views


@dataclass(frozen=True, slots=True)
class Moved:
    """This worker lives and goes to another coordinator."""


@dataclass(frozen=True, slots=True)
class Follow:
    """From another coordinator: it listens on this port, and leads (`leads`) or gathers members so far.

    `failed`: why the job has failed; "" if it has not.
    """

    port: Port
    leads: Flag
    failed: Failure = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """This worker lives. A member also reports its progress and, if newcomers need it, its watermark."""

    watermark: WatermarkOrNone
    progress: ProgressOrNone = None


@dataclass(frozen=True, slots=True)
class Inquire:
    """From an agent: do others continue without this worker? The answers are `evicted` and `alive`."""

    worker: Name


@dataclass(frozen=True, slots=True)
class Seek:
    """From an agent that looks for its job: who leads? It listens at this door, or at none (""), and may want support.

    The answer is `standing`; :mod:`ef_common.core.doors` has the rule. A coordinator of another `job` answers with an
    `error`. A job without a name is any.
    """

    door: Endpoint
    wish: Wish
    job: JobName = ""


@dataclass(frozen=True, slots=True)
class Bye:
    """This worker closes the connection."""


@dataclass(frozen=True, slots=True)
class Relay:
    """A value for the other members of the view."""

    generation: Count
    key: Name
    value: Bytes


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
    standbys: Standbys
    training: Training = 1


@dataclass(frozen=True, slots=True)
class NewView:
    """The newest view, for its members and for those that it drops.

    `before`: generation of the view that `patch` changes, the newest one that the receiver knows; 0 for a whole view.
    """

    before: Count
    patch: ViewPatchField


@dataclass(frozen=True, slots=True)
class Recall:
    """Tell these views, which you have named by their digests."""

    digests: Names


@dataclass(frozen=True, slots=True)
class Relayed:
    """Values that members of this view have published."""

    generation: Count
    values: Values


@dataclass(frozen=True, slots=True)
class Announce:
    """A change of this view is pending."""

    generation: Count


@dataclass(frozen=True, slots=True)
class JobWatermark:
    """To a newcomer that warms up, in answer to its heartbeats: the newest watermark of the members."""

    watermark: WatermarkField


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
    """All members of this view have reported the same store; see :func:`~ef_common.core.quorum.digest_of_ids`."""

    generation: Count
    members: Digest


@dataclass(frozen=True, slots=True)
class Resign:
    """Leave, because another worker has taken the place of this one, or because fewer nodes are wanted."""


@dataclass(frozen=True, slots=True)
class Stay:
    """Do not leave after all, if you were about to because you were asked to."""


@dataclass(frozen=True, slots=True)
class Redirect:
    """This is a standby. The coordinator is at this address, or unknown (""). It may replace the welcome."""

    address: Endpoint
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
    ratio: Amount
    waiting: Amount


@dataclass(frozen=True, slots=True)
class Error:
    """The coordinator closes the connection because of what the worker did."""

    code: ErrorCode
    reason: Reason


Reported = (
    membership.Ready
    | membership.Begun
    | membership.AtBoundary
    | membership.Suspected
    | membership.Settled
    | membership.Stored
    | membership.Claimed
    | membership.Leaving
    | membership.Wanted
    | membership.Closed
    | membership.Failed
)
"""What a worker reports is an event of the membership. Its field `worker` is not sent, as the connection tells it."""
_EVENTS = frozenset(get_args(Reported))
_CORE_FIELDS: Mapping[str, Any] = {
    "training": Training,
    "generation": Count,
    "store": StoreName,
    "claim": ClaimName,
    "named": Ids,
    "why": Failure,
    "fatal": Flag,
    "demand": DemandField,
    "nodes": Count,
    "spares": Count,
    "newcomers": Count,
    "min_nodes": Count,
    "max_nodes": Count,
    "stragglers": Names,
    "leads": Flag,
    "over": Flag,
    "leader": Endpoint,
    "promised": Endpoint,
    "granted": Flag,
    "doors": Doors,
}
"""Fields of messages whose types are those of the core: the events, the answer to `seek`, and the room."""

FromWorker = Hello | Return | Told | Moved | Follow | Heartbeat | Reported | Inquire | Seek | Bye | Relay
FromCoordinator = (
    Challenge
    | Welcome
    | NewView
    | Recall
    | Announce
    | JobWatermark
    | Skip
    | Finish
    | Alive
    | Resumed
    | Republish
    | Claim
    | Agreed
    | Resign
    | Stay
    | Redirect
    | DoorAnswer
    | Evicted
    | Failed
    | Straggler
    | Room
    | Relayed
    | Error
)

_FROM_WORKER: Mapping[str, type[FromWorker]] = {
    "hello": Hello,
    "return": Return,
    "told": Told,
    "moved": Moved,
    "follow": Follow,
    "heartbeat": Heartbeat,
    "ready": membership.Ready,
    "begin": membership.Begun,
    "at_boundary": membership.AtBoundary,
    "suspect": membership.Suspected,
    "settled": membership.Settled,
    "store": membership.Stored,
    "claimed": membership.Claimed,
    "leave": membership.Leaving,
    "want": membership.Wanted,
    "close": membership.Closed,
    "fail": membership.Failed,
    "inquire": Inquire,
    "seek": Seek,
    "bye": Bye,
    "relay": Relay,
}
_FROM_COORDINATOR: Mapping[str, type[FromCoordinator]] = {
    "challenge": Challenge,
    "welcome": Welcome,
    "view": NewView,
    "recall": Recall,
    "announce": Announce,
    "watermark": JobWatermark,
    "skip": Skip,
    "finish": Finish,
    "alive": Alive,
    "resumed": Resumed,
    "republish": Republish,
    "claim": Claim,
    "agreed": Agreed,
    "resign": Resign,
    "stay": Stay,
    "redirect": Redirect,
    "standing": DoorAnswer,
    "evicted": Evicted,
    "failed": Failed,
    "straggler": Straggler,
    "room": Room,
    "relayed": Relayed,
    "error": Error,
}
_NAMES = {kind: name for table in (_FROM_WORKER, _FROM_COORDINATOR) for name, kind in table.items()}


def _fields_of(kind: type) -> Fields:
    if kind in _EVENTS or kind in (DoorAnswer, Room):
        return {name: _CORE_FIELDS[name].__metadata__[0] for name in get_type_hints(kind) if name != "worker"}
    return fields_of(kind)


_FIELDS: Mapping[type, Fields] = {kind: _fields_of(kind) for kind in _NAMES}

# ---------------------------------------------------------------- lines


def encode(message: FromWorker | FromCoordinator) -> bytes:
    """Encode a message as one line, with its newline.

    Raises:
        ProtocolError: The line would be too long.
    """
    kind = type(message)
    record = {"v": VERSION, "t": _NAMES[kind], **dump(message, _FIELDS[kind])}
    line = to_json(record).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolError(f"a message must fit into {MAX_LINE_BYTES} bytes. Received: {len(line)} bytes")
    return line


def decode_from_worker(line: bytes, *, worker: str = "", max_bytes: int = MAX_LINE_BYTES) -> FromWorker:
    """Decode a line that a worker sent (without its newline).

    Args:
        line: The line.
        worker: Who has sent it.
        max_bytes: It must be shorter.

    Raises:
        ProtocolError: The line is not a message of a worker.
    """
    message: FromWorker = _decode(line, _FROM_WORKER, max_bytes, worker)
    return message


def decode_from_coordinator(line: bytes, *, max_bytes: int = MAX_LINE_BYTES) -> FromCoordinator:
    """Decode a line that the coordinator sent (without its newline).

    Raises:
        ProtocolError: The line is not a message of a coordinator.
    """
    message: FromCoordinator = _decode(line, _FROM_COORDINATOR, max_bytes)
    return message


def _decode(line: bytes, table: Mapping[str, type], max_bytes: int, worker: str = "") -> Any:
    if len(line) >= max_bytes:
        raise ProtocolError(f"a line must have less than {max_bytes} bytes. Received: {len(line)} bytes")
    record = parse(line)
    version, name = record.pop("v", None), record.pop("t", None)
    if type(version) is not int or version != VERSION:
        raise ProtocolError(
            f"expected version {VERSION} of the protocol: use the same elasticflow everywhere. "
            f"Received: v={brief(version)}"
        )
    kind = kind_of(name, table)
    values = load(record, _FIELDS[kind], name=name)
    return kind(worker=worker, **values) if kind in _EVENTS else kind(**values)
