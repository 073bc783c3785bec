from __future__ import annotations

import pytest

from tests.mutants.catalogue import MUTANTS, Mutant
from tests.tiers.places import ROOT, guards_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_can_be_made_and_is_a_program(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text()
    assert source.count(mutant.old) == 1, f"{mutant.file} has changed: mend the catalogue"
    assert mutant.old != mutant.new
    compile(source.replace(mutant.old, mutant.new), mutant.file, "exec")
    assert guards_of([mutant.file])


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
