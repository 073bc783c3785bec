"""Bitwise elastic training: the weights are those of an undisturbed run of one worker, whatever happens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ef_common.testing.harness import WorkerProcess
from tests.faults.conftest import TrainingJob, struck
from tests.faults.hosts import hosted, in_each_framework_but_jax, marks_of
from tests.faults.test_kill import start_with_fault, view_sizes
from tests.waiting import is_ready, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

Finish = Callable[..., list[dict[str, Any]]]
# 8 pieces in a global batch, and a last one of 11 samples in an epoch, whose last piece would be a single sample.
OPTIONS = {"global_batch": 40, "batch_size": 5, "length": 211, "deterministic": True, "random": True, "epochs": 2}
NUM_STEPS = 12


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, host: Any) -> Callable[[dict[str, Any]], str]:
    """Hash of the weights of one worker that trains to the end."""

    @functools.cache
    def run(options: tuple[tuple[str, Any], ...]) -> str:
        with TrainingJob(tmp_path_factory.mktemp("alone") / "run", host) as job:
            (worker,) = job.start_world(1, job.train, dict(options))
            weights: str = worker.result()["weights"]
            return weights

    return lambda options: run(tuple(options.items()))


def assert_same(results: list[dict[str, Any]], expected: str) -> None:
    assert {result["weights"] for result in results} == {expected}
    assert {result["step"] for result in results} == {NUM_STEPS}


def each(name: str, *, lightning: Sequence[Any] = (), keras: Sequence[Any] = ()) -> Any:
    """Run a test with each host, and with as many cases as it is worth."""
    cases = {
        "lightning": lightning,
        "lightning-cuda": lightning[-1:],
        "keras-tensorflow": keras,
        "keras-torch": keras,
        "keras-torch-cuda": keras[-1:],
    }
    return pytest.mark.parametrize(
        ("host", name),
        [
            pytest.param(host, value, marks=marks_of(host), id=f"{host}-{value}")
            for host, values in cases.items()
            for value in values
        ],
        indirect=["host"],
        scope="module",
    )


@each("world_size", lightning=[2, 3, 4], keras=[3])
def test_same_bits_for_every_world_size(
    job: TrainingJob, finish: Finish, undisturbed: Callable[..., str], world_size: int
) -> None:
    assert_same(finish(job.start_world(world_size, job.train, OPTIONS)), undisturbed(OPTIONS))


@in_each_framework_but_jax
def test_other_random_numbers_give_other_bits(undisturbed: Callable[..., str]) -> None:
    """Else the tests around this one would prove nothing."""
    assert undisturbed(OPTIONS) != undisturbed({**OPTIONS, "random": False})


@each("place", lightning=[("forward", 0), ("forward", 1), ("backward", 0), ("optimizer", 0)])
def test_same_bits_when_a_worker_is_killed_within_a_step(
    job: TrainingJob, finish: Finish, undisturbed: Callable[..., str], place: tuple[str, int]
) -> None:
    kill_within_a_step(job, finish, undisturbed, place)


def kill_within_a_step(
    job: TrainingJob, finish: Finish, undisturbed: Callable[..., str], place: tuple[str, int]
) -> None:
    where, index = place
    victim, others = start_with_fault(job, OPTIONS, {"where": where, "step": 3, "index": index})
    assert_same(finish(others), undisturbed(OPTIONS))
    victim.wait()
    struck(job, where)
    assert view_sizes(job) == [3, 2]


@each(
    "place",
    lightning=[(moment, index) for moment in ("send", "receive") for index in range(4)],
    keras=[("receive", 1)],
)
def test_same_bits_when_a_worker_is_killed_within_the_exchange(
    job: TrainingJob, finish: Finish, undisturbed: Callable[..., str], place: tuple[str, int]
) -> None:
    moment, index = place
    victim, others = start_with_fault(job, OPTIONS, {"where": "exchange", "step": 3, "index": index, "moment": moment})
    assert_same(finish(others), undisturbed(OPTIONS))
    victim.wait()
    struck(job, "exchange")
    assert view_sizes(job) == [3, 2]


@in_each_framework_but_jax
def test_same_bits_when_workers_join(job: TrainingJob, finish: Finish, undisturbed: Callable[..., str]) -> None:
    options = {**OPTIONS, "holds": {2: "second", 6: "third"}}
    workers = job.start_world(1, job.train, options)
    job.wait_for_step(1)
    for node, size in (("second", 2), ("third", 3)):
        workers.append(job.start(job.train, options, node=node))
        wait_until(job, is_ready(1, world_size=size))
        (job.directory / node).touch()
        job.view(size)
    assert_same(finish(workers), undisturbed(OPTIONS))


def test_same_bits_with_data_workers_and_a_kill(
    job: TrainingJob, finish: Finish, undisturbed: Callable[..., str]
) -> None:
    options = {**OPTIONS, "num_workers": 2}
    victim, others = start_with_fault(job, options, {"where": "backward", "step": 3})
    assert_same(finish(others), undisturbed(OPTIONS))
    victim.wait()


@hosted("keras-tensorflow", "keras-torch")
@pytest.mark.thorough
def test_same_bits_of_a_stream_with_a_kill_and_a_join(
    job: TrainingJob, finish: Finish, undisturbed: Callable[..., str]
) -> None:
    """A stream is walked by all, in the same order; samples of its batches are what is shared."""
    stream = {**OPTIONS, "data": "stream", "batch_size": 10}
    options = {**stream, "holds": {4: "second"}}
    victim, others = start_with_fault(job, options, {"where": "backward", "step": 2}, world_size=2)
    job.view(1, after=1)
    others.append(job.start(job.train, options, node="second"))
    wait_until(job, is_ready(1, world_size=2))
    (job.directory / "second").touch()
    job.view(2, after=2)
    assert_same(finish(others), undisturbed(stream))
    victim.wait()
    struck(job, "backward")


def test_all_but_one_are_killed_in_one_step(job: TrainingJob, finish: Finish, undisturbed: Callable[..., str]) -> None:
    fault = {"where": "backward", "step": 2}
    founder = {"LOCAL_WORLD_SIZE": "4"}
    workers: list[WorkerProcess] = [
        job.start(
            job.train,
            OPTIONS,
            *([fault] if rank else []),
            node="founders",
            environ={**founder, "LOCAL_RANK": str(rank)},
        )
        for rank in range(4)
    ]
    job.founders(4)
    assert_same(finish(workers[:1]), undisturbed(OPTIONS))
    for worker in workers[1:]:
        worker.wait()


@each("world_size", lightning=[2, 3], keras=[2])
def test_a_fixed_global_batch_has_the_same_steps_for_every_history(
    job: TrainingJob, finish: Finish, world_size: int
) -> None:
    """Without the same bits: shares are finer, and a loss in a step is made up for too."""
    options = {**OPTIONS, "deterministic": False, "random": False}
    victim, others = start_with_fault(job, options, {"where": "backward", "step": 3}, world_size=world_size + 1)
    results = finish(others)
    victim.wait()
    assert {result["step"] for result in results} == {NUM_STEPS}
    assert all(not event["returned"] for event in job.events("step"))
    sizes = {event["step"]: sum(stop - start for start, stop in event["committed"]) for event in job.events("step")}
    assert list(sizes.values()) == [40, 40, 40, 40, 40, 11] * 2


@each("place", keras=[("backward", 0), ("optimizer", 0)])
def test_same_bits_of_keras_when_a_worker_is_killed_within_a_step(
    job: TrainingJob, finish: Finish, undisturbed: Callable[..., str], place: tuple[str, int]
) -> None:
    kill_within_a_step(job, finish, undisturbed, place)


@each("num_workers", keras=[0, 2])
def test_same_bits_of_a_loader_of_keras_with_a_kill(
    job: TrainingJob, finish: Finish, undisturbed: Callable[..., str], num_workers: int
) -> None:
    options = {**OPTIONS, "data": "loader", "num_workers": num_workers}
    victim, others = start_with_fault(job, options, {"where": "backward", "step": 3})
    assert_same(finish(others), undisturbed({**options, "num_workers": 0}))
    victim.wait()
    assert struck(job, "backward")
    assert view_sizes(job) == [3, 2]
