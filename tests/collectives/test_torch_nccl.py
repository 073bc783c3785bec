"""NCCL on one GPU, which the members share: each names another host, so that NCCL takes its GPU for one of its own.

What is decided without a GPU is tested without one.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ef_common.collectives import torch_nccl
from ef_common.collectives.torch_nccl import NcclRecord, NcclSums, why_not
from ef_common.errors import GroupBroken
from tests.collectives import scripts
from tests.collectives.seats import run_in_processes, view_of
from tests.diagrams import cases, rows
from tests.gpu import on_gpu
from tests.waiting import poll_until

ROOT = Path(__file__).parents[2]
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


class FakePending:
    """A sum whose kernel ends when it is told to."""

    def __init__(self, *, is_over: bool = False, has_failed: bool = False) -> None:
        self.over, self._has_failed = is_over, has_failed

    def is_over(self) -> bool:
        return self.over

    def has_failed(self) -> bool:
        return self._has_failed


class FakeBootstrap:
    """The other member has the GPU "b"."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {"gpu/1": json.dumps(gpu("b")).encode()}

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def replaced(self) -> bool:
        return False


def sums_of_rank_0(
    bootstrap: FakeBootstrap | None = None,
    *,
    record: NcclRecord | None = None,
    is_cut: Callable[[], bool] = lambda: False,
) -> NcclSums:
    return NcclSums(view_of(2), 0, bootstrap or FakeBootstrap(), record=record or NcclRecord(), is_cut=is_cut)


def test_sum_that_has_ended_is_complete() -> None:
    sums_of_rank_0().finish(FakePending(is_over=True))  # type: ignore[arg-type]


