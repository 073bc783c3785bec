"""Workers that are told to go: they leave at a boundary, and nothing is lost, returned or made again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ef_common.core.membership import Settings
from ef_common.launch.environment import COORDINATOR, GRACE, NOTICE
from ef_common.launch.notices import OUT_OF_TIME
from ef_common.testing.harness import WorkerProcess
from tests.faults.conftest import TrainingJob, check_gentle, check_run, check_saved, saved, struck
from tests.faults.hosts import ENOUGH, hosted, train_lightning
from tests.faults.test_kill import start_with_fault, view_sizes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

Finish = Callable[..., list[dict[str, Any]]]
PATIENT = {"epochs": 1000, "length": 403, "stop": ENOUGH}
"""Options of a training that ends when the test has seen what it waits for."""


def burn() -> None:
    """Take what is left of the processors."""
    while True:
        pass


@pytest.fixture
def load(job: TrainingJob) -> None:
    for _ in range(os.cpu_count() or 1):
        job.start(burn, node="load")


# ---------------------------------------------------------------- one of several


@hosted("lightning", "keras-tensorflow")
def test_worker_with_sigterm_leaves_and_the_others_go_on(job: TrainingJob, finish: Finish, load: None) -> None:
    victim, *others = job.start_world(3, job.train, PATIENT)
    job.wait_for_step(3)
    victim.kill(signal.SIGTERM)
    assert victim.wait() == 0
    job.wait_for("view", 2, world_size=2)
    finish(others)
    assert [event["what"] for event in victim.events("notice")] == ["SIGTERM"]
    assert view_sizes(job) == [3, 2]
    check_gentle(job)


def test_two_workers_with_sigusr1_leave_at_once(job: TrainingJob, finish: Finish) -> None:
    *victims, survivor = job.start_world(3, job.train, PATIENT)
    job.wait_for_step(3)
    for victim in victims:
        victim.kill(signal.SIGUSR1)
    assert [victim.wait() for victim in victims] == [0, 0]
    finish([survivor])
    assert [event["what"] for event in job.events("notice")] == ["SIGUSR1"] * 2
    check_gentle(job)


@pytest.mark.thorough
def test_ten_of_ten_workers_that_leave_under_load_lose_nothing(job: TrainingJob, finish: Finish, load: None) -> None:
    dice = random.Random(10)
    here = job.start_world(3, job.train, PATIENT)
    job.wait_for_step(2)
    for number in (1, 2, 1, 2, 1, 2, 1):
        generation = job.generation
        here += [job.start(job.train, PATIENT) for _ in range(number)]
        job.view(3 + number, after=generation)
        victims = dice.sample(here, number)
        for victim in victims:
            victim.kill(dice.choice((signal.SIGTERM, signal.SIGUSR1)))
        assert [victim.wait() for victim in victims] == [0] * number
        here = [worker for worker in here if worker not in victims]
    finish(here)
    assert len(job.events("notice")) == len(job.events("admitted")) == 10
    check_gentle(job)


def test_whole_process_group_with_data_workers_is_signalled_twice(job: TrainingJob, finish: Finish) -> None:
    victim, other = job.start_world(2, job.train, {**PATIENT, "num_workers": 2})
    job.wait_for_step(3)
    os.killpg(victim.pid, signal.SIGTERM)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(victim.pid, signal.SIGTERM)
    assert victim.wait() == 0
    finish([other])
    check_gentle(job)


# ---------------------------------------------------------------- places that are no boundary


@hosted("lightning", "keras-tensorflow")
def test_notice_in_a_validation_is_heeded_after_it(job: TrainingJob, finish: Finish) -> None:
    options = {**PATIENT, "length": 53, "val_length": 101, "limits": {"num_sanity_val_steps": 0}}
    fault = {"where": "validation", "step": 1, "signal": int(signal.SIGTERM)}
    victim, others = start_with_fault(job, options, fault)
    assert victim.wait() == 0
    finish(others)
    assert struck(job, "validation")
    first = job.events("evaluation")[0]
    assert len(first["shares"]) == 3
    check_gentle(job)


def test_notice_in_a_recovery_is_heeded_after_it(job: TrainingJob, finish: Finish) -> None:
    fault = {"where": "build", "generation": 2, "signal": int(signal.SIGTERM)}
    told, (lost, other) = start_with_fault(job, PATIENT, fault)
    job.wait_for_step(3)
    lost.kill()
    assert told.wait() == 0
    finish([other])
    assert struck(job, "build")


@pytest.mark.parametrize("fault", [{"where": "before_join"}, {"where": "transfer", "index": 1}])
def test_notice_to_a_newcomer_is_heeded(job: TrainingJob, finish: Finish, fault: dict[str, Any]) -> None:
    workers = job.start_world(2, job.train, PATIENT)
    job.wait_for_step(2)
    newcomer = job.start(job.train, PATIENT, {**fault, "signal": int(signal.SIGTERM)})
    assert newcomer.wait() == 0
    finish(workers)
    assert struck(job, fault["where"])
    check_gentle(job)


def test_notice_to_a_newcomer_that_warms_up_is_heeded(job: TrainingJob, finish: Finish) -> None:
    workers = job.start_world(2, job.train, PATIENT)
    job.wait_for_step(2)
    newcomer = job.start(job.train, PATIENT)
    job.wait_for("start", pid=newcomer.pid)
    newcomer.kill(signal.SIGTERM)
    assert newcomer.wait() == 0
    finish(workers)
    check_gentle(job)


def test_notice_before_the_first_view_is_heeded(make_job: Callable[..., TrainingJob]) -> None:
    job = make_job(settings=Settings(min_nodes=2, last_call_s=0.0))
    (worker,) = job.start_world(1, job.train, PATIENT)
    job.wait_for("start")
    worker.kill(signal.SIGTERM)
    assert worker.wait() == 0


def test_notice_to_one_that_waits_for_more_nodes_is_heeded(make_job: Callable[..., TrainingJob]) -> None:
    job = make_job(settings=Settings(min_nodes=2, last_call_s=0.0))
    first, second = [job.start(job.train, {**PATIENT, "saves": True}) for _ in range(2)]
    job.wait_for_step(2)
    second.kill()
    job.wait_for("view", world_size=1)
    first.kill(signal.SIGTERM)
    assert first.wait() == 0
    check_saved(job)


# ---------------------------------------------------------------- no time


@pytest.mark.parametrize("again", [False, True])
def test_worker_that_comes_to_no_boundary_ends_at_once(job: TrainingJob, finish: Finish, again: bool) -> None:
    """After the grace time, or at the second SIGTERM; the others survive it as any loss."""
    founder = {"LOCAL_WORLD_SIZE": "2"}
    grace = {GRACE: "1000" if again else "0.2"}
    slow = {**PATIENT, "step_sleep_s": 100.0}
    environ = [{**founder, **grace, "LOCAL_RANK": "0"}, {**founder, "LOCAL_RANK": "1"}]
    victim, other = [
        job.start(job.train, options, node="founders", environ=variables)
        for options, variables in zip((slow, PATIENT), environ, strict=True)
    ]
    job.view(2)
    victim.kill(signal.SIGTERM)
    job.wait_for("notice")
    while again and victim.alive:
        with contextlib.suppress(ProcessLookupError):  # it may end in between
            victim.kill(signal.SIGTERM)
        time.sleep(0.1)
    assert victim.wait() == (-signal.SIGTERM if again else OUT_OF_TIME)
    finish([other])


# ---------------------------------------------------------------- all of them


@hosted("lightning", "keras-torch")
def test_all_with_sigterm_leave_and_one_saves(job: TrainingJob) -> None:
    workers = job.start_world(3, job.train, {**PATIENT, "saves": True})
    job.wait_for_step(3)
    for worker in workers:
        worker.kill(signal.SIGTERM)
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    check_saved(job)
    check_gentle(job)


@pytest.mark.thorough
def test_all_one_after_the_other_leave_and_the_last_one_saves(job: TrainingJob) -> None:
    workers = job.start_world(3, job.train, {**PATIENT, "saves": True})
    job.wait_for_step(3)
    for worker in workers:
        assert saved(job) == []
        worker.kill(signal.SIGTERM)
        assert worker.wait() == 0
    check_saved(job)
    check_gentle(job)


@pytest.mark.parametrize("saves", [True, False])
def test_worker_without_a_job_heeds_notices_only_if_it_can_save(job: TrainingJob, saves: bool) -> None:
    worker = job.start(train_alone, {**PATIENT, "saves": saves})
    job.wait_for_step(3)
    worker.kill(signal.SIGTERM)
    worker.wait()
    assert len(saved(job)) == len(job.events("notice")) == int(saves)


def train_alone(options: dict[str, Any]) -> Any:
    del os.environ[COORDINATOR]
    return train_lightning(options)


# ---------------------------------------------------------------- notices that are asked for


class Metadata(ThreadingHTTPServer):
    """A server that answers as clouds do."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.says: str | None = None
        self.asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/instance/preempted"


