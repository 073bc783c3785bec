"""A job of real workers that train with Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import Job
from tests import warm

HOSTS = ("lightning.pytorch", "pytorch_lightning")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path / "run", preload=warm.TORCH) as job:
        yield job


@pytest.fixture
def run(job: Job) -> Callable[..., list[Any]]:
    """Run a target in so many workers: their results.

    The audit is of one training; a target that trains several times says `audit=False`.
    """

    def run(number: int, target: Callable[..., Any], *args: Any, audit: bool = True) -> list[Any]:
        workers = job.start_world(number, target, *args)
        results = [worker.result() for worker in workers]
        if audit:
            job.audit()
        return results

    return run
