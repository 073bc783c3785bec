"""A cluster of four nodes with a GPU each, which the tests of a file share, and a training in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

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