class Answer(BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        self.server.asked += 1
        self.send_response(404 if self.server.says is None else 200)
        self.end_headers()
        self.wfile.write((self.server.says or "no such thing").encode())

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def start_asking(job: TrainingJob, url: str) -> tuple[WorkerProcess, WorkerProcess]:
    """Two workers, of which the first asks for notices."""
    founder = {"LOCAL_WORLD_SIZE": "2"}
    first, second = [
        job.start(job.train, PATIENT, node="founders", environ={**founder, "LOCAL_RANK": str(rank), NOTICE: url})
        for rank, url in enumerate((url, ""))
    ]
    job.wait_for_step(2)
    return first, second


def test_notice_by_a_file(job: TrainingJob, finish: Finish) -> None:
    path = job.directory / "go away"
    victim, other = start_asking(job, path.as_uri())
    path.touch()
    assert victim.wait() == 0
    finish([other])
    assert victim.events("notice") == job.events("notice")
    check_gentle(job)


def test_notice_by_a_metadata_server(job: TrainingJob, finish: Finish, metadata: Metadata) -> None:
    victim, other = start_asking(job, metadata.url)
    while not metadata.asked:
        time.sleep(0.01)
    assert not job.events("notice")
    metadata.says = "TERMINATE_ON_HOST_MAINTENANCE"
    assert victim.wait() == 0
    finish([other])
    (notice,) = job.events("notice")
    assert notice["what"] == f"{metadata.url} says TERMINATE_ON_HOST_MAINTENANCE"
    check_gentle(job)


def test_harness_of_these_tests_sees_a_loss(job: TrainingJob, finish: Finish) -> None:
    victim, *others = job.start_world(3, job.train, PATIENT)
    job.wait_for_step(3)
    victim.kill()
    job.wait_for("view", 2, world_size=2)
    check_run(job, others)
    with pytest.raises(AssertionError):
        check_gentle(job)
