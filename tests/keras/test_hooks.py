"""The private parts of Keras are where their list says, and a release that moves one is refused at the start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ef_common.testing.harness import Job
from tests import sources, warm
from tests.jax_installed import ON_JAX
from tests.keras.launch import call

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


@pytest.mark.parametrize("backend", ["tensorflow", "torch", ON_JAX])
def test_private_places_of_keras_are_where_they_were(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        found = job.start(call, backend, "look_at_hooks", False).result()
    assert found["list"]
    assert found["iterators"]
    assert found["sizes"] == [40, 8, True]
    assert found["batch"] == [[5, 12], [5]]
    assert found["epochs"] == found["updates"] == 2  # from epoch 1 on, one batch in each
    assert found["statistics"] == [[4], [4]]
    assert found["frozen"] == [[[12]], [[1, 2]], [], [], *([[[3]]] if backend == "jax" else [])]
    assert found["quantized"] == [[]]
    assert [shape for shape in found["state"] if shape == [12, 4]] == [[12, 4]]
    assert found["optimizers"] == 1
    assert found["settings"] == [[0.2, 0.5], 0.1, 0.9]
    assert found["applied"] == found["updates"]
    assert found["momenta"] == [[12, 4], [4], [4], [4]]
    assert found["seeds"] == [[2], [2]]  # of Dropout, and everybody's
    assert found["seed"] == [None, None, 5]
    assert found["step"]
    assert found["moved"] == found["unseen"] == found["users"] == []
    assert tuple(found["releases"]) == sources.releases_of("keras")
    assert_all_are_listed(set(found["parts"]))
    fields = ["_batches_seen_since_last_saving", "_last_batch_seen", "best"]
    assert found["remembered"] == ["x.keras", False, 0.5, fields]
    assert found["remembered_by_orbax"] == {
        "best": 0.5,
        "_batches_seen_since_last_saving": 3,
        "_last_batch_seen": 7,
        "_total_batches_seen": 27,
    }


def assert_all_are_listed(parts: set[str]) -> None:
    """Private parts are touched in few files, and all that are touched are parts in the list."""
    files = [path for path in (sources.ROOT / "ef_keras").glob("*.py") if path.name != "probe.py"]
    # Python's; TensorFlow's, which are put back or read if they are there; and what operations of a graph of its say of
    # places.
    others = {"_getframe", "_seed", "_rng", "_class", "_reshuffle_each_iteration"}
    uses = {path.name: sources.private_uses(path) - others for path in files}
    assert {name: found - parts for name, found in uses.items() if found - parts} == {}
    assert {name for name, found in uses.items() if found} == {
        "hooks.py",
        "compensation.py",
        "memories.py",
        "program.py",
    }
    assert [path.name for path in files if re.search(r"(from|import) keras\.src", path.read_text())] == ["hooks.py"]


@pytest.mark.parametrize("backend", ["tensorflow", "torch", ON_JAX])
def test_keras_that_has_moved_or_changed_a_part_is_refused_in_one_sentence(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        assert job.start(call, backend, "move_parts", False).result() == []


@pytest.mark.parametrize("coordinator", [True, False])
@pytest.mark.parametrize("backend", ["tensorflow", "torch", ON_JAX])
def test_nothing_is_trained_with_a_keras_that_has_moved_a_part(tmp_path: Path, backend: str, coordinator: bool) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        fit, evaluate, same = job.start(call, backend, "refuse_keras", coordinator).result()
    assert fit == evaluate
    assert fit.startswith(
        "UnsupportedError: keras 3.99 has no `PyDatasetAdapter._standardize_batch`, which ElasticFlow"
    )
    assert fit.endswith(", or a newer ElasticFlow")
    assert same


@pytest.mark.parametrize("backend", ["tensorflow", "torch", ON_JAX])
def test_worker_that_becomes_rank_0_knows_which_model_was_the_best(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        wrote = job.start(call, backend, "become_rank_zero").result()
    assert wrote == {"another is rank 0": False, "worse": False, "better": True}


@pytest.mark.parametrize("backend", ["torch", pytest.param("tensorflow", marks=pytest.mark.thorough)])
def test_callbacks_of_a_worker_that_becomes_rank_0_begin_what_has_begun(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        found = job.start(call, backend, "take_over").result()
    assert found == {
        "weights are kept": True,
        "begins at": None,
        "backup": {"epoch": 3, "batch": 5},
        "saved": ["4-6.weights.h5"],
        "seen": [["on_train_begin"], ["on_epoch_begin", 3], ["on_test_begin"], ["on_test_end"]],
        "best": 0.25,
    }


@pytest.mark.parametrize("backend", ["tensorflow", "torch", ON_JAX])
def test_progress_is_shown_by_rank_0_alone(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        shown = {
            worker.result(): worker.output.read_text() for worker in job.start_world(2, call, backend, "fit_with_a_bar")
        }
    assert re.findall(r"Epoch ./.", shown[0]) == ["Epoch 1/2", "Epoch 2/2"]
    assert len(re.findall(r"accuracy: ", shown[0])) == 3
    assert not re.search(r"Epoch|accuracy: ", shown[1])


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_exception_that_leaves_a_fit_is_told_once(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        found = job.start(call, backend, "guard_fit").result()
        told = [event["message"] for event in job.events("fault")]
    quiet = {name: found.pop(name) for name in ("caught", "leaves", "well")}
    assert quiet == {"caught": ["None", [], []], "leaves": ["0", [], []], "well": ["None", [], []]}
    for name, (raised, same, left) in found.items():
        assert f"in {name.replace('hand-made', 'on_epoch_begin')}" in raised, (name, raised)
        assert (same, left) == ([True], []), name
    assert len(told) == len(found)


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=pytest.mark.thorough), "torch", ON_JAX])
def test_threads_that_read_ahead_end_with_a_fit_that_raises(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        found = job.start(call, backend, "raise_while_data_are_read_ahead").result()
    expected = [True, 0, "the user's own"]
    assert found == {"Fails": expected, "FailsInEvaluation": expected}


@pytest.mark.parametrize("backend", ["tensorflow", "torch", ON_JAX])
def test_without_a_job_nothing_of_keras_is_touched(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        job_dir = job.directory
        worker = job.start(call, backend, "train_alone", False, environ={"ELASTICFLOW_RUN_DIR": ""})
        found = worker.result()
        assert not (job_dir / "events").exists()
    assert found["same"]
    assert found["function"].startswith("keras.")
    assert not found["apply"]


@pytest.mark.thorough
def test_functions_that_xla_compiles_are_keras_own_in_evaluations_and_after_the_fit(tmp_path: Path) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["tensorflow"]) as job:
        found = job.start(call, "tensorflow", "keep_xla").result()
    for made in found.values():
        first, *steps, last = [compiled for kind, compiled in made["fit"] if kind == "train"]
        assert first is last is True  # Keras's own, before ElasticFlow comes and after it has gone
        assert set(steps) == {False}  # what XLA compiles is made of these
        assert [compiled for kind, compiled in made["fit"] if kind == "test"] == [True]
        assert made["then"] == []  # the next fit of plain Keras has what it needs
        assert made["model"] is True


@pytest.mark.parametrize("backend", ["tensorflow", "torch", ON_JAX])
def test_world_of_one_with_a_log_passes_its_audit(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        found = job.start(call, backend, "train_alone_with_a_log", False).result()
        assert found["clean"]
        assert found["saved"]
        job.audit()


@pytest.mark.parametrize("backend", ["tensorflow", "torch", ON_JAX])
def test_global_batch_without_a_job_gives_what_plain_keras_gives(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        worker = job.start(call, backend, "train_global_alone", False, environ={"ELASTICFLOW_RUN_DIR": ""})
        found = worker.result()
    assert found["off"] < 2e-5
    assert found["steps"] == [14, 14]
    assert found["clean"]
