"""What cannot be elastic raises, in all workers, and says what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from ef_common.testing.harness import Job
from tests.keras.launch import call

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

CASES = [
    ("refuse_generator", "UnsupportedError: a bare generator", "from_generator"),
    ("refuse_unknown_length", "UnsupportedError: the length of the data is not known", "assert_cardinality"),
    ("refuse_step_without_update", "UnsupportedError: the model's train_step has made no update", "apply_gradients"),
    ("refuse_streams_that_differ", "UsageError: the workers read different data at step 1", "set_random_seed"),
    ("refuse_data_that_ends_early", "UnsupportedError: the data have ended before the epoch has", ".repeat()"),
    ("pass_on_an_error_of_the_users", "the user's own", "own"),
]


@pytest.mark.parametrize(("case", "problem", "remedy"), CASES)
def test_refused_by_all_workers_with_a_remedy(tmp_path: Path, case: str, problem: str, remedy: str) -> None:
    with Job(tmp_path / "run", preload=["tests.keras.on_tensorflow"]) as job:
        workers = job.start_world(2, call, "tensorflow", case)
        messages = [worker.result() for worker in workers]
    for message in messages:
        assert message.startswith(problem), message
        assert remedy in message


def test_backend_that_cannot_be_elastic_is_refused_naming_those_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    keras = pytest.importorskip("keras")
    from ef_common.errors import UnsupportedError
    from ef_keras import backends

    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(UnsupportedError, match=r"KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch.* Received: jax"):
        backends.engine(None)
