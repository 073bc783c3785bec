"""Data that TensorFlow shuffles anew for each pass, in a program of two fits: nothing that comes or goes ends it."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from ef_common.testing.harness import Job
from tests import warm
from tests.keras.reshuffled import NUM, NUM_VAL, program
from tests.waiting import is_ready, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("loses", "is_augmented"),
    [(False, True), (True, False)],
    ids=["join_with_augmented_data", "join_and_loss_in_a_validation"],
)
def test_every_sample_is_trained_and_validated_once(tmp_path: Path, loses: bool, is_augmented: bool) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["tensorflow"]) as job:
        members = job.start_world(2, program, str(tmp_path), loses, is_augmented)
        wait_until(job, lambda state: state.training == 2)
        newcomer = job.start(program, str(tmp_path), loses, is_augmented)
        wait_until(job, is_ready(2))
        (tmp_path / "go").touch()
        workers = [*members, newcomer]
        lost = [worker for worker in workers if worker.wait() != 0]
        assert len(lost) == loses
        found = [worker.result() for worker in workers if worker not in lost]
        job.audit()
        warned = ["of their parts (numbered from 0)" in worker.output.read_text() for worker in workers]
    of_members, of_newcomer = sum(warned[:-1]), warned[-1]
    assert (of_members, of_newcomer) == ((1, True) if is_augmented else (0, False))  # rank 0, whichever it is
    for one in found:
        assert one["means"] == pytest.approx([(NUM_VAL - 1) / 2] * len(one["means"]))
    if not loses:
        assert len(newcomer.events("admitted")) == 1
        for epoch in "234":
            trained = chain(*(one["trained"].get(epoch, []) for one in found))
            assert sorted(trained) == list(range(NUM))


@pytest.mark.parametrize("split", ["shuffled", "fixed"])
def test_newcomer_follows_data_whose_shuffle_the_validation_shares(tmp_path: Path, split: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["tensorflow"]) as job:
        members = job.start_world(2, program, str(tmp_path), False, False, split)
        wait_until(job, lambda state: state.training == 2)
        newcomer = job.start(program, str(tmp_path), False, False, split)
        wait_until(job, is_ready(2))
        (tmp_path / "go").touch()
        found = [worker.result() for worker in (*members, newcomer)]
        job.audit()
    assert len(newcomer.events("admitted")) == 1
    assert found[0]["means"][1:] == found[1]["means"][1:] == found[2]["means"][-2:]
    for epoch in "234":
        trained = [*chain(*(one["trained"].get(epoch, []) for one in found))]
        assert len(trained) == len(set(trained)) == NUM
