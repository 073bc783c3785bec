"""The ways in which agents on a network find their job, each with what it needs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults import networks
from tests.faults.network_nodes import PORT
from tests.storage.ceph import KEYS
from tests.storage.conftest import BUCKET

NUM_NODES = 8
SERVER = NUM_NODES + 1
"""The node on which stores are, and the name server."""
NAMED = (1, 2, 3)
"""The nodes of a list."""
_HOST = "workers.test"
_numbers = itertools.count()


@dataclass(frozen=True)
class Door:
    """Where agents find their job.

    Attributes:
        endpoint: What they are told.
        remembers: It knows more than those who are there: that the training is over, say. It needs no majority.
        environ: Variables of the agents.
        holds_checkpoints: Those of the job may be at the same place.
        names: A file of names and their addresses, if it is a name.
    """

    endpoint: str
    remembers: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)
    holds_checkpoints: bool = False
    names: Path | None = None

    def stand_for(self, nodes: Iterable[int]) -> None:
        """These nodes are there now, if it is a name."""
        if self.names is not None:
            new = self.names.with_suffix(".new")
            new.write_text(json.dumps({_HOST: [networks.address(node) for node in nodes]}))
            new.replace(self.names)


def a_list(request: pytest.FixtureRequest) -> Door:
    return Door(",".join(f"{networks.address(node)}:{PORT}" for node in NAMED), remembers=False)


def a_name(request: pytest.FixtureRequest) -> Door:
    names: Path = request.getfixturevalue("names_on_network")
    return Door(f"{_HOST}:{PORT}", remembers=False, names=names)


def a_folder(request: pytest.FixtureRequest) -> Door:
    path: Path = request.getfixturevalue("tmp_path")
    return Door(f"file://{path}/shared", holds_checkpoints=True)


def an_object_store(request: pytest.FixtureRequest) -> Door:
    host, port = request.getfixturevalue("ceph_on_network")
    environ = {
        "FSSPEC_S3_KEY": KEYS["key"],
        "FSSPEC_S3_SECRET": KEYS["secret"],
        "FSSPEC_S3_ENDPOINT_URL": f"http://{host}:{port}",
    }
    return Door(f"s3://{BUCKET}/door-{next(_numbers)}", environ=environ, holds_checkpoints=True)


def an_etcd(request: pytest.FixtureRequest) -> Door:
    host, port = request.getfixturevalue("etcd_on_network")
    return Door(f"etcd://{host}:{port}/door-{next(_numbers)}")


DOORS = {"list": a_list, "name": a_name, "folder": a_folder, "s3": an_object_store, "etcd": an_etcd}


def at(*names: str, never: str = "") -> pytest.MarkDecorator:
    """A test at each of the doors but one. `make test-all` runs it at these names, `make test-every` at all."""
    there = [name for name in DOORS if name != never]
    params = [pytest.param(name, marks=() if name in names else pytest.mark.exhaustive) for name in there]
    return pytest.mark.parametrize("door", params, indirect=True)
