"""The contract of the port `Group`, on each engine in real processes and on the simulator's network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.collectives import scripts
from tests.collectives.seats import ENGINES, Script, run_in_memory, run_in_processes

Run = Callable[..., list[Any]]
SEEDS = range(20)


@pytest.fixture(params=[*ENGINES, *(pytest.param(seed, id=f"memory-{seed}") for seed in SEEDS)])
def engine(request: pytest.FixtureRequest) -> str | int:
    found: str | int = request.param
    return found


@pytest.fixture
def run(engine: str | int, tmp_path: Path) -> Run:
    if isinstance(engine, str):
        return partial(run_in_processes, directory=tmp_path / "run", engine=engine)

    def in_memory(script: Script, world_size: int, *, lost: tuple[int, ...] = ()) -> list[Any]:
        return run_in_memory(script, world_size, seed=engine)

    return in_memory


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_all_reduce_sums_bit_for_bit_equal(run: Run, world_size: int) -> None:
    first, *others = run(scripts.reduce, world_size)
    ranks = range(world_size)
    expected = [sum(0.1 * (r + 1) for r in ranks), sum(1.0 / (r + 3) for r in ranks), -7.0 * world_size]
    assert first == pytest.approx(expected)
    assert all(other == first for other in others)


def test_all_reduce_several_at_once_complete_in_any_order_of_waiting(run: Run) -> None:
    expected = [[3.0 + 3 * number] * (number + 1) for number in range(5)]
    assert run(scripts.reduce_several_at_once, 3) == [expected] * 3


def test_same_operation_many_times_gives_the_result_each_time(run: Run) -> None:
    assert run(scripts.reduce_again_and_again, 2) == [[151.0]] * 2


def test_all_gather_brings_payloads_of_all_sizes_in_rank_order(run: Run) -> None:
    expected = [[0, size, 2 * size] for size in (0, 1, 119, 120, 121, 5000, 1 << 19)]
    assert run(scripts.gather_payloads_of_different_sizes, 3) == [expected] * 3


@pytest.mark.processes
def test_large_payloads_are_received_on_the_host_whatever_the_default_device_is(tmp_path: Path) -> None:
    expected = [[0, size, 2 * size] for size in (0, 1, 119, 120, 121, 5000, 1 << 19)]
    script = scripts.gather_payloads_with_another_default_device
    assert run_in_processes(script, 3, tmp_path / "run", engine="gloo") == [expected] * 3


def test_send_and_receive_keep_order_and_values(run: Run) -> None:
    expected = [[[float(previous)] * 3, [10.0 + previous], [previous, 7.0]] for previous in (2, 0, 1)]
    assert run(scripts.send_around, 3) == expected


def test_member_passes_on_what_it_receives(run: Run) -> None:
    assert run(scripts.pass_along, 3) == [[[1.0, 2.0, 3.0], [4.0]]] * 3


def test_abort_wakes_an_operation_and_everything_raises_from_then_on(run: Run) -> None:
    assert run(scripts.abort_wakes_who_waits, 3) == [[], [True] * 5, [True] * 5]


def test_abort_wakes_who_receives(run: Run) -> None:
    assert run(scripts.abort_wakes_who_receives, 2) == [True, True]


def test_death_of_a_member_breaks_the_group_of_the_others(run: Run) -> None:
    assert run(scripts.death_in_a_collective, 3, lost=(2,)) == [[True] * 5, [True] * 5, None]
