"""Keras's schedules follow the samples, whatever the workers do: they are called as in a training of one worker."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import Job
from tests import warm
from tests.jax_installed import ON_JAX
from tests.keras.launch import call_all, call_in
from tests.waiting import is_ready, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(530)]

BACKENDS = ["tensorflow", pytest.param("torch", marks=pytest.mark.thorough)]
BATCH_SIZE = 4
SCENARIOS = [
    "follow_samples",
    "follow_in_other_optimizers",
    "make_several_updates_of_a_batch",
    "leave_nothing_behind",
    "follow_updates",
    "set_rates_per_epoch",
    "start_again",
]


@pytest.fixture(scope="module", params=BACKENDS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the scenarios have found."""
    directory = tmp_path_factory.mktemp(request.param)
    with Job(directory / "run", preload=warm.KERAS[request.param], guard_s=500.0) as job:
        results: dict[str, Any] = job.start(call_all, "scheduled", request.param, SCENARIOS).result()
    return results


def test_each_schedule_has_the_value_of_one_worker_at_the_same_samples(found: dict[str, Any]) -> None:
    off = found["follow_samples"]
    assert len(off) in (8 * 3 + 3, 7 + 2 * 3)  # with all steps; with one, but for one schedule
    assert len({name.partition(",")[0] for name in off}) == 8
    assert off == {name: pytest.approx([0.0] * 4, abs=1e-6) for name in off}


def test_rates_are_those_of_one_worker_in_each_optimizer(found: dict[str, Any]) -> None:
    off = found["follow_in_other_optimizers"]
    assert off == pytest.approx(dict.fromkeys(off, 0.0), abs=1e-6)


def test_several_updates_of_a_batch_are_several_of_one_workers(found: dict[str, Any]) -> None:
    counts = found["make_several_updates_of_a_batch"]
    # Each batch is two of the one worker's, and so four of its updates; the last two of them are made.
    assert counts["updates"] == 24
    assert counts["before"][1:] == [6.0, 10.0, 14.0]
    assert counts["after"] == [4.0 * number for number in range(1, 13)]


def test_what_is_saved_has_the_users_schedule(found: dict[str, Any]) -> None:
    for name, kept in found["leave_nothing_behind"].items():
        assert set(kept.values()) == {True}, (name, kept)


def test_schedules_that_count_updates_do(found: dict[str, Any]) -> None:
    seen = found["follow_updates"]
    assert seen["message"] == "schedules follow one of ('samples', 'updates'). Received: schedules='epochs'"
    assert [seen["updates"], seen["global"]] == pytest.approx([0.0, 0.0], abs=1e-7)


def test_callbacks_that_set_the_rate_of_an_epoch_are_left_alone(found: dict[str, Any]) -> None:
    assert found["set_rates_per_epoch"] == pytest.approx([1 / 128, 1 / 256, 1 / 1024])


def test_training_goes_on_from_a_checkpoint_with_steps_of_another_size(found: dict[str, Any]) -> None:
    first, second, third = (found["start_again"][name] for name in ("first", "second", "third"))
    assert first == list(range(12 + 5 + 1))
    # Each step stands for two of the first start's, but for the last one of the epoch that broke off.
    assert second == [18, 20, 22, 23, 25, 27, 29, 31, 33, 35]
    assert third == list(range(36, 48))


# ---------------------------------------------------------------- real workers


def size(ranges: Any) -> int:
    return sum(stop - start for start, stop in ranges)


@pytest.mark.parametrize("backend", [*BACKENDS, ON_JAX])
def test_rates_follow_the_samples_while_workers_come_and_go(tmp_path: Path, backend: str) -> None:
    length, epochs = 60 * BATCH_SIZE, 3
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        founders = job.start_world(2, training, backend, length, epochs)
        job.wait_for_step(4)
        first, lost = job.view(2)
        lost.kill()
        job.view(1, after=1)
        steps = max(event["step"] for event in job.events("step"))
        job.wait_for_step(steps + 3)
        newcomers = [job.start(training, backend, length, epochs) for _ in range(2)]
        results = [worker.result() for worker in (*founders, *newcomers) if worker is not lost]
        job.audit()
        updates = {event["step"]: event for event in first.events("step")}
    num_steps, done, sizes = length // BATCH_SIZE, [0] * epochs, set()
    (full,) = (result for result in results if result["worker"] == first.id)
    assert len(full["before"]) == len(updates)
    for count, number in zip(full["before"], sorted(updates), strict=True):
        update = updates[number]
        epoch, committed, returned = update["epoch"], size(update["committed"]), size(update["returned"])
        end = done[epoch] + committed + returned  # a worker that is lost in an update was counted on before it
        assert count == epoch * num_steps + math.ceil(end / BATCH_SIZE) - 1
        done[epoch] += committed
        sizes.add(committed)
    assert done == [length] * epochs
    assert sizes >= {BATCH_SIZE, 2 * BATCH_SIZE}
    for result in results:
        assert result["before"] == full["before"][-len(result["before"]) :]
        assert result["before"][-1] == epochs * num_steps - 1
        assert result["of_epochs"][-1] == epochs * num_steps
        assert result["updates"] == len(updates)


def training(backend: str, length: int, epochs: int) -> Any:
    """Train until the end."""
    return call_in("scheduled", backend, "run", length, epochs=epochs)


@pytest.mark.parametrize("backend", ["torch", pytest.param("tensorflow", marks=pytest.mark.thorough)])
def test_second_training_goes_on_with_the_schedule_also_in_a_newcomer(tmp_path: Path, backend: str) -> None:
    length, gate = 20 * BATCH_SIZE, tmp_path / "gate"
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        members = job.start_world(2, training_twice, backend, length, str(gate))
        wait_until(job, lambda state: state.training == 2)
        newcomer = job.start(training_twice, backend, length, str(gate))
        wait_until(job, is_ready(2))
        gate.touch()
        first, second, third = [worker.result() for worker in (*members, newcomer)]
        job.audit()
    assert first == second
    assert first["first"] == list(range(1, 40, 2))
    counts = first["second"]
    assert counts[0] in (41, 42)  # two workers, or three
    assert {after - before for before, after in itertools.pairwise(counts)} <= {1, 2, 3}
    assert counts[-1] == 79
    assert third["first"] == []
    assert third["second"] == first["second"][-len(third["second"]) :]


def training_twice(backend: str, length: int, gate: str) -> Any:
    """Train twice."""
    return call_in("scheduled", backend, "run_twice", length, gate)
