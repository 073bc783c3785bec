"""Find the first schedule that shows each mutation: ``python -m tests.simulation.find_mutations``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ef_common.testing.simulation import simulate
from ef_common.testing.simulation.schedule import FAMILIES
from tests.simulation.mutations import MUTATIONS
from tests.simulation.test_mutations import NUM_SEEDS


def main() -> None:
    """Search for all of them, which takes minutes."""
    found = {}
    for family, mutations in MUTATIONS.items():
        for name, mutation in mutations.items():
            with pytest.MonkeyPatch.context() as patch:
                mutation(patch)
                seeds = (s for s in range(NUM_SEEDS) if simulate(FAMILIES[family](s)).violation is not None)
                found[name] = next(seeds)
    path = Path(__file__).with_name("mutation_seeds.json")
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
