"""What a launcher and the far side of its connection to a host say to each other: JSON, one object in a line.

The launcher says, through the standard input of its remote shell::

    {"order": {…}}              first: what is to run there; see `NodeOrder`
    {"beat": ""}                every few seconds, with what the node is told: "", "leave" or "kill";
                                "known" when the launcher knows how it has ended

The far side answers on standard output, among whatever a login shell prints there::

    {"elasticflow": "runs", "life": "…"}                               there is a node; each one has a life of its own
    {"elasticflow": "data", "file": "…", "offset": n, "content": "…"}  it has written this to a file (Base64)
    {"elasticflow": "wants", "number": n, "nodes": n}                  the job, which chooses its size, wants so many
    {"elasticflow": "ended", "status": n}                              it has ended
    {"elasticflow": "refused", "why": "…"}                             nothing was started
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from ef_common.errors import ProtocolError
from ef_common.protocol.fields import BYTES, COUNT, FAILURE, NAME, FieldCodec
from ef_common.protocol.objects import kind_of, layout_of, parse

BEAT_S = 2.0
"""How often the launcher gives a sign of life."""
SILENT_S = 20.0
"""A side that hears nothing for so long gives the connection up."""
OUTPUT, WISHES = "output", "wishes"
"""Names of what comes from a node beside its event logs: what it prints, and how many nodes its job wants."""
LEAVE, KILL, KNOWN = "leave", "kill", "known"
_MARK = "elasticflow"
_FILE = re.compile(r"output|[\w.%~-]+\.jsonl")


@dataclass(frozen=True, slots=True)
class NodeOrder:
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


def order_line(order: NodeOrder) -> bytes:
    """The first line of the launcher."""
    return to_far_side(order=asdict(order))


def read_order(line: str) -> NodeOrder:
    """Read the first line.

    Raises:
        ProtocolError: It is none, or one of another version.
    """
    try:
        return NodeOrder(**json.loads(line)["order"])
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


def _load_file(value: Any) -> str:
    if type(value) is not str or not _FILE.fullmatch(value):
        raise ValueError("expected the name of a file that a node writes")
    return value


@dataclass(frozen=True, slots=True)
class Runs:
    """There is a node, in this life."""

    life: Annotated[str, NAME]


@dataclass(frozen=True, slots=True)
class Data:
    """The node has written this to a file."""

    file: Annotated[str, FieldCodec(_load_file)]
    offset: Annotated[int, COUNT]
    content: Annotated[bytes, BYTES]


@dataclass(frozen=True, slots=True)
class Wants:
    """The job wants so many nodes; its wishes are numbered."""

    number: Annotated[int, COUNT]
    nodes: Annotated[int, COUNT]


@dataclass(frozen=True, slots=True)
class NodeEnded:
    """The node has ended."""

    status: Annotated[int, COUNT]


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """Nothing was started."""

    why: Annotated[str, FAILURE]


Answer = Runs | Data | Wants | NodeEnded | NodeRefused
_ANSWERS: Mapping[str, type[Answer]] = {
    "runs": Runs,
    "data": Data,
    "wants": Wants,
    "ended": NodeEnded,
    "refused": NodeRefused,
}
_NAMES = {kind: name for name, kind in _ANSWERS.items()}
_LAYOUTS = {kind: layout_of(kind) for kind in _NAMES}


def answer_line(answer: Answer) -> str:
    """A line of the far side."""
    kind = type(answer)
    return json.dumps({_MARK: _NAMES[kind], **_LAYOUTS[kind].dump(answer)}) + "\n"


def read_answer(line: str) -> Answer | None:
    """Read a line of the far side; None for what somebody else has printed.

    Raises:
        ProtocolError: It is malformed.
    """
    if not line.startswith(f'{{"{_MARK}":'):
        return None
    record = parse(line.encode())
    name = record.pop(_MARK)
    answer: Answer = _LAYOUTS[kind_of(name, _ANSWERS)].load(record, name=name)
    return answer
