"""A step whose loss compares the samples of all workers is made again if one is lost in it."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from ef_common.core.view import SOLO
from ef_common.errors import MembersChanged
from ef_common.testing.harness import Job, WorkerProcess
from ef_lightning import repetition
from tests.faults.faults import MARKS
from tests.lightning import contrastive
from tests.lightning.conftest import HOSTS

pytestmark = [pytest.mark.processes]

AFTER_THE_GATHER = {
    "before the gather": {"where": "before_gather"},
    "after the gather": {"where": "after_gather"},
    "before the backward pass": {"where": "before_backward"},
    "in the sum of the backward pass": {"where": "reduction", "index": 0},
    "in the gradients' reduction": {"where": "reduction", "index": 1},
    "in the reduction's last sum": {"where": "reduction", "index": 2},
}


def start(job: Job, options: dict[str, Any], fault: dict[str, Any], *, rank: int) -> list[WorkerProcess]:
    """Three workers, of which that of one rank bears a fault. Returns them, that one last.

    Whoever is lost before the step's first collective is lost when the others are in the step as well: else they might
    begin it without the one that is lost.
    """
    marks = job.directory / "begun"
    marks.mkdir()
    after = 2 if fault["where"] == "before_gather" else 0
    workers = [
        job.start(
            contrastive.train,
            options,
            {"step": 1, "index": 0, "generation": 1, "after": after, **fault, "rank": rank},
            node="founders",
            environ={"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": str(local), MARKS: str(marks)},
        )
        for local in range(3)
    ]
    # Not `job.view`, which is about the newest one: the fault may have made another by now.
    first = job.wait_for("view", generation=1)[0]["members"]
    victim = job.by_id(first[rank])
    return [worker for worker in workers if worker is not victim] + [victim]


def check(job: Job, survivors: list[WorkerProcess], *, late: bool = False, **options: int) -> list[dict[str, Any]]:
    """All have the weights that one process gets from the same samples, and trained on each once.

    In a step that was made again from its first collective on (`late`), BatchNorm has counted the samples twice.
    """
    results = [worker.result() for worker in survivors]
    job.audit()
    assert all(result["weights"] == results[0]["weights"] for result in results)
    expected = contrastive.reference(contrastive.tapes(job.directory), results[0]["worker"], **options)
    places = contrastive.parameters(**options) if late else range(len(expected))
    assert [results[0]["weights"][i] for i in places] == pytest.approx([expected[i] for i in places], abs=1e-8)
    return results


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", AFTER_THE_GATHER)
def test_worker_is_lost_in_a_step_that_has_gathered_and_the_others_make_it_again(
    job: Job, place: str, rank: int
) -> None:
    *others, victim = start(job, {}, AFTER_THE_GATHER[place], rank=rank)
    results = check(job, others)
    assert victim.wait() == -9
    assert job.events("fault")
    repeated = job.events("repeated")
    assert {event["step"] for event in repeated} == {2}
    assert len(repeated) == 2
    records = contrastive.tapes(job.directory)
    for result in results:
        tries = contrastive.attempts(records, result["worker"], 1, 1)
        assert len(tries) == 2
        assert tries[0]["indices"] == tries[1]["indices"]
        assert tries[0]["masks"] == tries[1]["masks"]  # the random state of its start
        assert tries[0]["before"] == tries[1]["before"]  # and the buffers


def test_gathers_gradients_are_those_of_one_process(job: Job) -> None:
    workers = job.start_world(3, contrastive.train, {})
    check(job, workers)
    assert not job.events("repeated")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_worker_is_lost_when_others_may_have_the_result_already(job: Job, index: int) -> None:
    *others, _ = start(job, {}, {"where": "reduction", "index": index, "moment": "wait"}, rank=1)
    check(job, others)
    assert job.events("fault")


@pytest.mark.parametrize("place", ["in the sum of the backward pass", "in the gradients' reduction"])
def test_step_of_a_module_whose_gradients_are_lent_is_made_again(job: Job, place: str) -> None:
    options = {"width": 20_000, "trainer": {"max_steps": 3}}
    *others, _ = start(job, options, AFTER_THE_GATHER[place], rank=0)
    check(job, others, width=20_000)
    assert len(job.events("repeated")) == 2


@pytest.mark.parametrize("index", [0, 1, 2])
def test_worker_that_alone_lacks_a_result_gets_it_and_no_step_is_made_again(job: Job, index: int) -> None:
    workers = start(job, {}, {"where": "reduction", "index": index, "moment": "lose"}, rank=1)
    check(job, workers)
    assert job.events("fault")
    assert not job.events("repeated")


def test_accumulated_batches_are_made_again_with_the_newest_one(job: Job) -> None:
    options = {"host": HOSTS[1], "trainer": {"accumulate_grad_batches": 2, "max_steps": 1}}
    fault = {"where": "after_gather", "step": 0, "index": 1}
    *others, _ = start(job, options, fault, rank=0)
    results = check(job, others, accumulate=2)
    records = contrastive.tapes(job.directory)
    for result in results:
        assert result["passes"] == 4.0  # two of each worker, however often
        for batch in range(2):
            first, second = contrastive.attempts(records, result["worker"], 0, batch)
            assert {name: first[name] for name in ("indices", "masks", "before")} == {
                name: second[name] for name in ("indices", "masks", "before")
            }


def test_batch_that_is_the_first_to_gather_is_made_again_and_those_before_it_are_kept(job: Job) -> None:
    options = {"gathers_from": (2, 1), "trainer": {"accumulate_grad_batches": 2, "max_steps": 3}}
    *others, _ = start(job, options, {"where": "after_gather", "step": 2, "index": 1}, rank=0)
    results = check(job, others, late=True, accumulate=2)
    records = contrastive.tapes(job.directory)
    numbers = [[len(contrastive.attempts(records, r["worker"], 2, batch)) for batch in range(2)] for r in results]
    assert numbers == [[1, 2], [1, 2]]


def test_batches_after_the_first_one_that_gathers_are_made_again_with_it(job: Job) -> None:
    options = {"gathers_from": (1, 1), "trainer": {"accumulate_grad_batches": 3, "max_steps": 2}}
    *others, _ = start(job, options, {"where": "after_gather", "step": 1, "index": 2}, rank=0)
    results = [worker.result() for worker in others]
    assert results[0]["weights"] == results[1]["weights"]
    records = contrastive.tapes(job.directory)
    numbers = [[len(contrastive.attempts(records, r["worker"], 1, batch)) for batch in range(3)] for r in results]
    assert numbers == [[1, 2, 2], [1, 2, 2]]
    job.audit()


@pytest.mark.parametrize("place", ["after the gather", "in the gradients' reduction"])
def test_step_with_collectives_of_the_default_group_is_made_again(job: Job, place: str) -> None:
    # torch gathers gradients as a plain sum, so all batches are of the same size until the last one.
    options = {"default_group": True, "trainer": {"limit_train_batches": 2}}
    *others, _ = start(job, options, AFTER_THE_GATHER[place], rank=0)
    check(job, others)
    assert len(job.events("repeated")) == 2


def test_workers_are_lost_one_after_the_other_in_a_step_and_the_last_one_makes_it_alone(job: Job) -> None:
    fault = {"where": "after_each_gather", "generation": None}
    workers = start(job, {}, fault, rank=1)
    (survivor,) = [worker for worker in workers if worker.wait() == 0]
    check(job, [survivor])
    assert len(survivor.events("repeated", step=2)) == 2


def test_data_workers_read_batches_of_one_size_once_a_step_has_gathered(job: Job) -> None:
    check(job, job.start_world(3, contrastive.train, {"num_workers": 2}))
    sizes: dict[tuple[int, int], set[int]] = {}
    for record in contrastive.tapes(job.directory):
        sizes.setdefault((record["step"], record["batch"]), set()).add(len(record["indices"]))
    assert [len(some) for some in sizes.values()] == [1] * 6


def test_newcomer_has_batches_of_the_size_of_the_others(job: Job) -> None:
    options = {"expects": 3, "trainer": {"max_epochs": 4}}
    workers = job.start_world(2, contrastive.train, options)
    job.wait_for_step(3)
    check(job, [*workers, job.start(contrastive.train, options)])
    assert {event["world_size"] for event in job.events("step")} == {2, 3}


def sizes(job: Job) -> list[list[int]]:
    """Samples of each worker's newest batch, step after step."""
    newest = {(r["step"], r["worker"]): len(r["indices"]) for r in contrastive.tapes(job.directory)}
    return [[size for (of, _), size in newest.items() if of == step] for step in sorted({step for step, _ in newest})]


