"""What a launcher and the far side of its connection to a host say to each other: JSON, one object in a line.

The launcher says, through the standard input of its remote shell::

    {"order": {…}}              first: what is to run there; see `Order`
    {"beat": ""}                every few seconds, with what the node is told: "", "leave" or "kill";
                                "known" when the launcher knows how it has ended

The far side answers on standard output, among whatever a login shell prints there::

    {"elasticflow": "runs", "life": "…"}                               there is a node; each one has a life of its own
    {"elasticflow": "data", "file": "…", "offset": n, "data": "…"}     it has written this to a file (Base64)
    {"elasticflow": "wants", "number": n, "nodes": n}                  the job, which chooses its size, wants so many
    {"elasticflow": "ended", "status": n}                              it has ended
    {"elasticflow": "refused", "why": "…"}                             nothing was started
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ef_common.errors import ProtocolError

BEAT_S = 2.0
"""How often the launcher gives a sign of life."""
SILENT_S = 20.0
"""A side that hears nothing for so long gives the connection up."""
OUTPUT, WISHES = "output", "wishes"
"""Names of what comes from a node beside its event logs: what it prints, and how many nodes its job wants."""
LEAVE, KILL, KNOWN = "leave", "kill", "known"
_MARK = '{"elasticflow":'
_FILE = re.compile(r"output|[\w.%~-]+\.jsonl")


@dataclass(frozen=True, slots=True)
class Order:
    """What is to run on a host.

    Args:
        version: Of ElasticFlow; both sides need the same.
        job: Of which job the node is; no other one has this name.
        host: The host, as the list has it.
        starts: Whether a node is to be started if there is none.
        endpoint: Where the nodes meet; "" for the launcher's own coordinator.
        port: Of that.
        launcher: Address of the launcher, as the user has named it; "" for the one from which ssh has come.
        elsewhere: Address of the launcher if ssh does not say one.
        arguments: Further ones of `elasticflow run`, with the script and its own.
        environ: Variables.
        directory: Working directory.
        orphan_s: The node leaves when it has not heard of the launcher for this long; 0 for never.
        life: The newest one that the launcher knows, or "".
        known: How many bytes of each file of that life the launcher has, and how many wishes.
    """

    version: str
    job: str
    host: str
    starts: bool
    endpoint: str
    port: int
    launcher: str
    elsewhere: str
    arguments: list[str]
    environ: dict[str, str] = field(repr=False)
    directory: str
    orphan_s: float
    life: str = ""
    known: dict[str, int] = field(default_factory=dict)


def to_far_side(**what: Any) -> bytes:
    """A line of the launcher."""
    return json.dumps(what).encode() + b"\n"


def order_line(order: Order) -> bytes:
    """The first line of the launcher."""
    return to_far_side(order=asdict(order))


def read_order(line: str) -> Order:
    """Read the first line.

    Raises:
        ProtocolError: It is none, or one of another version.
    """
    try:
        return Order(**json.loads(line)["order"])
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"expected an order of this version of ElasticFlow: {error}") from None


def beat_line(what: str) -> bytes:
    """A sign of life of the launcher, with what the node is told: "", `LEAVE` or `KILL`; or `KNOWN`."""
    return to_far_side(beat=what)


def read_beat(line: str) -> str:
    """What it says.

    Raises:
        ProtocolError: It is malformed.
    """
    try:
        return str(json.loads(line)["beat"])
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"the launcher has said something malformed: {error}") from None


def answer(kind: str, **what: Any) -> str:
    """A line of the far side."""
    return json.dumps({"elasticflow": kind, **what}) + "\n"


def data(file: str, offset: int, content: bytes) -> str:
    """A line of the far side with a part of a file."""
    return answer("data", file=file, offset=offset, data=base64.b64encode(content).decode())


@dataclass(frozen=True, slots=True)
class Data:
    """A part of a file."""

    file: str
    offset: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Runs:
    """There is a node."""

    life: str


@dataclass(frozen=True, slots=True)
class Wants:
    """The job wants so many nodes; its wishes are numbered."""

    number: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Ended:
    """It has ended."""

    status: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was started."""

    why: str


Answer = Data | Runs | Wants | Ended | Refused


def read_answer(line: str) -> Answer | None:
    """Read a line of the far side; None for what somebody else has printed.

    Raises:
        ProtocolError: It is malformed.
    """
    if not line.startswith(_MARK):
        return None
    try:
        return _parse(json.loads(line))
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"the far side has said something malformed: {error}") from None


def _parse(said: Mapping[str, Any]) -> Answer:
    kind = said["elasticflow"]
    if kind == "runs":
        return Runs(str(said["life"]))
    if kind == "wants":
        return Wants(int(said["number"]), int(said["nodes"]))
    if kind == "ended":
        return Ended(int(said["status"]))
    if kind == "refused":
        return Refused(str(said["why"]))
    if kind != "data" or not _FILE.fullmatch(said["file"]) or int(said["offset"]) < 0:
        raise ValueError(str(said)[:200])
    return Data(said["file"], int(said["offset"]), base64.b64decode(said["data"], validate=True))
