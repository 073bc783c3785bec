"""Streams that know no shards: each worker walks through them, and all together train on every sample once."""

from __future__ import annotations

import importlib
import json
import signal
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from ef_common.errors import UnsupportedError, UsageError
from ef_common.testing.harness import Job
from ef_lightning import strategy_for
from tests import warm
from tests.lightning import training, walked
from tests.lightning.conftest import HOSTS

pl = importlib.import_module(HOSTS[0])
HOST = HOSTS[0]
LENGTH = 29
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
processes, thorough = pytest.mark.processes, pytest.mark.thorough

Case = tuple[str, dict[str, Any], dict[str, Any]]
FINITE: dict[str, Case] = {
    "a generator": ("numbers", {}, {}),
    "whole batches": ("numbers", {}, {"length": 28}),
    "of known length": ("sized", {}, {}),
    "data workers": ("numbers", {}, {"num_workers": 2}),
    "data workers that are kept": ("numbers", {}, {"num_workers": 1, "persistent_workers": True}),
    "accumulated": ("numbers", {"accumulate_grad_batches": 3}, {}),
    "its own batches": ("numbers", {}, {"batch_size": None}),
    "shuffled by torch": ("torch", {}, {}),
    "shuffled by torch in data workers": ("torch", {}, {"num_workers": 1}),
    "shuffled by numpy": ("numpy", {}, {}),
    "shuffled by the number of the pass": ("passes", {}, {}),
}


def everything(results: list[Any]) -> list[list[int]]:
    """What all workers have seen in each epoch, sorted."""
    epochs = range(max(len(result["seen"]) for result in results))
    parts = [[batch for result in results for batch in result["seen"][epoch : epoch + 1]] for epoch in epochs]
    return [sorted(chain(*part)) for part in parts]


# ---------------------------------------------------------------- one process


