"""A simulator that finds nothing proves nothing: each mutation of the rules must be found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ef_common.testing.simulation import simulate
from ef_common.testing.simulation.schedule import FAMILIES
from tests.simulation.mutations import MUTATIONS

NUM_SEEDS = 10_000
SEEDS = json.loads(Path(__file__).with_name("mutation_seeds.json").read_text())
"""Where each was found, so that nobody has to search for it each day. `python -m tests.simulation.find_mutations`
writes them anew; where one is out of date, the test searches."""


def seeds_that_show(family: str, name: str) -> Iterator[int]:
    """Schedules that show a mutation which has been made: first the one that has shown it before, if it still does."""
    seeds = (SEEDS.get(name, 0), *range(NUM_SEEDS))
    return (seed for seed in seeds if simulate(FAMILIES[family](seed)).violation is not None)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "name"), [(family, name) for family in MUTATIONS for name in MUTATIONS[family]])
def test_mutation_is_found(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = MUTATIONS[family][name]
    mutation(monkeypatch)

    assert next(seeds_that_show(family, name), None) is not None, (
        f"no schedule below {NUM_SEEDS} shows: {mutation.__doc__}"
    )
