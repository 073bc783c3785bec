"""Workers come and go all the time."""

from __future__ import annotations

import random
import signal

import pytest

from ef_common.testing.harness import WorkerProcess
from tests.faults.conftest import TrainingJob, check_run
from tests.faults.hosts import ENOUGH

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_EVENTS = 18
STEPS_BETWEEN = 12
OPTIONS = {"length": 2403, "epochs": 3, "val_length": 53, "step_sleep_s": 0.01}
SMALLEST, LARGEST = 2, 5


class Churn:
    """Kills and starts workers by the dice."""

    def __init__(self, job: TrainingJob, seed: int) -> None:
        self._job, self._dice = job, random.Random(seed)
        self._options = {**OPTIONS, **job.patient}
        self.alive = job.start_world(3, job.train, self._options)
        self.killed: list[WorkerProcess] = []
        self.num_joined = 0

    def event(self) -> None:
        if len(self.alive) >= LARGEST:  # newcomers may take long
            self._job.wait_until(lambda events: len(self._living()) > SMALLEST)
        members = self._living()
        kinds = ["kill"] * (len(members) > SMALLEST) + ["join"] * (len(self.alive) < LARGEST)
        kinds += ["kill 2"] * (len(members) > SMALLEST + 1)
        kind = self._dice.choice(kinds)
        if kind == "join":
            self.alive.append(self._job.start(self._job.train, self._options))
            self.num_joined += 1
        else:
            for victim in self._dice.sample(members, 2 if kind == "kill 2" else 1):
                victim.kill()
                self.alive.remove(victim)
                self.killed.append(victim)

    def _living(self) -> list[WorkerProcess]:
        members = self.members()
        return [worker for worker in self.alive if worker in members]

    def members(self) -> set[WorkerProcess]:
        """Those of the newest view."""
        views = self._job.wait_for("view")
        newest = max(views, key=lambda view: view["generation"])
        return {self._job.by_id(member) for member in newest["members"]}


@pytest.mark.parametrize(
    ("host", "seed"),
    [("lightning", 1), ("lightning", 2), ("keras-tensorflow", 1), ("keras-torch", 2)],
    indirect=["host"],
    scope="module",
)
@pytest.mark.thorough
def test_churn_over_three_epochs_keeps_every_promise(job: TrainingJob, seed: int) -> None:
    churn = Churn(job, seed)
    for number in range(NUM_EVENTS):
        job.wait_for_step(STEPS_BETWEEN * (number + 1))
        churn.event()
    job.wait_for("epoch_end", epoch=2)
    job.wait_until(lambda events: churn.members() == set(churn.alive))
    (job.directory / ENOUGH).touch()
    assert all(worker.wait() == -signal.SIGKILL for worker in churn.killed)
    # The last joiners may find that they came too late: they end well, without a result.
    late = [w for w in churn.alive if w.wait() == 0 and not (job.results / f"{w.name}.json").exists()]
    assert all(worker in churn.alive[-2:] for worker in late)
    check_run(job, [worker for worker in churn.alive if worker not in late])
    assert len(churn.killed) >= 5
    assert churn.num_joined >= 5
    assert len(job.events("admitted")) > 0
    assert {event["epoch"] for event in job.events("epoch_end")} >= {0, 1, 2}
