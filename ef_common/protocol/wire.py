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

Where nodes keep standbys, a worker soon connects once more, and introduces itself with `downlink`: after `downlink` on
the first connection, the coordinator speaks on the second one alone, on which the worker says nothing. If the process
of either ends, its system resets a connection on which it has left something unread, and what it had sent may be lost;
so where only one side speaks, the end of its process is an end in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from ef_common.core import membership
from ef_common.core.doors import DoorAnswer
from ef_common.core.membership import Phase
from ef_common.core.progress import Progress
from ef_common.core.room import Demand, Room
from ef_common.core.stragglers import StragglerReport
from ef_common.core.view import Member, View
from ef_common.core.watermark import Watermark
from ef_common.errors import ProtocolError
from ef_common.protocol import fields
from ef_common.protocol.objects import brief, kind_of, layout_of, parse
from ef_common.protocol.view_patch import ViewName, ViewPatch

VERSION = 13
MAX_STRANGER_BYTES = 4 * 1024
"""Longest line of a peer that has not proved that it knows the token."""
MAX_LINE_BYTES = 2 * 1024 * 1024
"""Longest line of any other.

No message that was measured is above 1 MiB, but that is no bound: a value of 1 MiB takes a third more in base64, and
`told` may have to name 8,192 members and 2,048 views after that.
"""
MAX_MEMBERS_BYTES = MAX_LINE_BYTES // 2
"""So much of it the members of a view may take; the names of those that are gone take less."""


# ---------------------------------------------------------------- messages of a worker


class WorkerMessage:
    """Base of those that are no events of the membership."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Hello(WorkerMessage):
    """The introduction of a worker; the coordinator fills in an empty address with the one that it sees.

    `key`: a secret of this worker, by which the coordinator knows it again: nobody else can come in its name.
    `returning`: it has been with another coordinator, or with this one; more follows.
    `downlink`: it is connected already, and will say nothing here, but hear all.
    """

    member: Annotated[Member, fields.MEMBER]
    nonce: Annotated[str, fields.DIGEST]
    key: Annotated[str, fields.DIGEST]
    proof: Annotated[str, fields.PROOF]
    returning: bool
    downlink: bool = False


@dataclass(frozen=True, slots=True)
class Return(WorkerMessage):
    """Where a worker stands, with its views by name: a coordinator that does not know one asks for it with `recall`."""

    event: membership.Returned
    received: Annotated[tuple[ViewName, ...], fields.VIEW_NAMES]


@dataclass(frozen=True, slots=True)
class Told(WorkerMessage):
    """The views that a worker names in its `return`: an answer to `recall`, or sent before it."""

    views: Annotated[tuple[View, ...], fields.VIEWS]


@dataclass(frozen=True, slots=True)
class Moved(WorkerMessage):
    """This worker lives and goes to another coordinator."""


@dataclass(frozen=True, slots=True)
class Follow(WorkerMessage):
    """From another coordinator: it listens on this port, and leads (`leads`) or gathers members so far.

    `failed`: why the job has failed; "" if it has not. A coordinator of another `job` takes no notice; a job without a
    name is any.
    """

    port: Annotated[int, fields.PORT]
    leads: bool
    failed: Annotated[str, fields.FAILURE] = ""
    job: Annotated[str, fields.JOB] = ""


@dataclass(frozen=True, slots=True)
class Heartbeat(WorkerMessage):
    """This worker lives. A member also reports its progress and, if newcomers need it, its watermark."""

    watermark: Annotated[Watermark | None, fields.WATERMARK_OR_NONE]
    progress: Annotated[Progress | None, fields.PROGRESS_OR_NONE] = None


@dataclass(frozen=True, slots=True)
class Inquire(WorkerMessage):
    """From an agent: do others continue without this worker? The answers are `evicted` and `alive`."""

    worker: Annotated[str, fields.NAME]


@dataclass(frozen=True, slots=True)
class Seek(WorkerMessage):
    """From an agent that looks for its job: who leads? It listens at this door, or at none (""), and may want support.

    It gets a `door_answer`; :mod:`ef_common.core.doors` has the rule. A coordinator of another `job` answers with an
    `error`. A job without a name is any.
    """

    door: Annotated[str, fields.ENDPOINT]
    wish: Annotated[str, fields.WISH]
    job: Annotated[str, fields.JOB] = ""


@dataclass(frozen=True, slots=True)
class Bye(WorkerMessage):
    """This worker closes the connection."""


@dataclass(frozen=True, slots=True)
class Relay(WorkerMessage):
    """A value for the other members of the view."""

    generation: Annotated[int, fields.COUNT]
    key: Annotated[str, fields.NAME]
    value: Annotated[bytes, fields.BYTES]


# ---------------------------------------------------------------- messages of the coordinator


class CoordinatorMessage:
    """Base of those that are no actions of the membership."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Challenge(CoordinatorMessage):
    """First message on a connection."""

    nonce: Annotated[str, fields.DIGEST]