def test_first_step_that_gathers_is_made_again_with_batches_of_one_size(job: Job) -> None:
    options = {"length": 7}
    check(job, job.start_world(2, contrastive.train, options), length=7)
    assert sizes(job) == [[4, 4], [4, 4]]
    assert [event["step"] for event in job.events("repeated")] == [1, 1]


def test_step_in_which_a_module_begins_to_gather_is_made_again_with_batches_of_one_size(job: Job) -> None:
    options = {"gathers_from": (3, 0), "num_workers": 1}
    workers = job.start_world(2, contrastive.train, options)
    check(job, workers, late=True)
    assert sizes(job)[3] == [3, 3]
    assert [event["step"] for event in job.events("repeated")] == [4, 4]


@pytest.mark.parametrize(("place", "index"), [("before_gather", 0), ("after_gather", 1)])
@pytest.mark.parametrize("rank", [0, 1])
def test_worker_is_lost_in_a_step_whose_batches_are_filled_up(job: Job, place: str, index: int, rank: int) -> None:
    options = {"length": 11}
    *others, _ = start(job, options, {"where": place, "step": 0, "index": index}, rank=rank)
    check(job, others, length=11)
    assert job.events("fault")
    assert all(len(worker.events("repeated", step=1)) == 2 for worker in others)


