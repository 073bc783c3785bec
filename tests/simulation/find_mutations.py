"""Find a schedule that shows each mutation: ``python -m tests.simulation.find_mutations``."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from ef_common.testing.simulation import simulate
from ef_common.testing.simulation.schedule import FAMILIES
from tests.simulation.mutations import MUTATIONS
from tests.simulation.test_mutations import NUM_SEEDS, SEEDS


def find(which: tuple[str, str]) -> tuple[str, int]:
    """Search from the schedule that has shown this mutation of a family before, and then from the first one."""
    family, name = which
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[family][name](patch)
        seeds = (SEEDS.get(name, 0), *range(NUM_SEEDS))
        return name, next(seed for seed in seeds if simulate(FAMILIES[family](seed)).violation is not None)


def main() -> None:
    """Search for all of them, which takes minutes."""
    names = [(family, name) for family, mutations in MUTATIONS.items() for name in mutations]
    with multiprocessing.Pool(maxtasksperchild=1) as pool:
        found = dict(pool.imap_unordered(find, names, chunksize=1))
    path = Path(__file__).with_name("mutation_seeds.json")
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
