"""The tables of the state machines in docs/architecture.md name what they have."""

from __future__ import annotations

import re
from pathlib import Path
from types import UnionType
from typing import get_args

import pytest

from ef_common.core.membership import Settings
from ef_common.core.progress import Limits
from ef_common.protocol.announcer import Announcer
from ef_common.protocol.client import Client
from ef_common.protocol.client_outputs import ClientOutput
from ef_common.protocol.endpoint_announcer import EndpointAnnouncer
from ef_common.protocol.server import CoordinatorServer
from ef_common.protocol.server_outputs import Output

TEXT = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()


def names_in(row: str, column: int) -> list[str]:
    """What stands in backquotes in a column of a machine's row."""
    (line,) = [line for line in TEXT.splitlines() if line.startswith(f"| `{row}`")]
    return re.findall(r"`(\w+)`", line.split("|")[column])


@pytest.mark.parametrize(
    ("row", "machine", "outputs"),
    [
        ("server.CoordinatorServer", CoordinatorServer, Output),
        ("client.Client", Client, ClientOutput),
        ("announcer.Announcer", Announcer, None),
        ("endpoint_announcer.EndpointAnnouncer", EndpointAnnouncer, None),
    ],
)
def test_table_of_the_machines_is_true(row: str, machine: type, outputs: UnionType | None) -> None:
    public = {name for name, member in vars(machine).items() if callable(member) and not name.startswith("_")}
    reported = names_in(row, 2)
    assert sorted(reported) == sorted(public)
    assert names_in(row, 3) == ([] if outputs is None else [kind.__name__ for kind in get_args(outputs)])


def test_table_of_the_parts_of_the_server_is_true() -> None:
    server = CoordinatorServer(0.0, token=None, settings=Settings(), heartbeat_timeout_s=4.0, limits=Limits())
    parts = [type(part) for part in vars(server).values() if type(part).__module__.startswith("ef_common.protocol.")]
    rows = {f"{part.__module__.rpartition('.')[2]}.{part.__name__}": part for part in parts}
    table = TEXT.partition("| Part of the server |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `([\w.]+)`", table, re.MULTILINE)) == sorted(rows)
    for row, part in rows.items():
        told, gives = names_in(row, 3), names_in(row, 4)
        assert told
        assert [name for name in told + gives if not callable(getattr(part, name, None))] == []
