"""A step that is compiled is cut where it calls Python, and nothing else of it changes."""

from __future__ import annotations

from typing import Any

import pytest

from ef_common.testing.harness import Job
from tests import warm
from tests.jax_installed import needs_jax
from tests.keras.launch import call_alone

pytestmark = [pytest.mark.processes, pytest.mark.thorough, pytest.mark.timeout(530)]
ON_JAX = pytest.param("jax", marks=needs_jax)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    backend = getattr(request, "param", "tensorflow")
    with Job(tmp_path_factory.mktemp(backend) / "run", preload=warm.KERAS[backend], guard_s=500.0) as job:
        worker = job.start(call_alone, f"staged_{backend}", backend, "run_all")
        results: dict[str, Any] = worker.result()
        return {**results, "output": worker.output.read_text()}


on_each = pytest.mark.parametrize("found", ["tensorflow", ON_JAX], indirect=True, scope="module")
on_jax = pytest.mark.parametrize("found", [ON_JAX], indirect=True, scope="module")
on_tensorflow = pytest.mark.parametrize("found", ["tensorflow"], indirect=True, scope="module")


@on_each
def test_update_sees_what_the_call_before_it_has_changed(found: dict[str, Any]) -> None:
    # momentum 8 is halved by the call, and by the step: 2, with half of the gradient 4 and the shift of 1.
    assert found["cut"]["norms"] == [2.0 - 5.0, -3.0 - (5.0 / 4 + 1.0)]
    assert found["cut"]["held"] == [-3.0 - 2.25, 2.25]
    assert found["cut"]["told"] == [[8.0], [4.0], [-6.0], [2.0]]


@on_jax
def test_update_within_control_flow_is_refused_naming_what_to_do(found: dict[str, Any]) -> None:
    assert len(found["refused"]) == 2
    assert all("Call self.optimizer.stateless_apply(…) in train_step itself" in told for told in found["refused"])


@on_jax
def test_interrupt_within_a_callback_of_the_step_stays_one(found: dict[str, Any]) -> None:
    failed, interrupted = found["raised"]
    assert interrupted == "KeyboardInterrupt" != failed


@on_jax
def test_fit_between_two_of_plain_keras_leaves_nothing_and_gives_what_it_gives(found: dict[str, Any]) -> None:
    plain = found["plain"]
    assert plain["off"] < 1e-5
    assert plain["sizes"] < 1e-5
    assert plain["updates"] == 15
    assert plain["left"] == []


@on_tensorflow
def test_update_within_a_function_or_a_condition_is_no_place_to_cut(found: dict[str, Any]) -> None:
    *within, kept = found["refused"]
    assert len(within) == 2
    assert all("within a function, a condition or a loop" in told for told in within)
    assert "what a loop of the step keeps" in kept


@on_tensorflow
def test_batches_of_the_same_shapes_with_other_names_are_steps_of_their_own(found: dict[str, Any]) -> None:
    assert found["named"] == [3.0, -3.0, 3.0]


@on_tensorflow
def test_steps_of_many_shapes_are_kept_up_to_a_number(found: dict[str, Any]) -> None:
    assert found["many"] == {"sums": [float(size) for size in (*range(1, 21), 1)], "kept": 16}


@on_tensorflow
@pytest.mark.parametrize(("kind", "updates"), [("plain", 36), ("function", 12)])
def test_fit_between_two_of_plain_keras_that_xla_compiles_gives_what_it_gives(
    found: dict[str, Any], kind: str, updates: int
) -> None:
    assert found[kind]["off"] < 1e-4
    assert found[kind]["logs"] < 1e-4
    assert found[kind]["updates"] == updates
    assert found[kind]["left"] == []
    assert found["output"].count("not compiled by XLA") == 1  # where a graph of its own is within the step


@on_tensorflow
def test_what_xla_cannot_compile_raises_as_in_plain_keras(found: dict[str, Any]) -> None:
    """So XLA compiles both parts of a step."""
    assert found["not_compiled"] == ["EagerPyFunc", "", "EagerPyFunc", ""]
