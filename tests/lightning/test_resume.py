"""Going on from a checkpoint file, in the middle of an epoch too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import Job
from tests import warm
from tests.lightning import resume
from tests.lightning.conftest import HOSTS
from tests.lightning.resume import KINDS, LENGTH

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.parametrize("host", HOSTS)
def test_resume_in_mid_epoch_neither_repeats_nor_skips_samples(
    run: Callable[..., list[Any]], tmp_path: Path, host: str
) -> None:
    results = run(2, resume.run, host, str(tmp_path), audit=False)
    for kind in KINDS:
        for result in results:
            whole, first, second = (result[kind][name] for name in ("whole", "first", "second"))
            seen = first["seen"] + second["seen"]
            assert of_epoch(seen, 0) == of_epoch(whole["seen"], 0), kind
            if kind != "own_sampler":  # the next epoch's order is drawn anew
                assert seen == whole["seen"], kind
                assert second["weights"] == whole["weights"], kind
                assert first["validations"] + second["validations"] == whole["validations"], kind
            for name in ("step", "epoch", "batch", "rate"):
                assert second[name] == whole[name], (kind, name)
        for name in ("weights", "step", "epoch", "batch"):
            assert results[0][kind]["second"][name] == results[1][kind]["second"][name], (kind, name)
        assert results[0][kind]["without_us"]["step"] > 6


def of_epoch(seen: list[Any], epoch: int) -> list[Any]:
    return [record for record in seen if record[0] == epoch]


def test_resume_in_a_larger_world_takes_each_remaining_sample_once(
    run: Callable[..., list[Any]], tmp_path: Path
) -> None:
    smaller = run(2, resume.run, HOSTS[0], str(tmp_path / "checkpoints"), ["plain"], audit=False)
    with Job(tmp_path / "larger", preload=warm.TORCH) as job:
        workers = job.start_world(3, resume.go_on, HOSTS[0], "plain", smaller[0]["plain"]["path"])
        larger = [worker.result() for worker in workers]
        job.audit()  # counts what the checkpoint held already
        steps = job.events("step", epoch=0, worker=workers[0].id)
    before = [result["plain"]["first"] for result in smaller]
    seen = [of_epoch(part["seen"], 0) for part in chain(before, larger)]
    assert {index for part in seen for *_, indices in part for index in indices} == set(range(LENGTH))
    num_before = sum(len(indices) for part in before for *_, indices in of_epoch(part["seen"], 0))
    num_after = sum(stop - start for step in steps for start, stop in step["committed"])
    assert num_before + num_after == LENGTH
    assert larger[0]["epoch"] == 3
    assert all(result["weights"] == larger[0]["weights"] for result in larger)