@dataclass(frozen=True, slots=True)
class Welcome(CoordinatorMessage):
    """This worker is taken in. It is sent again to a new spare.

    `standbys`: (host, port) of some, for one who knows no view yet.
    """

    accept: membership.Accept
    heartbeat_timeout_s: Annotated[float, fields.DURATION]
    proof: Annotated[str, fields.PROOF]
    standbys: Annotated[tuple[tuple[str, int], ...], fields.STANDBYS]


@dataclass(frozen=True, slots=True)
class NewView(CoordinatorMessage):
    """The newest view, for its members and for those that it drops.

    `before`: generation of the view that `patch` changes, the newest one that the receiver knows; 0 for a whole view.
    """

    before: Annotated[int, fields.COUNT]
    patch: Annotated[ViewPatch, fields.VIEW_PATCH]


@dataclass(frozen=True, slots=True)
class Downlink(CoordinatorMessage):
    """The last message on this connection: what follows comes on the worker's downlink."""


@dataclass(frozen=True, slots=True)
class Recall(CoordinatorMessage):
    """Tell these views, which you have named by their digests."""

    digests: Annotated[tuple[str, ...], fields.NAMES]


@dataclass(frozen=True, slots=True)
class Relayed(CoordinatorMessage):
    """Values that members of this view have published."""

    generation: Annotated[int, fields.COUNT]
    values: Annotated[tuple[tuple[str, bytes], ...], fields.VALUES]


@dataclass(frozen=True, slots=True)
class JobWatermark(CoordinatorMessage):
    """To a newcomer that warms up, in answer to its heartbeats: the newest watermark of the members."""

    watermark: Annotated[Watermark, fields.WATERMARK]


@dataclass(frozen=True, slots=True)
class Finished(CoordinatorMessage):
    """The job has ended. It may replace the welcome, so it carries the same proof."""

    finish: membership.Finish
    proof: Annotated[str, fields.PROOF]


@dataclass(frozen=True, slots=True)
class Alive(CoordinatorMessage):
    """An answer to a heartbeat; to an inquiry: as far as is decided, nobody continues without this worker."""


@dataclass(frozen=True, slots=True)
class Redirect(CoordinatorMessage):
    """This is a standby. The coordinator is at this address, or unknown (""). It may replace the welcome.

    It is no decision of the membership, which sends a worker away and knows no address.
    """

    address: Annotated[str, fields.ENDPOINT]
    proof: Annotated[str, fields.PROOF]


@dataclass(frozen=True, slots=True)
class Eviction(CoordinatorMessage):
    """The others continue without this worker. `hung`: its main thread may never hear of it.

    It is no decision of the membership: that dismisses some, but others are silent or hang, and an agent may ask.
    """

    reason: Annotated[str, fields.REASON]
    hung: bool = False


@dataclass(frozen=True, slots=True)
class Aborted(CoordinatorMessage):
    """The job has failed. It may replace the welcome, so it carries the same proof."""

    abort: membership.Abort
    proof: Annotated[str, fields.PROOF]


@dataclass(frozen=True, slots=True)
class Error(CoordinatorMessage):
    """The coordinator closes the connection because of what the worker did."""

    code: Annotated[str, fields.ERROR_CODE]
    reason: Annotated[str, fields.REASON]


