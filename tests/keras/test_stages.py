"""A step on JAX is cut where it calls Python, and nothing else of it changes."""

from __future__ import annotations

from typing import Any

import pytest

from ef_common.testing.harness import Job
from tests import warm
from tests.jax_installed import needs_jax
from tests.keras.launch import call_alone

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300), needs_jax]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with Job(tmp_path_factory.mktemp("jax") / "run", preload=warm.KERAS["jax"], guard_s=200.0) as job:
        results: dict[str, Any] = job.start(call_alone, "staged", "jax", "run_all").result()
    return results


def test_update_sees_what_the_call_before_it_has_changed(found: dict[str, Any]) -> None:
    # momentum 8 is halved by the call, and by the step: 2, with half of the gradient 4 and the shift of 1.
    assert found["cut"]["norms"] == [2.0 - 5.0, -3.0 - (5.0 / 4 + 1.0)]
    assert found["cut"]["held"] == [-3.0 - 2.25, 2.25]
    assert found["cut"]["told"] == [[8.0], [4.0], [-6.0], [2.0]]


def test_update_within_control_flow_is_refused_naming_what_to_do(found: dict[str, Any]) -> None:
    assert len(found["refused"]) == 2
    assert all("Call self.optimizer.stateless_apply(…) in train_step itself" in told for told in found["refused"])


def test_fit_between_two_of_plain_keras_leaves_nothing_and_gives_what_it_gives(found: dict[str, Any]) -> None:
    plain = found["plain"]
    assert plain["off"] < 1e-5
    assert plain["sizes"] < 1e-5
    assert plain["updates"] == 15
    assert plain["left"] == []
