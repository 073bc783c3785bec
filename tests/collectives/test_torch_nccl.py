"""NCCL on one GPU, which the members share: each names another host, so that NCCL takes its GPU for one of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ef_common.collectives.torch_nccl import why_not
from tests.collectives import scripts
from tests.collectives.seats import run_in_processes
from tests.gpu import on_gpu

NCCL = "nccl with tensors on a GPU"


def gpu(name: str, *, version: tuple[int, ...] = (2, 28, 9)) -> dict[str, Any]:
    return {"gpu": name, "version": list(version)}


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        ([gpu("a"), gpu("b"), gpu("c")], ""),
        ([gpu("a"), gpu("b"), gpu("a")], "workers share a GPU"),
        ([gpu("a"), None, None], "rank 1 does not use NCCL"),
        ([gpu("a"), gpu("b", version=(2, 27, 3))], "different releases of NCCL: 2.27.3, 2.28.9"),
    ],
)
def test_nccl_is_used_if_all_members_can(gpus: list[Any], reason: str) -> None:
    assert why_not(gpus).endswith(reason)
    assert bool(why_not(gpus)) == bool(reason)


@on_gpu
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_members_with_a_gpu_each_use_nccl(tmp_path: Path) -> None:
    assert run_in_processes(scripts.sums_are_of, 2, tmp_path / "run", engine=NCCL) == [True] * 2


@on_gpu
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_members_that_share_a_gpu_use_gloo(tmp_path: Path) -> None:
    shared = run_in_processes(scripts.share_a_gpu, 2, tmp_path / "run", engine=NCCL)
    assert shared == [[False, 3.0]] * 2


@on_gpu
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_killed_member_while_gpus_are_connected_others_go_on(tmp_path: Path) -> None:
    results = run_in_processes(scripts.killed_while_gpus_are_connected, 3, tmp_path / "run", lost=(0,), engine=NCCL)
    assert results == [None, [True, 2, [1.0]], [True, 2, [1.0]]]


@pytest.mark.parametrize("engine", [NCCL, "gloo with tensors on a GPU"])
@on_gpu
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_aborted_sum_is_no_result_and_leaves_its_tensor_alone(tmp_path: Path, engine: str) -> None:
    found = run_in_processes(scripts.failed_sum_leaves_its_tensor_alone, 3, tmp_path / "run", engine=engine)
    assert found == [[True, True]] * 3
