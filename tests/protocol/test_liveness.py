"""Whether a coordinator has listened all the time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ef_common.core.progress import Limits
from ef_common.protocol.liveness import Liveness
from tests.diagrams import cases, rows

TIMEOUT_S = 8.0
"""A sweep is due each second."""


def make() -> Liveness:
    return Liveness(TIMEOUT_S, Limits(), 0.0)


def slept() -> Liveness:
    liveness = make()
    liveness.sweep(5.0)
    return liveness


def sweeps(liveness: Liveness) -> float:
    """In time, until a heartbeat timeout has passed."""
    for second in range(6, 14):
        liveness.sweep(float(second))
    return 13.1


WITNESSES: dict[str, tuple[tuple[Callable[[], Liveness], float, Callable[[Liveness], float]], ...]] = {
    "attentive → absent": (
        (make, 1.0, lambda liveness: liveness.sweep(3.0) or 3.0),
        (make, 1.0, lambda liveness: 3.0),
    ),
    "absent → attentive": ((slept, 12.9, sweeps),),
}


def state(liveness: Liveness, now: float) -> str:
    return "attentive" if liveness.is_attentive(now) else "absent"


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(Liveness) == list(WITNESSES)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int) -> None:
    make_one, before, act = WITNESSES[row][case]
    liveness = make_one()
    shown = state(liveness, before)
    assert row == f"{shown} → {state(liveness, act(liveness))}"
