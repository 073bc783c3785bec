from __future__ import annotations

import pytest

from ef_common.errors import UsageError
from ef_common.launch.run import Options
from ef_common.launch.surroundings import Meeting, meeting_in

KUBEFLOW = {"PET_NNODES": "4", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500", "PET_NODE_RANK": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (KUBEFLOW, Meeting("job-node-0-0.job:29500", is_host=False)),
        (KUBEFLOW | {"PET_NODE_RANK": "0"}, Meeting("job-node-0-0.job:29500", is_host=True)),
        ({"PET_NNODES": "1:4", "PET_MASTER_ADDR": "fd00::1"}, Meeting("[fd00::1]:29400", is_host=None)),
        (KUBEFLOW | {"PET_NNODES": "1"}, None),
        (KUBEFLOW | {"PET_MASTER_ADDR": "127.0.0.1"}, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # a batch script, which runs once
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
    ],
)
def test_meeting(environ: dict[str, str], expected: Meeting | None) -> None:
    assert meeting_in(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}, "this is task 2 of 4 of a Slurm step"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "this is task 0 of 2 of an MPI job"),
        ({"PMI_SIZE": "3"}, r"this is task \? of 3 of an MPI launcher"),
        (KUBEFLOW | {"PET_MASTER_PORT": "http"}, "PET_MASTER_ADDR must be HOST:PORT"),
    ],
)
def test_tasks_that_would_train_apart_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        meeting_in(environ)


def test_run_in_a_pod_of_kubeflow_is_one_node_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in KUBEFLOW.items():
        monkeypatch.setenv(variable, value)
    options = Options.parse(["--rdzv-conf=last_call_timeout=5", "train.py"])
    assert not options.local
    assert options.torchrun.rdzv_endpoint == "job-node-0-0.job:29500"
    assert options.torchrun.rdzv_conf == "last_call_timeout=5,is_host=0"
    assert (options.min_nodes, options.max_nodes) == (4, 4)
    monkeypatch.delenv("PET_MASTER_ADDR")
    assert Options.parse(["train.py"]).local


def test_run_with_an_endpoint_asks_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert not Options.parse(["--rdzv-endpoint=file:///shared/run", "train.py"]).local
    with pytest.raises(UsageError, match="file:///shared/folder"):
        Options.parse(["train.py"])
