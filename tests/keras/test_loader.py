"""Each worker reads only what it trains on of a DataLoader, and each sample is trained exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import Job
from tests import warm
from tests.keras.loading import NUM, NUM_VAL, program, started_again, surplus
from tests.waiting import is_ready, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

THOROUGH = pytest.mark.thorough
KINDS = ("shuffled", "weighted", "batch sampler", "data workers")
CASES = [
    pytest.param(backend, kind, marks=() if (backend, kind) == ("torch", "weighted") else THOROUGH)
    for backend in ("torch", "tensorflow")
    for kind in KINDS
]


@pytest.mark.parametrize(("backend", "kind"), CASES)
def test_samples_are_read_by_one_worker_and_trained_exactly_once(tmp_path: Path, backend: str, kind: str) -> None:
    args = (backend, str(tmp_path), kind)
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        members = job.start_world(2, program, *args)
        job.wait_for("epoch_end")
        newcomer = job.start(program, *args)
        wait_until(job, is_ready(1))
        (tmp_path / "go").touch()
        found: list[dict[str, Any]] = [worker.result() for worker in (*members, newcomer)]
        report = job.audit()
    for epoch in map(str, range(4)):
        assert numbers(found, epoch) == list(range(NUM)), epoch
    assert min(map(int, found[2]["trained"])) == 1  # the newcomer has come in the second epoch
    assert "comparisons of what was read" in report["samples"].detail
    # In an epoch without a change, a worker reads no more than its part, and the first position, to compare it with the
    # others'. Of the last two samples, one has both, and the other keeps step with one of them.
    assert len(surplus(found[:2], 0)) in ((4, 8) if kind == "batch sampler" else (3,))
    evaluations = [worker["read"]["validation"] for worker in found]
    assert sum(map(len, evaluations)) <= 4 * (NUM_VAL + 3)
    assert set().union(*evaluations) == set(range(NUM_VAL))
    assert all(all(worker["right"]) for worker in found)


def numbers(found: list[dict[str, Any]], epoch: str) -> list[int]:
    return sorted(number for worker in found for number in worker["trained"].get(epoch, ()))


@pytest.mark.parametrize(("backend", "kind"), [pytest.param(*case.values, marks=THOROUGH) for case in CASES[1:]])
def test_loss_of_a_worker_costs_no_sample(tmp_path: Path, backend: str, kind: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        *others, lost = job.start_world(3, program, backend, str(tmp_path), kind)
        job.wait_for("step", epoch=1)
        lost.kill()
        (tmp_path / "go").touch()
        found = [worker.result() for worker in others]
        job.audit()
    for epoch in map(str, range(4)):
        trained = numbers(found, epoch)
        assert len(set(trained)) == len(trained)
        assert epoch in "01" or trained == list(range(NUM))


@pytest.mark.parametrize(
    ("backend", "kind", "steps"),
    [
        ("torch", "weighted", 30),  # two epochs in a pass
        pytest.param("tensorflow", "batch sampler", None, marks=THOROUGH),
        pytest.param("torch", "data workers", None, marks=THOROUGH),
    ],
)
def test_samples_are_trained_exactly_once_over_a_new_start(
    tmp_path: Path, backend: str, kind: str, steps: int | None
) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        first, second = job.start(started_again, backend, str(tmp_path), kind, steps).result()
    assert (set(first), set(second)) == ({"0", "1"}, {"1", "2", "3"})
    epochs = [sorted([*first.get(epoch, ()), *second.get(epoch, ())]) for epoch in map(str, range(4))]
    passes = epochs if steps is None else [sorted(epochs[0] + epochs[1]), sorted(epochs[2] + epochs[3])]
    assert all(one == list(range(NUM)) for one in passes)


def shared(backend: str, folder: str) -> Any:
    """A training whose updates have a fixed size."""
    return program(backend, folder, "shuffled", global_batch_size=16)


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=THOROUGH), pytest.param("tensorflow", marks=THOROUGH)])
def test_workers_read_only_their_part_of_a_global_batch(tmp_path: Path, backend: str) -> None:
    (tmp_path / "go").touch()
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        found = [worker.result() for worker in job.start_world(2, shared, backend, str(tmp_path))]
        job.audit()
    for epoch in range(4):
        assert len(surplus(found, epoch)) <= 4, epoch
