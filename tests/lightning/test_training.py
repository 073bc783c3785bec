"""Everything a training can be told, against one process that is told the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.lightning import battery, padded
from tests.lightning.conftest import HOSTS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.parametrize("host", HOSTS)
def test_two_workers_train_as_one_process_with_their_batches(run: Callable[..., list[Any]], host: str) -> None:
    assert_as_one(run(2, battery.run, host, audit=False), battery.CASES)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_workers_that_share_a_batch_train_as_one_process_with_it(
    run: Callable[..., list[Any]], world_size: int
) -> None:
    results = run(world_size, battery.run_global, HOSTS[0], audit=False)
    assert len(results[0]) == battery.NUM_GLOBAL
    assert_as_one(results, results[0])


@pytest.mark.parametrize("host", HOSTS)
def test_padding_in_an_accumulation_counts_nowhere(run: Callable[..., list[Any]], host: str) -> None:
    first, second = run(2, padded.train, host)
    assert sorted([first["padding"], second["padding"]]) == [[False, False], [False, True]]
    weights, loss = padded.expected()
    assert first["weights"] == second["weights"] == pytest.approx(weights)
    assert first["logged"] == second["logged"] == pytest.approx(loss)


def assert_as_one(results: list[Any], names: Iterable[str]) -> None:
    wrong = {}
    for name in names:
        ours, others = ([result[name][0] for result in results], results[0][name][1])
        if any(theirs != ours[0] for theirs in ours):
            wrong[name] = f"ranks differ: {ours}"
        for key in ("steps", "epochs", "batches", "rates"):
            if ours[0][key] != others[key]:
                wrong[name] = f"{key}: {ours[0][key]} != {others[key]}"
        difference = (battery.finite(ours[0]["weights"]) - battery.finite(others["weights"])).abs().max()
        if difference > 1e-5:
            wrong[name] = f"weights differ by {difference}"
    assert not wrong
