"""A simulator that finds nothing proves nothing: each mutation of the rules must be found."""

from __future__ import annotations

import pytest

from ef_common.testing.simulation import schedule_of, simulate
from ef_common.testing.simulation.schedule import failover_of, hang_of
from tests.simulation.mutations import FAILOVER_MUTATIONS, HANG_MUTATIONS, MUTATIONS

NUM_SEEDS = 10_000


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)

    found = (seed for seed in range(NUM_SEEDS) if simulate(schedule_of(seed)).violation is not None)

    assert next(found, None) is not None, f"no schedule below {NUM_SEEDS} shows: {MUTATIONS[name].__doc__}"


@pytest.mark.parametrize("name", FAILOVER_MUTATIONS)
def test_mutation_of_the_quorum_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = FAILOVER_MUTATIONS[name]
    mutation(monkeypatch)

    found = (seed for seed in range(NUM_SEEDS) if simulate(failover_of(seed)).violation is not None)

    assert next(found, None) is not None, f"no schedule below {NUM_SEEDS} shows: {mutation.__doc__}"


@pytest.mark.parametrize("name", HANG_MUTATIONS)
def test_mutation_of_who_is_hung_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = HANG_MUTATIONS[name]
    mutation(monkeypatch)

    found = (seed for seed in range(NUM_SEEDS) if simulate(hang_of(seed)).violation is not None)

    assert next(found, None) is not None, f"no schedule below {NUM_SEEDS} shows: {mutation.__doc__}"