QUICK = ("a generator", "accumulated", "without end", "empty")
ALONE = [*FINITE, "limited", "without end", "half", "last batch dropped", "empty"]


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=thorough) for name in ALONE])
def test_one_process_trains_as_without_elasticflow(name: str) -> None:
    others: dict[str, Case] = {
        "limited": ("numbers", {"limit_train_batches": 3}, {"length": None}),
        "without end": ("numbers", {"max_steps": 7, "max_epochs": -1}, {"length": None}),
        "half": ("sized", {"limit_train_batches": 0.5}, {}),
        "last batch dropped": ("numbers", {}, {"drop_last": True}),
        "empty": ("numbers", {}, {"length": 0}),
    }
    kind, options, loading = {**FINITE, **others}[name]

    def fit(strategy: Any) -> Any:
        model = walked.module(pl)()
        trainer = training.trainer(pl, strategy, **options)
        trainer.fit(model, walked.loader(kind, **loading))
        return model, trainer.global_step

    (plain, plain_steps), (ours, steps) = fit("auto"), fit(strategy_for(HOST)())
    assert steps == plain_steps
    if "shuffled by torch" in name or "numpy" in name:
        assert [sorted(seen) for seen in ours.seen] == [list(range(LENGTH))] * 2
        assert ours.seen[0] != ours.seen[1]
        return
    assert ours.seen == plain.seen
    assert training.weights(ours) == training.weights(plain)
    # The length is known with the last batch.
    known = [length for length in ours.lengths if length != float("inf")]
    assert ours.lengths[:1] == plain.lengths[:1]
    assert set(known) <= {len(plain.lengths) // 2}


def test_length_that_nobody_knows_is_shown_as_lightning_shows_it() -> None:
    model = walked.module(pl)()
    estimated: list[float] = []
    make = model.configure_optimizers

    def configure_optimizers() -> Any:
        estimated.append(model.trainer.estimated_stepping_batches)
        return make()

    model.configure_optimizers = configure_optimizers
    training.trainer(pl, strategy_for(HOST)(), max_steps=9, max_epochs=-1).fit(model, walked.loader("numbers", None))
    assert estimated == [9]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "limit": (
        {"limit_train_batches": 0.5},
        {},
        "limit_train_batches is a fraction of a stream whose length is unknown",
    ),
    "interval": ({"val_check_interval": 0.5}, {}, "val_check_interval is a fraction of an epoch"),
    "global batch": ({}, {"global_batch_size": 8}, "global_batch_size is about samples"),
    "deterministic": ({}, {"global_batch_size": 8, "deterministic": True}, "is about samples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_stream_cannot_do_is_refused(name: str) -> None:
    options, settings, message = REFUSED[name]
    trainer = training.trainer(pl, strategy_for(HOST)(**settings), **options)
    with pytest.raises((UsageError, UnsupportedError), match=message):
        trainer.fit(walked.module(pl)(), walked.loader("numbers"), walked.loader("numbers"))


# ---------------------------------------------------------------- several workers


@processes
def test_workers_share_a_stream_so_that_each_sample_counts_once(run: Callable[..., list[Any]]) -> None:
    results = run(2, walked.run, HOST, "torch")
    assert everything(results) == [list(range(LENGTH))] * 2
    assert all(result["seen"][0] for result in results)
    assert results[0]["weights"] == results[1]["weights"]
    assert results[0]["loss"] == results[1]["loss"]
    assert results[0]["lengths"] == results[1]["lengths"] == [*[None] * 3, 4] * 2
    assert results[0]["steps"] == 8


@processes
@thorough
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_workers_share_streams_of_all_kinds(
    run: Callable[..., list[Any]], job: Job, tmp_path: Path, host: str, world_size: int
) -> None:
    walked.write_rows(tmp_path / "rows.csv", LENGTH)
    cases = {**FINITE, "a file": ("csv", {}, {"path": str(tmp_path / "rows.csv")})}
    results = run(world_size, walked.run_each, host, cases)
    for name, (_, _, loading) in cases.items():
        found = [result[name] for result in results]
        assert everything(found) == [list(range(loading.get("length", LENGTH)))] * 2, name
        assert all(one["weights"] == found[0]["weights"] for one in found), name
    assert any("is read as a whole by each worker" in worker.output.read_text() for worker in job.workers)


@processes
@thorough
def test_update_on_a_short_batch_is_the_mean_over_samples(run: Callable[..., list[Any]]) -> None:
    """Batches of 4 and 1: as one process that has all five in a batch."""
    results = run(2, walked.run, HOST, "numbers", {"max_epochs": 1})
    model = walked.module(pl)()
    trainer = training.trainer(pl, "auto", max_epochs=1)
    trainer.fit(model, walked.loader("numbers", batch_size=8))
    assert results[0]["weights"] == pytest.approx(training.weights(model), abs=1e-6)


@processes
@thorough
def test_workers_share_streams_without_end(run: Callable[..., list[Any]]) -> None:
    cases: dict[str, Case] = {
        "limited": ("numbers", {"limit_train_batches": 5}, {"length": None}),
        "steps": ("numbers", {"max_steps": 11, "max_epochs": -1}, {"length": None}),
    }
    results = run(2, walked.run_each, HOST, cases)
    assert everything([result["limited"] for result in results]) == [list(range(40))] * 2
    assert everything([result["steps"] for result in results]) == [list(range(88))]


@processes
@thorough
@pytest.mark.parametrize("kind", ["forgotten", "by rank"])
def test_workers_that_read_different_data_do_not_train_on_them(job: Job, kind: str) -> None:
    workers = job.start_world(2, walked.run, HOST, kind)
    assert all(worker.wait() != 0 for worker in workers)
    assert any("the workers read different data at step 1" in worker.output.read_text() for worker in workers)
    assert not job.events("step")


NEWCOMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "a generator": ("numbers", {}),
    "shuffled": ("torch", {}),
    "shuffled by the number of the pass": ("passes", {}),
    "data workers": ("numbers", {"num_workers": 2}),
    "shuffled in a data worker": ("numpy", {"num_workers": 1}),
    "its own batches": ("numbers", {"batch_size": None}),
}


@processes
@thorough
@pytest.mark.parametrize("name", NEWCOMERS)
def test_newcomer_and_loss_in_mid_epoch_repeat_and_lose_nothing(job: Job, tmp_path: Path, name: str) -> None:
    kind, loading = NEWCOMERS[name]
    loading, notes = {"length": 83, **loading}, tmp_path / "notes.json"
    (stays,) = job.start_world(1, walked.run_until, HOST, kind, 3, loading, None)
    dies = job.start(walked.run_until, HOST, kind, 3, loading, str(notes))
    comes = job.start(walked.run_until, HOST, kind, 3, loading, None)
    results = [stays.result(), comes.result()]
    assert dies.wait() == -signal.SIGKILL
    job.audit()
    assert [event["returned"] for event in job.events("step", worker=stays.id) if event["returned"]]
    assert results[0]["weights"] == results[1]["weights"]
    counted, _ = json.loads(notes.read_text())  # without the step in which it died
    assert everything([*results, {"seen": [counted]}]) == [list(range(83))] * 2


@processes
@thorough
def test_newcomer_that_reads_other_data_is_refused_and_the_others_go_on(job: Job) -> None:
    stays = job.start_world(1, walked.run_until, HOST, "numbers", 2, {}, None)
    job.wait_for_step(2)
    other = job.start(walked.run_until, HOST, "forgotten", 0, {}, None)
    assert other.wait() != 0
    assert "this worker reads other data in epoch 0 than the others" in other.output.read_text()
    comes = job.start(walked.run_until, HOST, "numbers", 2, {}, None)  # the first one waits for a second one
    assert everything([stays[0].result(), comes.result()]) == [list(range(LENGTH))] * 2
    job.audit()


@processes
@thorough
@pytest.mark.parametrize("kind", ["torch", "passes"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (2, 1), (1, 2)])
def test_training_goes_on_in_mid_epoch_at_another_size(tmp_path: Path, kind: str, before: int, after: int) -> None:
    directory, loading = str(tmp_path / "saved"), {"length": 83}
    with Job(tmp_path / "first", preload=warm.TORCH) as job:
        first = [worker.result() for worker in job.start_world(before, walked.stop, HOST, kind, directory, loading)]
    with Job(tmp_path / "second", preload=warm.TORCH) as job:
        workers = job.start_world(after, walked.go_on, HOST, kind, directory, loading)
        second = [worker.result() for worker in workers]
        job.audit()
        assert not any("are others than those" in worker.output.read_text() for worker in workers)
    assert everything(first + second) == [list(range(83))] * 2
    assert all(result["weights"] == second[0]["weights"] for result in second)


# ---------------------------------------------------------------- evaluation


@processes
@thorough
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_workers_share_a_stream_that_they_evaluate(run: Callable[..., list[Any]], world_size: int) -> None:
    results = run(world_size, walked.evaluate, HOST)
    check_evaluations(results)


@processes
@thorough
@pytest.mark.parametrize("where", ["fit", "validate", "test", "predict"])
def test_loss_in_an_evaluation_of_a_stream_loses_nothing(job: Job, where: str) -> None:
    seats = [{"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": str(rank)} for rank in range(3)]
    workers = [
        job.start(walked.evaluate, HOST, where if rank == 0 else None, node="founders", environ=seat)
        for rank, seat in enumerate(seats)
    ]
    results = [worker.result() for worker in workers[1:]]
    assert workers[0].wait() == -signal.SIGKILL
    names = ["fit", "validate", "test", "predict"]
    check_evaluations(results, names[names.index(where) :])
    job.audit()


def check_evaluations(results: list[Any], names: Sequence[str] = ("fit", "validate", "test", "predict")) -> None:
    for name in names:
        assert sorted({n for result in results for n in result[name]["seen"]}) == list(range(53)), name
        if name != "predict":
            assert all(result[name]["mean"] == pytest.approx(26.0) for result in results), name