FromWorker = WorkerMessage | membership.Event
"""What a worker reports is an event of the membership, unless the message says what the membership does not know."""
FromCoordinator = CoordinatorMessage | membership.Action | DoorAnswer | StragglerReport | Room
"""What a worker is told of a decision is the action, likewise."""

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
    "downlink": Downlink,
    "view": NewView,
    "recall": Recall,
    "announce": membership.Announce,
    "watermark": JobWatermark,
    "skip": membership.Skip,
    "finish": Finished,
    "alive": Alive,
    "resumed": membership.Resume,
    "republish": membership.Republish,
    "claim": membership.Claim,
    "agreed": membership.Agree,
    "resign": membership.Resign,
    "stay": membership.Stay,
    "redirect": Redirect,
    "door_answer": DoorAnswer,
    "evicted": Eviction,
    "failed": Aborted,
    "straggler": StragglerReport,
    "room": Room,
    "relayed": Relayed,
    "error": Error,
}
_NAMES = {kind: name for table in (_FROM_WORKER, _FROM_COORDINATOR) for name, kind in table.items()}


_CODECS: Mapping[str | type, fields.FieldCodec] = {
    bool: fields.FLAG,
    float: fields.AMOUNT,
    Phase: fields.PHASE,
    Demand: fields.DEMAND,
    "training": fields.TRAINING,
    "generation": fields.COUNT,
    "store": fields.STORE,
    "claim": fields.CLAIM,
    "named": fields.IDS,
    "members": fields.IDS,
    "Agree.members": fields.DIGEST,
    "why": fields.FAILURE,
    "Returned.promised": fields.RETURNED_GENERATION,
    "settled": fields.COUNT,
    "failed": fields.FAILURE,
    "Returned.store": fields.STORE_OR_NONE,
    "nodes": fields.COUNT,
    "spares": fields.COUNT,
    "newcomers": fields.COUNT,
    "min_nodes": fields.COUNT,
    "max_nodes": fields.COUNT,
    "stragglers": fields.NAMES,
    "leader": fields.ENDPOINT,
    "promised": fields.ENDPOINT,
    "doors": fields.DOORS,
}
"""How the fields of the core's dataclasses are written: of events, actions, reports, and what both ends know."""
_KNOWN: Mapping[str, Any] = {"worker": "", "workers": (), "member": Member("", "", ""), "received": ()}
"""Fields of these that are not written: who speaks or is spoken to (the connection tells it), and views by content."""
LAYOUTS = {kind: layout_of(kind, _CODECS, unwritten=_KNOWN) for kind in _NAMES}
"""How each kind of message is written."""

# ---------------------------------------------------------------- lines


def encode(message: FromWorker | FromCoordinator) -> bytes:
    """Encode a message as one line, with its newline.

    Raises:
        ProtocolError: The line would be too long.
    """
    kind = type(message)
    record = {"v": VERSION, "t": _NAMES[kind], **LAYOUTS[kind].dump(message)}
    line = fields.to_json(record).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolError(f"a message must fit into {MAX_LINE_BYTES} bytes. Received: {len(line)} bytes")
    return line


def decode_from_worker(line: bytes, *, sender: Member | None = None, max_bytes: int = MAX_LINE_BYTES) -> FromWorker:
    """Decode a line that a worker sent (without its newline).

    Args:
        line: The line.
        sender: Who has sent it, if that is known.
        max_bytes: It must be shorter.

    Raises:
        ProtocolError: The line is not a message of a worker.
    """
    known = _KNOWN if sender is None else {**_KNOWN, "worker": sender.id, "member": sender}
    message: FromWorker = _decode(line, _FROM_WORKER, max_bytes, known)
    return message


def decode_from_coordinator(line: bytes, *, max_bytes: int = MAX_LINE_BYTES) -> FromCoordinator:
    """Decode a line that the coordinator sent (without its newline). It names nobody as its receiver.

    Raises:
        ProtocolError: The line is not a message of a coordinator.
    """
    message: FromCoordinator = _decode(line, _FROM_COORDINATOR, max_bytes, _KNOWN)
    return message


def _decode(line: bytes, table: Mapping[str, type], max_bytes: int, known: Mapping[str, Any]) -> Any:
    if len(line) >= max_bytes:
        raise ProtocolError(f"a line must have less than {max_bytes} bytes. Received: {len(line)} bytes")
    record = parse(line)
    version, name = record.pop("v", None), record.pop("t", None)
    if type(version) is not int or version != VERSION:
        raise ProtocolError(
            f"expected version {VERSION} of the protocol: use the same elasticflow everywhere. "
            f"Received: v={brief(version)}"
        )
    return LAYOUTS[kind_of(name, table)].load(record, name=name, known=known)
