"""Find a schedule that shows each mutation: ``python -m tests.simulation.find_mutations``."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from tests.simulation.mutations import MUTATIONS
from tests.simulation.test_mutations import seeds_that_show


def find(which: tuple[str, str]) -> tuple[str, int]:
    """A schedule that shows this mutation of a family."""
    family, name = which
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[family][name](patch)
        return name, next(seeds_that_show(family, name))


def main() -> None:
    """Search for all of them, which takes minutes."""
    names = [(family, name) for family, mutations in MUTATIONS.items() for name in mutations]
    with multiprocessing.Pool(maxtasksperchild=1) as pool:
        found = dict(pool.imap_unordered(find, names, chunksize=1))
    path = Path(__file__).with_name("mutation_seeds.json")
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
