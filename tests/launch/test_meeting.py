"""Agents of torchrun that find their job at a list of addresses, or in a folder. Their workers train nothing.

With a training, and more of them: `tests/faults/test_doors.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ef_common.testing.ports import reserve_port
from tests.launch.conftest import Job

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200), pytest.mark.usefixtures("entry_point")]

NUM_DOORS = 3


@pytest.fixture
def listed() -> Iterator[str]:
    """Addresses that nobody else is given meanwhile."""
    reserved = [reserve_port() for _ in range(NUM_DOORS)]
    yield ",".join(f"127.0.0.1:{one.getsockname()[1]}" for one in reserved)
    for one in reserved:
        one.close()


def meet(job: Job, endpoint: str) -> None:
    """Two agents that start at the same time are nodes of one job; one that comes after its end hears of it."""
    options = (f"--rdzv-endpoint={endpoint}", "--nnodes=2:8", "--rdzv-conf=last_call_timeout=0")
    agents = [job.agent(*options, flags=False) for _ in range(2)]
    job.wait_for("view", 2, size=2)
    assert len(job.records("start")) == 2
    job.tell("end")
    assert [job.wait_exit(agent) for agent in agents] == [0, 0]


def test_agents_at_a_list_found_one_job(job: Job, listed: str) -> None:
    meet(job, listed)


def test_agents_at_a_folder_found_one_job_and_a_latecomer_hears_of_its_end(job: Job, tmp_path: Path) -> None:
    folder = f"file://{tmp_path}/registry"
    meet(job, folder)
    late = job.agent(f"--rdzv-endpoint={folder}", "--nnodes=1:8", flags=False, ELASTICFLOW_TOKEN="of all jobs")
    assert job.wait_exit(late) == 0
    assert "the training is over" in job.logs()
    assert len(job.records("start")) == 2
