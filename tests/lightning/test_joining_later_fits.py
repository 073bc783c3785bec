"""Newcomers to a program of several fits: they skip those that are over, and join in the one that the others are in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ef_common.core.membership import Phase, Settings
from ef_common.testing.harness import Job
from tests import warm
from tests.lightning import fits
from tests.lightning.conftest import HOSTS
from tests.waiting import is_ready, wait_until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture
def gates(tmp_path: Path) -> Path:
    path = tmp_path / "gates"
    path.mkdir()
    return path


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Job]:
    """A job that needs two nodes."""
    with Job(tmp_path / "run", preload=warm.TORCH, settings=Settings(min_nodes=2, last_call_s=0.0)) as job:
        yield job


def check(results: list[dict[str, Any]], *, skipped: int, trainers: int = 2) -> None:
    """All have the same; the newcomer, which is the last one, lacks the first fit."""
    *members, newcomer = results
    for name in ("epochs", "steps", "weights", "tested", "best"):
        assert all(found[name] == members[0][name] for found in results), name
    assert members[0]["epochs"] == ([3, 3] if trainers == 1 else [3, 1])
    assert {found["num_fits"] for found in members} == {3}
    assert newcomer["num_fits"] == 3 - skipped
    assert newcomer["joined_after"] == 0


def let_in(gates: Path) -> None:
    """A newcomer is ready, and the members go on in the second fit: not before they have heard of it."""
    for gate in ("expected", "second"):
        (gates / gate).touch()


@pytest.mark.parametrize("trainers", [2, 1])
@pytest.mark.parametrize("host", HOSTS)
def test_newcomer_that_comes_in_the_second_fit_skips_the_first_and_joins(
    job: Job, gates: Path, host: str, trainers: int
) -> None:
    (gates / "validation").touch()
    members = job.start_world(2, fits.program, host, str(gates), trainers)
    wait_until(job, lambda state: state.training == 2)
    newcomer = job.start(fits.program, host, str(gates), trainers)
    wait_until(job, is_ready(2))
    let_in(gates)
    check([worker.result() for worker in (*members, newcomer)], skipped=1, trainers=trainers)
    assert len(newcomer.events("admitted")) == 1
    assert "skipping it, without its result" in newcomer.output.read_text()
    job.audit()


def test_newcomer_that_waits_between_two_fits_joins_in_the_second(job: Job, gates: Path) -> None:
    members = job.start_world(2, fits.program, HOSTS[0], str(gates))
    job.wait_for("epoch_end")
    newcomer = job.start(fits.program, HOSTS[0], str(gates))
    wait_until(job, is_ready(1))
    (gates / "validation").touch()
    wait_until(job, is_ready(2))
    let_in(gates)
    check([worker.result() for worker in (*members, newcomer)], skipped=0)
    job.audit()


def test_newcomer_of_the_first_fit_that_is_ready_in_the_second_joins_there(job: Job, gates: Path) -> None:
    members = job.start_world(2, fits.program, HOSTS[0], str(gates))
    job.wait_for("epoch_end")
    newcomer = job.start(fits.program, HOSTS[0], str(gates), 2, "", True)
    wait_until(job, lambda state: Phase.WARMING in [stands.phase for stands in state.workers.values()])
    (gates / "validation").touch()
    wait_until(job, lambda state: state.training == 2)
    (gates / "slow").touch()
    wait_until(job, is_ready(2))
    let_in(gates)
    check([worker.result() for worker in (*members, newcomer)], skipped=0)
    job.audit()


@pytest.mark.parametrize("is_best_lost", [False, True])
def test_newcomer_that_skips_a_fit_with_checkpoints_has_its_result(
    job: Job, gates: Path, tmp_path: Path, is_best_lost: bool
) -> None:
    (gates / "validation").touch()
    args = (HOSTS[0], str(gates), 2, str(tmp_path / "checkpoints"))
    members = job.start_world(2, fits.program, *args)
    wait_until(job, lambda state: state.training == 2)
    if is_best_lost:  # as a ModelCheckpoint does once it has a better one
        (gates / "best-0" / "epoch=0-step=8.ckpt").unlink()
    newcomer = job.start(fits.program, *args)
    wait_until(job, is_ready(2))
    let_in(gates)
    first, second, third = [worker.result() for worker in (*members, newcomer)]
    assert first == second
    assert third["pretrained"] == first["pretrained"]
    assert third["joined_after"] == first["joined_after"]
    assert third["weights"] == first["weights"]
    assert "skipping it" not in newcomer.output.read_text()  # which says so where something is missing
    assert ("does not exist any more" in newcomer.output.read_text()) == is_best_lost
    job.audit()


def test_loss_in_the_second_fit_below_min_nodes_waits_for_a_newcomer_and_goes_on(nodes: Job, gates: Path) -> None:
    (gates / "validation").touch()
    first, second = [nodes.start(fits.program, HOSTS[0], str(gates)) for _ in range(2)]
    wait_until(nodes, lambda state: state.training == 2)
    second.kill()
    (gates / "second").touch()
    newcomer = nodes.start(fits.program, HOSTS[0], str(gates))
    check([worker.result() for worker in (first, newcomer)], skipped=1)
    nodes.audit()


def test_newcomer_after_the_only_fit_waits_and_ends_with_the_others(job: Job, gates: Path) -> None:
    members = job.start_world(2, fits.single, HOSTS[0], str(gates))
    job.wait_for("epoch_end")
    newcomer = job.start(fits.single, HOSTS[0], str(gates))
    wait_until(job, is_ready(1))
    (gates / "validation").touch()
    assert [worker.result() for worker in members] == [8, 8]
    assert newcomer.wait() == 0
    assert not newcomer.events("step")
    job.audit()


@pytest.mark.parametrize("saved", [False, True], ids=["without_checkpoints", "with_checkpoints"])
def test_newcomer_of_the_second_fit_that_is_left_alone_goes_on_if_it_has_the_result_of_the_first(
    job: Job, gates: Path, tmp_path: Path, saved: bool
) -> None:
    (gates / "validation").touch()
    args = (HOSTS[0], str(gates), 1, str(tmp_path / "checkpoints") if saved else "")
    members = job.start_world(2, fits.program, *args)
    job.wait_for("weights", 4, step=1)  # both trainings count from 1, and the second one waits in its third step
    newcomer = job.start(fits.program, *args)
    wait_until(job, is_ready(2))
    for member in members:
        member.kill()
    (gates / "second").touch()
    if saved:
        found = newcomer.result()
        assert found["epochs"] == [3, 3]
        assert found["num_fits"] == 2
    else:
        assert newcomer.wait() == 1
        assert "it begins with the first training" in newcomer.output.read_text()
