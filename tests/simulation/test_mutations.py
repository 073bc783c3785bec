"""A simulator that finds nothing proves nothing: each mutation of the rules must be found."""

from __future__ import annotations

import pytest

from ef_common.testing.simulation import simulate
from ef_common.testing.simulation.schedule import FAMILIES
from tests.simulation.mutations import MUTATIONS

NUM_SEEDS = 10_000


@pytest.mark.parametrize(("family", "name"), [(family, name) for family in MUTATIONS for name in MUTATIONS[family]])
def test_mutation_is_found(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = MUTATIONS[family][name]
    mutation(monkeypatch)

    found = (seed for seed in range(NUM_SEEDS) if simulate(FAMILIES[family](seed)).violation is not None)

    assert next(found, None) is not None, f"no schedule below {NUM_SEEDS} shows: {mutation.__doc__}"
