"""Jobs that choose their size, and have stragglers replaced: with `elasticflow run`, and with a command."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ef_common.core.membership import Settings
from ef_common.core.stragglers import Pacing
from ef_common.launch import environment
from tests.faults.batches import SMALL, SmallAtFirst
from tests.faults.conftest import TrainingJob, check_gentle, check_run
from tests.faults.hosts import ENOUGH, in_each_framework, in_each_framework_but_jax
from tests.faults.throttles import EXTRA_S, SLOW
from tests.launch.test_run import Launched, elasticflow, script

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

STEP_S = 0.8
"""Long enough for a machine with much else to do: what a step takes besides is small against it."""
EVERY = 10
SETTINGS = f"max=4,policy=throughput,threshold=0.5,every_steps={EVERY}"
QUICK = Pacing(smooth_s=3.0, after_s=3.0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(*arguments: str, cap: float = 0.0, **environ: str) -> Launched:
        """A job in which no more than `cap` workers have enough of what all of them need."""
        launched = Launched(tmp_path / "run")
        per_s = cap / STEP_S
        options = script(length=100_003, throttled=True, step_sleep_s=STEP_S, shared_per_s=per_s)
        launched.start(*arguments, *options, **environ)
        started.append(launched)
        return launched

    yield start
    for launched in started:
        launched.end()


def decisions(job: Any) -> list[tuple[int, int]]:
    return [(event["nodes"], event["wanted"]) for event in job.events("autoscale")]


def finish(job: Launched) -> str:
    (job.directory / ENOUGH).touch()
    assert job.wait() == 0
    job.audit()
    return job.output.read_text()


def wait_for_steps(job: Any, number: int) -> None:
    job.wait_for_step(max((event["step"] for event in job.events("step")), default=0) + number)


@pytest.mark.thorough
def test_job_finds_the_best_size_and_stays(run: Callable[..., Launched]) -> None:
    job = run("--nproc-per-node=1", "--nnodes=1:4", f"--autoscale={SETTINGS}", cap=2.0)
    job.wait_until(lambda _: (made := decisions(job)) and len(made) > 1 and made[-1][1] == 2, "the way back to 2")
    job.wait_until(lambda _: job.events("view")[-1]["world_size"] == 2, "2 workers")
    made = decisions(job)
    assert len(made) <= 3
    wait_for_steps(job, 3 * EVERY)
    assert decisions(job) == made
    known = {event["nodes"]: event["samples_per_s"] for event in job.events("throughput")}
    assert known[2] > 1.5 * known[1]
    status, text = elasticflow("status", "--once", str(job.directory))
    assert status == 0
    assert "1 node: " in text
    assert f"the job wants 2 nodes in place of {made[-1][0]}: " in text
    text = finish(job)
    assert text.count("the job wants ") == len(made)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cap", range(1, 7))
def test_job_whose_resource_is_enough_for_some_workers_finds_their_number(
    run: Callable[..., Launched], cap: int
) -> None:
    job = run("--nproc-per-node=1", "--nnodes=1:6", f"--autoscale=max=6,every_steps={EVERY}", cap=float(cap))
    job.wait_for("autoscale")
    made: list[tuple[int, int]] = []
    while made != decisions(job) or job.events("view")[-1]["world_size"] != made[-1][1]:
        made = decisions(job)
        wait_for_steps(job, 4 * EVERY)
    assert made[-1][1] == cap
    assert len(made) <= 3
    finish(job)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "why"),
    [("echo no quota left >&2; exit 1", "it has ended with status 1 (no quota left)"), ("sleep 1000", "killed")],
    ids=["fails", "hangs"],
)
def test_command_that_gives_no_nodes_is_one_line(run: Callable[..., Launched], command: str, why: str) -> None:
    job = run(
        *("--nproc-per-node=1", "--nnodes=1:4", f"--autoscale={SETTINGS}", f"--scale-command={command}"),
        cap=4.0,
        ELASTICFLOW_SCALE_TIMEOUT="1",
    )
    job.wait_for("autoscale")
    wait_for_steps(job, 3 * EVERY)
    assert len(decisions(job)) == 1
    lines = [line for line in finish(job).splitlines() if "has not changed the number of nodes" in line]
    assert len(lines) == 1
    assert why in lines[0]


@pytest.mark.thorough
def test_command_that_starts_a_node(run: Callable[..., Launched]) -> None:
    """As a user writes it: one more node of the job for each that is missing."""
    more = (
        "for i in $(seq $((ELASTICFLOW_WANTED - ELASTICFLOW_NODES))); do "
        f"{sys.executable} -m ef_common.cli run --join=$ELASTICFLOW_RUN_DIR & done"
    )
    job = run("--nproc-per-node=1", "--nnodes=1:2", f"--autoscale=max=2,every_steps={EVERY}", f"--scale-command={more}")
    job.wait_for_world(2)
    wait_for_steps(job, EVERY)
    finish(job)


@pytest.mark.thorough
def test_death_of_rank_zero_after_a_decision_orders_nothing_twice(run: Callable[..., Launched]) -> None:
    job = run("--nproc-per-node=2", "--nnodes=1:3", f"--autoscale=max=3,threshold=0.5,every_steps={EVERY}", cap=3.0)
    first = job.wait_for("autoscale")[0]
    (start,) = job.events("start", worker=first["worker"])
    os.kill(start["pid"], signal.SIGKILL)
    job.wait_for_world(3)
    wait_for_steps(job, 3 * EVERY)
    assert len(job.events("start")) == 4  # two, one that was asked for, and one in place of the one that was killed
    assert all(wanted == 3 for _, wanted in decisions(job))
    finish(job)


@pytest.mark.thorough
def test_straggler_of_a_local_job_is_replaced_and_the_speed_is_back(run: Callable[..., Launched]) -> None:
    job = run("--nproc-per-node=3", "--nnodes=1:3", f"--autoscale=min=3,max=3,every_steps={EVERY}")
    job.wait_for_world(3)
    wait_for_steps(job, 3 * EVERY)
    before = speed(job)
    victim = job.events("view")[-1]["members"][1]
    (start,) = job.events("start", worker=victim)
    (job.directory / SLOW).write_text(str(start["pid"]))
    job.wait_for("straggler", worker=victim)
    job.wait_until(lambda _: victim not in job.events("view")[-1]["members"], "its end")
    job.wait_for_world(3, after=2)
    gone_at = time.time()
    while (ratio := speed(job, since=gone_at) / before) < 0.95 and time.time() < gone_at + 60.0:
        job.check()
        time.sleep(0.5)
    assert ratio >= 0.95
    text = finish(job)
    assert f"worker {victim} is slower than the others" in text
    assert len(job.events("start")) == 4


@in_each_framework
def test_batch_that_rank_zero_chooses_is_the_same_for_all_through_deaths_and_joins(job: TrainingJob) -> None:
    options = {
        **job.patient,
        "length": 803,
        "autoscale": {"policy": SmallAtFirst(), "max": 3, "every_steps": EVERY, "max_global_batch_size": 20},
    }
    first, *others = (job.start(job.train, options) for _ in range(3))
    job.view(3)
    job.wait_until(lambda _: SMALL in sizes(job), "the batch that the policy chooses")
    first.kill()
    newcomer = job.start(job.train, options)
    job.view(3, after=2)
    wait_for_steps(job, 2 * EVERY)
    check_run(job, [newcomer, *others])
    assert set(sizes(job)) <= {16, 18, SMALL}  # of two, of three, and the chosen one
    assert 18 in sizes(job)
    after = max(index for index, size in enumerate(sizes(job)) if size > SMALL)
    assert SMALL not in sizes(job)[:after]
    chosen = [event["global_batch_size"] for event in job.events("compensation")]
    assert chosen.count(SMALL)


@pytest.mark.thorough
@in_each_framework
def test_goodput_chooses_a_batch_by_the_noise_that_it_has_measured(job: TrainingJob) -> None:
    low, high = 6, 20
    limits = {"min_global_batch_size": low, "max_global_batch_size": high}
    options = {
        **job.patient,
        "length": 803,
        "autoscale": {"policy": "goodput", "min": 3, "max": 3, "every_steps": EVERY, **limits},
    }
    workers = [job.start(job.train, options) for _ in range(3)]
    job.view(3)
    job.wait_until(lambda _: any("noise_scale" in event for event in job.events("throughput")), "a noise scale")
    wait_for_steps(job, 5 * EVERY)
    check_run(job, workers)  # all have made the same steps
    noises = [event["noise_scale"] for event in job.events("throughput") if "noise_scale" in event]
    assert all(0 < noise < math.inf for noise in noises)
    chosen = [event["batch_size"] for event in job.events("autoscale") if "batch_size" in event]
    assert all(low <= batch <= high for batch in chosen)
    first = job.events("throughput")[0]["time"]
    committed = {
        event["step"]: sum(stop - start for start, stop in event["committed"])
        for event in job.events("step")
        if event["time"] > first and not event["returned"]
    }
    assert max(committed.values()) <= high
    whole = {event["global_batch_size"] for event in job.events("compensation") if event["time"] > first}
    # What each of three has of a chosen batch, and of the limit.
    assert whole <= {3 * (batch // 3) for batch in (*chosen, high)}


def sizes(job: Any) -> list[int]:
    """The global batches of the whole steps of a run, by their numbers."""
    steps = {event["step"]: event["committed"] for event in job.events("step") if not event["returned"]}
    found = [sum(stop - start for start, stop in steps[number]) for number in sorted(steps)]
    return [size for size in found if size in (16, 18, 20, 24) or size == SMALL]


def speed(job: Launched, *, since: float = 0.0) -> float:
    """Samples per second of all workers in the newest steps, as one of them has logged them; 0 if it is too early."""
    first = job.events("view")[-1]["members"][0]
    steps = [event for event in job.events("step", worker=first) if event["time"] > since][-8:]
    if len(steps) < 5:
        return 0.0
    num_samples = sum(stop - start for event in steps[1:] for start, stop in event["committed"])
    return float(num_samples / (steps[-1]["time"] - steps[0]["time"]))


NOTE = 'echo "$ELASTICFLOW_NODES $ELASTICFLOW_WANTED" >> "$ELASTICFLOW_RUN_DIR/orders"'
"""A command that would start nodes."""


def test_job_asks_for_the_node_that_it_wants_and_for_no_other(make_job: Callable[..., TrainingJob]) -> None:
    job = make_job()
    # A second node is worth it on a machine with much else to do, too, although the steps are short.
    environ = {environment.SCALE_COMMAND: NOTE, environment.AUTOSCALE: f"max=2,threshold=0.1,every_steps={EVERY}"}
    options = {**job.patient, "step_sleep_s": 0.2, "length": 100_003}
    first = job.start(job.train, options, environ=environ)
    orders = job.directory / "orders"
    job.wait_until(lambda _: orders.exists() and orders.read_text() == "1 2\n", "an order")
    second = job.start(job.train, options, environ=environ)
    job.view(2)
    wait_for_steps(job, 3 * EVERY)
    assert decisions(job) == [(1, 2)]
    assert orders.read_text() == "1 2\n"
    check_run(job, [first, second])
    check_gentle(job)


@pytest.fixture
def job(make_job: Callable[..., TrainingJob]) -> TrainingJob:
    job = make_job(settings=Settings(max_nodes=3, last_call_s=60.0), heartbeat_timeout_s=5.0)
    server = job.coordinator._server
    assert server is not None
    server.liveness.pacing = QUICK
    return job


@pytest.mark.thorough
@in_each_framework_but_jax
def test_straggler_is_replaced_by_a_node_that_is_asked_for(job: TrainingJob) -> None:
    """Without autoscale: with `evict_stragglers`, and something that starts nodes."""
    environ = {environment.SCALE_COMMAND: NOTE}
    options = {**job.patient, "evict_stragglers": True, "length": 803}
    slow, *others = (
        job.start(job.train, {**options, "step_sleep_s": step_s}, environ=environ)
        for step_s in (0.05 + EXTRA_S, 0.05, 0.05)
    )
    orders = job.directory / "orders"
    job.wait_until(lambda _: orders.exists() and orders.read_text() == "3 4\n", "an order")
    newcomer = job.start(job.train, {**options, "step_sleep_s": 0.05}, environ=environ)
    assert slow.wait() == 0
    job.wait_until(lambda _: orders.read_text() == "3 4\n3 3\n", "the order for those that are left")
    check_run(job, [newcomer, *others])
    check_gentle(job)
