"""What cannot be elastic raises, in all workers, and says what to write instead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ef_common.testing.harness import Job
from tests import warm
from tests.horovod_built import is_built
from tests.jax_installed import ON_JAX
from tests.keras.launch import call

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

REFUSED = [
    ("refuse_step_without_update", "UnsupportedError: the model's train_step has made no update", "apply_gradients"),
    ("refuse_replicas", "UnsupportedError: the model was made for several devices", "--nproc-per-node=2"),
    (
        "refuse_evaluation_that_is_stopped",
        "UnsupportedError: a callback has set model.stop_evaluating",
        "validation_steps=…",
    ),
    ("refuse_stateful_layers", "UnsupportedError: a layer with stateful=True", ". Received: "),
    ("pass_on_an_error_of_the_users", "the user's own", "own"),
]
LENGTHS = [
    ("refuse_endless_data", "UnsupportedError: the data have no end", "steps_per_epoch=…"),
    ("refuse_endless_validation", "UnsupportedError: the data have no end", "validation_steps=…"),
    ("refuse_endless_evaluation", "UnsupportedError: the data have no end", " steps=…"),
    ("refuse_data_that_ends_early", "UnsupportedError: the data have ended before the length", "assert_cardinality"),
]


@pytest.mark.parametrize(("case", "problem", "remedy"), REFUSED)
def test_refused_by_all_workers_with_a_remedy(tmp_path: Path, case: str, problem: str, remedy: str) -> None:
    check_that_all_refuse(tmp_path, case, problem, remedy)


@pytest.mark.parametrize(("case", "problem", "remedy"), LENGTHS)
def test_data_without_the_length_that_is_needed_are_refused(
    tmp_path: Path, case: str, problem: str, remedy: str
) -> None:
    check_that_all_refuse(tmp_path, case, problem, remedy)


def test_streams_that_differ_are_refused(tmp_path: Path) -> None:
    problem = "UsageError: the workers read different data at step 1"
    check_that_all_refuse(tmp_path, "refuse_streams_that_differ", problem, "set_random_seed")


@pytest.mark.skipif(not is_built("tensorflow"), reason="Horovod is not built: elasticflow horovod build")
def test_horovod_that_the_program_has_started_is_refused(tmp_path: Path) -> None:
    """Each worker would be alone in it, and train by itself."""
    problem = "UsageError: the program has called hvd.init()"
    check_that_all_refuse(tmp_path, "refuse_horovod_of_the_program", problem, "Remove hvd.init()")


def check_that_all_refuse(tmp_path: Path, case: str, problem: str, remedy: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["tensorflow"]) as job:
        workers = job.start_world(2, call, "tensorflow", case)
        messages = [worker.result() for worker in workers]
    own = [message for message in messages if message.startswith(problem)]
    assert own, messages
    assert all(remedy in message for message in own)
    assert all(problem in message for message in messages)  # the other one may have raised first, and ended the job


@pytest.mark.parametrize("backend", ["torch", "tensorflow", ON_JAX])
def test_update_with_an_optimizer_of_a_layer_is_refused_unless_the_model_holds_it_too(
    tmp_path: Path, backend: str
) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        *refused, held, also_held = job.start(call, backend, "refuse_optimizer_of_a_model_within").result()
    assert len(refused) == 3
    for message in refused:
        assert "with an optimizer of a layer or model within it" in message
        assert message.startswith("UnsupportedError: the model's train_step")
        assert message.endswith("self.second_optimizer = self.inner.optimizer. Received: within")
    assert held == also_held == "nothing was raised"


@pytest.mark.parametrize("coordinator", [True, False])
def test_layers_that_several_workers_cannot_have_are_refused_where_several_can_come(
    tmp_path: Path, coordinator: bool
) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["tensorflow"]) as job:
        found = job.start(call, "tensorflow", "refuse_layers", coordinator).result()
    nothing = "nothing was raised"
    assert found["in passes"].startswith("UnsupportedError: a layer with stateful=True")
    assert all(f"{place}_lstm" in found["in passes"] for place in ("forward", "backward"))
    assert found["stateful"].startswith("UnsupportedError: a layer with stateful=True" if coordinator else nothing)
    assert found["evaluated"]
    synchronized = "UnsupportedError: BatchNormalization(synchronized=True)"
    assert found["synchronized"].startswith(synchronized if coordinator else nothing)
    assert found["synchronized"].endswith("Received: shared" if coordinator else nothing)
    assert found["frozen"] == nothing


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_exception_of_one_worker_ends_the_others(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        workers = job.start_world(2, call, backend, "raise_in_one_worker")
        raised, told = sorted((worker.result() for worker in workers), key=lambda text: text.startswith("JobFailed"))
    assert raised == "the user's own"
    assert told.startswith("JobFailed: worker ")
    assert "raised ArithmeticError: the user's own" in told


GLOBAL_BATCHES = [
    ("UsageError: expected a positive number", "global_batch_size=0"),
    ("UsageError: a global batch must have a sample for each worker", "2 workers"),
    ("UsageError: the weights cannot be independent", "global_batch_size=…"),
    ("UsageError: deterministic training cuts the global batch", "global_batch_size=20, batch_size=8"),
    ("UsageError: the global batch has two sizes", "dataset(global_batch_size=16)"),
    ("UsageError: these data come in batches", "8 samples in the first batch"),
    ("UnsupportedError: global_batch_size says", "Leave out gradient_accumulation_steps"),
    ("UnsupportedError: a step on a batch that workers share is made of several passes", "steps_per_execution"),
    ("UnsupportedError: the model draws random numbers", "keras.random"),
    ("UnsupportedError: a step on a batch that workers share ends in one update", "2 optimizers"),
    ("UnsupportedError: the model changes variables other than by the update", "/kernel"),
    ("UnsupportedError: the model changes variables other than by the update", "/num"),
    ("UnsupportedError: workers share the samples of each batch, and these batches cannot be cut", "(64,), (8,)]"),
]


def test_global_batches_that_cannot_be_are_refused_by_all_workers(tmp_path: Path) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["tensorflow"]) as job:
        environ = {"TF_NUM_INTRAOP_THREADS": "1"}
        workers = [
            job.start(
                call,
                "tensorflow",
                "refuse_global_batches",
                node="founders",
                environ={"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank), **environ},
            )
            for rank in range(2)
        ]
        results = [worker.result() for worker in workers]
    for messages in results:
        for message, (problem, remedy) in zip(messages, GLOBAL_BATCHES, strict=True):
            assert message.startswith(problem), message
            assert remedy in message


def test_deterministic_training_with_several_threads_is_refused_naming_the_setting(tmp_path: Path) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["tensorflow"]) as job:
        message = job.start(call, "tensorflow", "refuse_threads", False).result()
    assert message.startswith("UsageError: deterministic training computes an operation in one thread")
    assert "TF_NUM_INTRAOP_THREADS=1" in message


def test_backend_that_cannot_be_elastic_is_refused_naming_those_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    keras = pytest.importorskip("keras")
    from ef_common.errors import UnsupportedError
    from ef_keras import backends

    monkeypatch.setattr(keras.config, "backend", lambda: "openvino")
    with pytest.raises(UnsupportedError, match=r"tensorflow, torch and jax backends.* Received: openvino"):
        backends.engine(None)


def test_gloo_is_what_fits_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    keras = pytest.importorskip("keras")
    from ef_keras import backends

    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    assert [backends.engine(backend) for backend in (None, "gloo")] == ["gloo", "gloo"]


def test_what_jax_cannot_do_is_refused_naming_the_backends_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    keras = pytest.importorskip("keras")
    from ef_common.errors import UnsupportedError
    from ef_keras import backends, callbacks

    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    for refused in (lambda: callbacks(deterministic=True), backends.train_step_of):
        with pytest.raises(UnsupportedError, match=r"KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch.* Received: jax"):
            refused()


@pytest.mark.parametrize("built", [True, False])
def test_gloo_is_what_fits_tensorflow_without_a_horovod_that_was_built_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built: bool
) -> None:
    """The Python code of Horovod for TensorFlow is there in both cases."""
    keras = pytest.importorskip("keras")
    pytest.importorskip("torch")
    from ef_keras import backends

    for package in ("horovod", "horovod/tensorflow"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    if built:
        (tmp_path / "horovod/tensorflow/mpi_lib.so").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(keras.config, "backend", lambda: "tensorflow")
    assert backends.engine(None) == ("horovod-tensorflow" if built else "gloo")


def test_nccl_is_what_fits_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    keras = pytest.importorskip("keras")
    from ef_keras import backends

    monkeypatch.setattr(keras.config, "backend", lambda: "torch")
    assert [backends.engine(backend) for backend in (None, "nccl", "gloo")] == ["nccl", "nccl", "gloo"]


def test_nccl_under_tensorflow_is_refused_naming_the_backend_that_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    keras = pytest.importorskip("keras")
    from ef_common.errors import UsageError
    from ef_keras import backends

    monkeypatch.setattr(keras.config, "backend", lambda: "tensorflow")
    with pytest.raises(UsageError, match=r"Expected: KERAS_BACKEND=torch\. Received: tensorflow"):
        backends.engine("nccl")


_WITHOUT_TENSORFLOW = """
import os, sys
sys.modules["tensorflow"] = None
os.environ["KERAS_HOME"] = sys.argv[1]
import ef_keras
"""


def test_backend_that_is_not_installed_is_refused_with_what_to_set(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TENSORFLOW, str(tmp_path)], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ModuleNotFoundError: Keras's backend is tensorflow, which is not installed. Install it (pip"
    )
    assert "KERAS_BACKEND=torch" in last
