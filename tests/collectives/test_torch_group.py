"""What only real processes can show."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ef_common.collectives.torch_group import TorchGroups
from ef_common.errors import GroupBroken
from ef_common.testing.harness import Job
from tests.collectives import scripts
from tests.collectives.seats import ENGINES, PRELOAD, run_in_processes, sit, view_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_all_reduce_takes_every_type_that_models_have(directory: Path, engine: str) -> None:
    for found in run_in_processes(scripts.reduce_every_type, 2, directory, engine=engine):
        assert len(found) == 7
        assert all(values == [3, 3, 3] for values in found.values())


def test_abort_wakes_peers_at_once(directory: Path, engine: str) -> None:
    assert run_in_processes(scripts.abort_wakes_peers, 3, directory, engine=engine) == [True] * 3


def test_misuse_is_not_taken_for_a_loss(directory: Path, engine: str) -> None:
    for found in run_in_processes(scripts.misuse_reaches_the_caller, 2, directory, engine=engine):
        assert len(found) == 3
        assert "GroupBroken" not in found


def test_killed_peer_with_messages_half_sent_others_go_on(directory: Path, engine: str) -> None:
    results = run_in_processes(scripts.killed_in_a_large_reduction, 3, directory, lost=(0,), engine=engine)
    assert results == [None, [True, 2, [1.0]], [True, 2, [1.0]]]


def test_stopped_peer_with_a_message_half_sent_others_go_on(directory: Path, engine: str) -> None:
    with Job(directory, preload=PRELOAD, heartbeat_timeout_s=3.0) as job:
        workers = job.start_world(3, sit, scripts.stopped_in_a_large_transfer, engine)
        job.wait_until(lambda events: len(list(job.results.iterdir())) == 2, "the results of two")
        ended = [worker for worker in workers if (job.results / f"{worker.name}.json").exists()]
        assert [worker.result()["result"] for worker in ended] == [[True, 2, [1.0]]] * 2
        (stopped,) = set(workers) - set(ended)
        assert stopped.alive


def test_killed_member_while_the_group_is_built_others_build_the_next(directory: Path, engine: str) -> None:
    results = run_in_processes(scripts.killed_while_a_group_is_built, 3, directory, lost=(0,), engine=engine)
    assert results == [None, [True, 2, [1.0]], [True, 2, [1.0]]]


def test_build_is_abandoned_when_the_view_is_replaced() -> None:
    class Replaced:
        """The other member never comes."""

        def __init__(self) -> None:
            self._replaced = threading.Event()
            threading.Timer(0.1, self._replaced.set).start()

        def put(self, key: str, value: bytes) -> None: ...

        def get(self, key: str) -> bytes:
            self._replaced.wait()
            raise GroupBroken("replaced")

        def replaced(self) -> bool:
            return self._replaced.is_set()

    with pytest.raises(GroupBroken):
        TorchGroups().build(view_of(2), rank=0, bootstrap=Replaced())
