"""What tests here share: a cluster of four nodes with a GPU each, a training in it, and an API server in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ef_common.core.cluster import arrivals
from ef_common.kubernetes import controller as controllers
from ef_common.kubernetes import watching
from ef_common.kubernetes.kinds import NODES
from tests.kubernetes.memory_api import MemoryApi
from tests.kubernetes.objects import node

if TYPE_CHECKING:  # they need a client of Kubernetes, which the other tests here do without
    from tests.kubernetes.cluster import Cluster, Training


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    from tests.kubernetes import cluster as clusters

    with clusters.cluster({1: 1, 2: 1, 3: 1, 4: 1}) as running:
        yield running


@pytest.fixture
def cluster(four: Cluster) -> Iterator[Cluster]:
    four.start_controller()
    yield four
    four.clear()
    four.stop_controllers()


@pytest.fixture
def training(cluster: Cluster, tmp_path: Path) -> Training:
    from tests.kubernetes.cluster import Training

    return Training(tmp_path / "a", cluster, "a")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> MemoryApi:
    """One node, in memory; controllers do not wait."""
    monkeypatch.setattr(controllers, "_TICK_S", 0.02)
    monkeypatch.setattr(controllers, "_COALESCE_S", 0.0)
    monkeypatch.setattr(controllers, "_CALLS_PER_S", 1e6)
    monkeypatch.setattr(arrivals, "QUIET_S", 0.0)
    monkeypatch.setattr(watching, "_PAUSES_S", (0.01, 0.05))
    api = MemoryApi()
    api.create(NODES, node("n1", 4))
    return api
