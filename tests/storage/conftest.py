"""Stores of each kind to test with."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ef_common.storage import claims
from ef_common.storage.store import Store
from tests.storage import etcd as etcds
from tests.storage.ceph import KEYS, Ceph, missing_programs
from tests.storage.etcd import PATIENCE_S, EtcdServers

BUCKET = "elasticflow"
_numbers = itertools.count()

Place = tuple[str, dict[str, Any]]
"""A URL and its storage options."""


@pytest.fixture(scope="session")
def moto() -> Iterator[dict[str, Any]]:
    """Options of an S3 server within this process."""
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield _with_bucket({**KEYS, "endpoint_url": f"http://{host}:{port}"})
    finally:
        server.stop()


@pytest.fixture(scope="session")
def ceph() -> Iterator[Ceph]:
    missing = missing_programs()
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    pytest.importorskip("s3fs")
    with tempfile.TemporaryDirectory(prefix="ef-ceph-") as folder, Ceph(Path(folder)) as running:
        _with_bucket({**KEYS, "endpoint_url": running.endpoint})
        yield running


@pytest.fixture(scope="session")
def gcs() -> Iterator[dict[str, Any]]:
    """Options of a server of Google Cloud Storage within this process."""
    pytest.importorskip("gcp_storage_emulator")
    pytest.importorskip("gcsfs")
    from tests.storage.gcs import Gcs

    with Gcs(BUCKET) as running:
        yield running.options


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    require_etcd()
    with EtcdServers(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def require_etcd() -> None:
    """Skip the test where there is no etcd."""
    missing = etcds.missing_programs()
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    pytest.importorskip("etcd3gw")


@pytest.fixture(
    params=["local", "memory", *(pytest.param(name, marks=pytest.mark.turns) for name in ("ceph", "moto", "gcs"))],
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where a store of each kind can be, empty."""
    folder = f"run-{next(_numbers)}"
    if request.param == "local":
        return f"file://{tmp_path}/{folder}", {}
    if request.param == "memory":
        return f"memory://{tmp_path}/{folder}", {}
    if request.param == "gcs":
        return f"gs://{BUCKET}/{folder}", request.getfixturevalue("gcs")
    if request.param == "moto":
        options = request.getfixturevalue("moto")
    else:
        options = {**KEYS, "endpoint_url": request.getfixturevalue("ceph").endpoint}
    return f"s3://{BUCKET}/{folder}", options


@pytest.fixture
def make(place: Place) -> Callable[[], Store]:
    """Makes stores at the same place, as other processes have them: nothing is shared but the place."""
    return lambda: Store(*place)


@pytest.fixture(params=["local", "memory", "etcd"])
def at(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], claims.ClaimPlace]:
    """Makes places where the same small files are, as other processes have them."""
    if request.param == "etcd":
        monkeypatch.setattr("ef_common.storage.etcd.TIMEOUT_S", PATIENCE_S)
        url = request.getfixturevalue("etcd").url(f"/claims-{next(_numbers)}/bücher")
    else:
        url = f"{request.param.replace('local', 'file')}://{tmp_path}/claims"
    return lambda: claims.place_for(url)


@pytest.fixture
def memory(tmp_path: Path) -> Store:
    return Store(f"memory://{tmp_path}")


def _with_bucket(options: dict[str, Any]) -> dict[str, Any]:
    import s3fs

    with contextlib.suppress(FileExistsError):  # servers of one process share what they hold
        s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir(BUCKET)
    return options
