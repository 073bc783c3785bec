"""Samples of data of the user's are trained exactly once, in all epochs and by newcomers, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from ef_common.audit import audit
from ef_common.testing.harness import Job
from tests import warm
from tests.keras.shuffling import NUM, WRITERS, evaluation, program, started_again
from tests.waiting import is_ready, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    ("backend", "kind", "steps"),
    [
        ("tensorflow", "in threads", None),
        ("torch", "unknown length", None),
        pytest.param("tensorflow", "unknown length", None, marks=THOROUGH),
        pytest.param("torch", "endless generator", 60, marks=THOROUGH),
        pytest.param("tensorflow", "endless generator", 60, marks=THOROUGH),
        pytest.param("tensorflow", "in place", None, marks=THOROUGH),
        pytest.param("tensorflow", "in processes", None, marks=THOROUGH),
        pytest.param("torch", "in processes", None, marks=THOROUGH),
        pytest.param("torch", "generator", None, marks=THOROUGH),
        pytest.param("torch", "in place", None, marks=THOROUGH),
        pytest.param("tensorflow", "generator", 60, marks=THOROUGH),
    ],
)
def test_samples_are_trained_exactly_once_in_each_epoch(
    tmp_path: Path, backend: str, kind: str, steps: int | None
) -> None:
    args = (backend, str(tmp_path), kind, steps)
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        members = job.start_world(2, program, *args)
        job.wait_for("epoch_end")
        newcomer = job.start(program, *args)
        wait_until(job, is_ready(1))
        (tmp_path / "go").touch()
        found = [worker.result() for worker in (*members, newcomer)]
        report = job.audit()
    for epoch in range(4):
        numbers = sorted(number for worker in found for number in worker.get(str(epoch), ()))
        assert numbers == list(range(NUM)), (epoch, found)
    assert min(map(int, found[2])) == 1  # the newcomer has come in the second epoch
    assert "comparisons of what was read" in report["samples"].detail


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        *(("tensorflow", kind) for kind in WRITERS),
        *(("torch", kind) for kind in WRITERS),
    ],
)
def test_files_of_a_library_are_trained_exactly_once_with_a_loss_and_a_newcomer(
    tmp_path: Path, backend: str, kind: str
) -> None:
    library = {"parquet": "pyarrow", "datasets": "datasets", "tf.data": "tensorflow"}.get(kind)
    if library is not None:
        pytest.importorskip(library)
    WRITERS[kind](str(tmp_path))
    args = (backend, str(tmp_path), kind)
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        *members, lost = job.start_world(3, program, *args)
        job.wait_for("step", epoch=1)
        lost.kill()
        newcomer = job.start(program, *args)
        wait_until(job, is_ready(1))
        (tmp_path / "go").touch()
        found = [worker.result() for worker in (*members, newcomer)]
        job.audit()
    for epoch in range(4):
        numbers = sorted(number for worker in found for number in worker.get(str(epoch), ()))
        assert len(set(numbers)) == len(numbers), (epoch, found)
        assert epoch < 2 or numbers == list(range(NUM)), (epoch, found)  # what the lost one has trained on is not told


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("torch", "in threads"),
        pytest.param("tensorflow", "in processes", marks=THOROUGH),
        pytest.param("torch", "unknown length", marks=THOROUGH),
    ],
)
def test_loss_of_a_worker_costs_no_sample(tmp_path: Path, backend: str, kind: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        *others, lost = job.start_world(3, program, backend, str(tmp_path), kind)
        job.wait_for("step", epoch=1)
        lost.kill()
        (tmp_path / "go").touch()
        first, second = (worker.result() for worker in others)
        job.audit()
    for epoch in map(str, range(4)):
        numbers = sorted([*first[epoch], *second[epoch]])
        assert len(set(numbers)) == len(numbers)
        assert epoch in "01" or numbers == list(range(NUM))


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("torch", "in place"),
        pytest.param("tensorflow", "generator", marks=THOROUGH),
        pytest.param("torch", "unknown length", marks=THOROUGH),
    ],
)
def test_samples_are_trained_exactly_once_over_a_new_start(tmp_path: Path, backend: str, kind: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        first, second = job.start(started_again, backend, str(tmp_path), kind).result()
    assert (set(first), set(second)) == ({"0", "1"}, {"1", "2", "3"})
    for epoch in range(4):
        assert sorted([*first.get(str(epoch), ()), *second.get(str(epoch), ())]) == list(range(NUM)), epoch


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=THOROUGH), "torch"])
def test_data_of_unknown_length_are_evaluated_once_also_if_a_worker_is_lost(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        *others, lost = job.start_world(3, evaluation, backend, str(tmp_path))
        job.wait_until(lambda events: (tmp_path / f"waits-{lost.pid}").exists(), "a worker in an evaluation")
        lost.kill()
        (tmp_path / "go").touch()
        first, second = (worker.result() for worker in others)
        report = job.audit()
    assert first == second
    for name, (plain, elastic) in first.items():
        assert elastic == pytest.approx(plain, abs=1e-5), name
    assert report["evaluation"].detail == "each position exactly once in 1 passes"


def test_data_that_cannot_be_made_equal_are_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    with Job(tmp_path / "run", preload=warm.KERAS["tensorflow"]) as job:
        workers = job.start_world(2, program, "tensorflow", str(tmp_path), "subset")
        messages = [worker.result() for worker in workers]
        assert not job.events("step")
    assert any(message.startswith("UsageError: the workers read different data at step 1") for message in messages)
    assert all("set_random_seed" in message for message in messages)
    violation = audit(job.directory)["samples"].violation
    assert violation is not None
    assert "has read other data than worker" in violation.message


def test_newcomer_with_other_data_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["torch"]) as job:
        members = job.start_world(2, program, "torch", str(tmp_path), "in place")
        job.wait_for("epoch_end")
        newcomer = job.start(program, "torch", str(tmp_path), "in place", None, 1.0)
        wait_until(job, is_ready(1))
        (tmp_path / "go").touch()
        assert "this worker reads other data in epoch 1 than the others" in newcomer.result()
        found = [worker.result() for worker in members]
        job.audit()
    for epoch in map(str, range(4)):
        assert sorted([*found[0][epoch], *found[1][epoch]]) == list(range(NUM))