def test_default_group_gathers_from_batches_of_one_size(job: Job) -> None:
    workers = job.start_world(2, contrastive.train, {"length": 7, "default_group": True})
    results = [worker.result() for worker in workers]
    assert results[0]["weights"] == results[1]["weights"]
    assert sizes(job) == [[4, 4], [4, 4]]
    job.audit()


def test_each_pass_that_is_repeated_has_its_own_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the newest one: that may be padding, or be shared otherwise."""
    monkeypatch.setattr(repetition, "leaving_no_trace", lambda trainer: nullcontext())
    monkeypatch.setattr(repetition, "Traces", lambda trainer: SimpleNamespace(undo=lambda: None))
    monkeypatch.setattr(repetition.hooks, "step_fields", lambda trainer: ())
    monkeypatch.setattr(repetition.hooks, "set_step_fields", lambda trainer, fields: None)
    strategy = SimpleNamespace(block_backward_sync=nullcontext)
    trainer, session = SimpleNamespace(lightning_module=nn.Linear(1, 1), strategy=strategy), SimpleNamespace()
    session.completed_in = SOLO
    seen: list[Any] = []
    passes = repetition.Repetition(
        trainer,
        session,  # type: ignore[arg-type]
        on_repeat=seen.append,
        begins=lambda: False,
        fill=lambda: None,
        select=seen.append,  # type: ignore[arg-type]
    )

    def act(name: str) -> None:
        seen.append(name)
        if seen == ["first", "second", "third"]:
            raise MembersChanged

    for name in ("first", "second", "third"):
        passes._run(partial(act, name), name == "first", {})
    _, _, _, why, *again = seen
    assert "a worker was lost" in why
    assert again == [-3, "first", -2, "second", -1, "third"]