def test_sum_whose_end_may_be_that_of_an_abort_is_no_result() -> None:
    sums = sums_of_rank_0()
    sums.abort()
    with pytest.raises(GroupBroken):
        sums.finish(FakePending(is_over=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", ["a connection has ended", "NCCL has failed", "aborted"])
def test_sum_that_will_never_end_is_given_up(reason: str) -> None:
    sums = sums_of_rank_0(is_cut=lambda: reason == "a connection has ended")
    if reason == "aborted":
        threading.Timer(0.05, sums.abort).start()
    with pytest.raises(GroupBroken):
        sums.finish(FakePending(has_failed=reason == "NCCL has failed"))  # type: ignore[arg-type]


def test_sum_that_ends_soon_after_a_peer_has_left_is_complete() -> None:
    pending, looks = FakePending(), itertools.count(1)

    def is_cut() -> bool:
        pending.over = next(looks) == torch_nccl._PATIENCE
        return True

    sums_of_rank_0(is_cut=is_cut).finish(pending)  # type: ignore[arg-type]


def test_abort_waits_until_no_sum_touches_its_tensor() -> None:
    sums, pending = sums_of_rank_0(), FakePending()
    sums._flying.add(pending)  # type: ignore[arg-type]
    threading.Timer(0.1, lambda: setattr(pending, "over", True)).start()
    sums.abort()
    assert pending.over


def test_abort_does_not_wait_for_ever_if_nccl_cannot_be_aborted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Group:
        def abort(self) -> None:
            raise RuntimeError("out of order")

    monkeypatch.setattr(torch_nccl, "_SETTLE_S", 0.05)
    sums = sums_of_rank_0()
    sums._process_group = Group()
    sums._flying.add(FakePending())  # type: ignore[arg-type]
    sums.abort()
    poll_until(lambda: "the thread that ends NCCL's sums has failed: RuntimeError: out of order" in caplog.text)
    assert "a sum on the GPU does not end" in caplog.text


def test_abort_is_complete_when_the_interpreter_ends() -> None:
    script = """
import atexit, time
from tests.collectives.test_torch_nccl import sums_of_rank_0
class Group:
    def abort(self):
        time.sleep(0.3)
        print("aborted", flush=True)
sums = sums_of_rank_0()
sums._process_group = Group()
atexit.register(sums.abort)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "aborted\n"


def test_abort_ends_the_wait_for_the_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(FakeBootstrap):
        def get(self, key: str) -> bytes:
            time.sleep(60)
            return b""

    monkeypatch.setattr(torch_nccl, "_identity_of", lambda device: gpu("a"))
    sums = sums_of_rank_0(Endless())
    threading.Timer(0.1, sums.abort).start()
    with pytest.raises(GroupBroken):
        sums.start(torch.zeros(1))


def test_nccl_that_fails_twice_is_left_to_gloo(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any, device: torch.device) -> Any:
        raise RuntimeError("NCCL error: unhandled system error")

    monkeypatch.setattr(torch_nccl, "_identity_of", lambda device: gpu("a"))
    monkeypatch.setattr(NcclSums, "_build", fail)
    record = NcclRecord()
    for _ in range(2):
        with pytest.raises(GroupBroken, match="unhandled system error"):
            sums_of_rank_0(record=record).start(torch.zeros(1))
    bootstrap = FakeBootstrap()
    assert sums_of_rank_0(bootstrap, record=record).start(torch.zeros(1)) is None
    assert bootstrap.values["gpu/0"] == b"null"  # so the others leave it, too
    assert [entry.levelname for entry in caplog.records] == ["WARNING"]


class FakeGroup:
    """NCCL's group, on no GPU."""

    def __init__(self) -> None:
        self.is_aborted = False

    def allreduce(self, tensors: list[torch.Tensor]) -> None:
        """The sum is that of one member."""

    def abort(self) -> None:
        self.is_aborted = True


def state(sums: NcclSums) -> str:
    if sums._aborted:
        return "aborted"
    if not sums.is_settled:
        return "unsettled"
    return "gloo" if sums._process_group is None else "nccl"


def meets(other: str, sums: NcclSums) -> None:
    """The other member has this GPU."""
    sums._bootstrap.put("gpu/1", json.dumps(gpu(other)).encode())
    pending = sums.start(torch.zeros(1))
    assert (pending is None) == (other == "a")


def meets_nobody(sums: NcclSums) -> None:
    sums._is_cut = lambda: True
    sums._bootstrap.get = lambda key: time.sleep(60)  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(GroupBroken, match="replaced while it was built"):
        sums.start(torch.zeros(1))


def cannot_connect(sums: NcclSums) -> None:
    sums._build = fail_to_build  # type: ignore[method-assign]
    with pytest.raises(GroupBroken, match="NCCL could not connect: out of order"):
        sums.start(torch.zeros(1))


def fail_to_build(device: torch.device) -> None:
    raise RuntimeError("out of order")


def aborts(sums: NcclSums) -> None:
    group = sums._process_group
    sums.abort()
    if group is not None:
        poll_until(lambda: group.is_aborted)
    with pytest.raises(GroupBroken):
        sums.start(torch.zeros(1))


Act = Callable[[NcclSums], None]
WITNESSES: dict[str, tuple[tuple[Act, ...], ...]] = {
    "unsettled → nccl": ((partial(meets, "b"),),),
    "unsettled → gloo": ((partial(meets, "a"),),),
    "unsettled → GroupBroken": ((meets_nobody,), (cannot_connect,)),
    "unsettled → aborted": ((aborts,), (cannot_connect, aborts)),
    "nccl → aborted": ((partial(meets, "b"), aborts),),
    "gloo → aborted": ((partial(meets, "a"), aborts),),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(NcclSums) == list(WITNESSES)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_nccl, "_identity_of", lambda device: gpu("a"))
    monkeypatch.setattr(torch_nccl, "_stream_on", lambda device: None)
    monkeypatch.setattr(torch_nccl, "NcclPending", lambda *args: FakePending(is_over=True))
    sums = sums_of_rank_0()
    sums._build = lambda device: FakeGroup()  # type: ignore[method-assign]
    *first, last = WITNESSES[row][case]
    for act in first:
        act(sums)
    before = state(sums)
    last(sums)
    after = "GroupBroken" if row.endswith("GroupBroken") else state(sums)  # which `last` has seen
    assert row == f"{before} → {after}"
    if after == "GroupBroken":
        assert state(sums) == before


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
