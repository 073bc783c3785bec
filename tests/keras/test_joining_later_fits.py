"""Newcomers to a program of several fits: they skip those that are over, and join in the one that the others are in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import Job, WorkerProcess
from tests import warm
from tests.keras import fits
from tests.waiting import is_ready, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

BACKENDS = ["torch", "tensorflow"]


@contextmanager
def joined_in_the_second_fit(tmp_path: Path, backend: str, *args: Any) -> Iterator[tuple[Job, WorkerProcess]]:
    """A job of two workers, and the newcomer that comes in their second fit; see `fits.program` for the arguments."""
    (tmp_path / "validation").touch()
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        job.start_world(2, fits.program, backend, str(tmp_path), *args)
        wait_until(job, lambda state: state.training == 2)
        newcomer = job.start(fits.program, backend, str(tmp_path), *args)
        wait_until(job, is_ready(2))
        (tmp_path / "second").touch()
        yield job, newcomer


@pytest.mark.parametrize("saved", [False, True], ids=["without_checkpoints", "with_checkpoints"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_newcomer_that_comes_in_the_second_fit_skips_the_first_and_joins(
    tmp_path: Path, backend: str, saved: bool
) -> None:
    with joined_in_the_second_fit(tmp_path, backend, str(tmp_path / "checkpoints") if saved else "") as (job, newcomer):
        first, second, third = [worker.result() for worker in job.workers]
        assert first == second
        assert third["tuned"] == first["tuned"]
        assert third["tuning"] == first["tuning"]
        assert len(newcomer.events("admitted")) == 1
        if saved:
            assert third == first
        else:
            assert third["losses"] == []
            assert third["pretrained"] != first["pretrained"]
        job.audit()


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS[:1])
def test_newcomer_ends_a_skipped_fit_with_the_weights_of_the_others_in_place_of_averages(
    tmp_path: Path, backend: str
) -> None:
    with joined_in_the_second_fit(tmp_path, backend, str(tmp_path / "checkpoints"), True) as (job, _):
        first, second, third = [worker.result() for worker in job.workers]
        assert first == second == third
        job.audit()


@pytest.mark.parametrize("backend", BACKENDS[:1])
def test_newcomer_that_waits_between_two_fits_joins_in_the_second(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        members = job.start_world(2, fits.program, backend, str(tmp_path))
        job.wait_for("epoch_end")
        newcomer = job.start(fits.program, backend, str(tmp_path))
        wait_until(job, is_ready(1))
        (tmp_path / "validation").touch()
        wait_until(job, is_ready(2))
        (tmp_path / "second").touch()
        first, second, third = [worker.result() for worker in (*members, newcomer)]
        assert first == second
        assert third["tuned"] == first["tuned"]
        job.audit()
