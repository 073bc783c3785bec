"""The cluster in which calls fail and are refused, pods crash again and again, and users change and delete their jobs.

Whatever happens, no job has more pods than it may, none falls below its minimum by the controllers' own doing, none
fails for its losses while its minimum runs, and none has ended that still trains: :class:`Cluster` checks that at each
call. Afterwards, each job has what it shall have within an hour: nobody starves.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from ef_common.core.cluster import JobPhase, SharePolicy
from ef_common.core.cluster.losses import STEADY_S
from tests.core.cluster_model import Cluster, Served
from tests.core.test_cluster import check_shares, job, made, one_event, settle

NUM_SCHEDULES = 60
MANY = 500
FAULTS = "pptttsssssssskrrrreoufcccnzx" + "hhhhhhiiiiiiiiiiii" + "bbbyyygqqvvvdmm"
"""Those of `one_event`, a controller that sees and does everything, time, and what is new here."""
NUM_QUIET = int(STEADY_S / 60)
"""Pods that crashed may be tried again as late as that, in minutes."""


def served(random_: random.Random, number: int) -> Served:
    """A job that may fail for its losses."""
    new = made(random_, number, autoscales=random_.random() < 0.3)
    new.job = replace(new.job, backoff_limit=random_.choice([1, 3, 6]))
    return new


def fault(cluster: Cluster) -> None:
    """Something happens."""
    random_ = cluster.random
    controller = random_.choice(cluster.controllers)
    some = cluster.jobs[random_.choice(sorted(cluster.jobs))] if cluster.jobs else None
    match random_.choice(FAULTS):
        case "b":  # a call does not get through
            cluster.fail(controller, is_done=False)
        case "y":  # its answer gets lost
            cluster.fail(controller, is_done=True)
        case "g":
            cluster.away = not cluster.away and random_.random() < 0.5
        case "q" if some is not None:
            some.quota = random_.randint(0, 3) if some.quota is None else None
        case "v":
            cluster.sick = set() if cluster.sick else {random_.choice(sorted(cluster.nodes))}
        case "i":
            cluster.now += random_.choice([1.0, 3.0, 30.0])
            one_event(cluster, "h")
            cluster.advance()
        case "c" if len(cluster.jobs) < 5:
            cluster.counts["jobs"] += 1
            new = served(random_, cluster.counts["jobs"])
            cluster.jobs[new.job.key] = new
        case "d" if some is not None and random_.random() < 0.3:
            cluster.counts["deleted"] += 1
            del cluster.jobs[some.job.key]
        case "m" if some is not None:
            cluster.counts["changed"] += 1
            low = random_.randint(1, 3)
            high = low + random_.randint(0, 4)
            some.change(minimum=low, takes=high, maximum=random_.randint(low, high))
        case "r":
            cluster.advance()
        case event:
            one_event(cluster, event)


def run_schedule(seed: int, num_controllers: int, *, policy: SharePolicy) -> Cluster:
    cluster = Cluster(seed, {"n0": 3, "n1": 3, "n2": 2}, num_controllers=num_controllers, policy=policy)
    for _ in range(cluster.random.randint(100, 300)):
        fault(cluster)
    return cluster


def check_faults(number: int, *, num_controllers: int, policy: SharePolicy = SharePolicy.FAIR) -> None:
    counts: Counter[str] = Counter()
    for seed in range(number):
        cluster = run_schedule(seed, num_controllers, policy=policy)
        settle(cluster, num_quiet=NUM_QUIET)
        check_shares(cluster)
        check_nobody_starves(cluster)
        counts += cluster.counts
        counts["conflicts"] += cluster.num_conflicts
        counts["disagreements"] += cluster.num_disagreements
        counts["ended"] += sum(served.job.record.is_over for served in cluster.jobs.values())
    wanted = ("failed", "outage", "refused", "crashed", "deleted", "changed", "conflicts", "disagreements", "ended")
    missing = [what for what in wanted if not counts[what]]
    if policy is not SharePolicy.GANG:  # its jobs have all or nothing
        missing += [what for what in ("capped", "tried again", "failed for losses") if not counts[what]]
    assert not missing, "what the rule guards against has happened"


def check_nobody_starves(cluster: Cluster) -> None:
    """Each job that can have its minimum has it: no room is left for it, or it may not pass one that waits."""
    jobs = [cluster.policy.told_of(one.job) for one in cluster.jobs.values() if not one.job.record.is_over]
    jobs = sorted((one for one in jobs if not one.suspended), key=lambda job: job.rank)
    sizes = {one.key: len(cluster.running(one.key)) for one in jobs}
    room = sum(
        size - sum(where == node for where, _ in cluster.others.values()) for node, size in cluster.nodes.items()
    )
    room -= sum(one.minimum for one in jobs if sizes[one.key] >= one.minimum)
    for one in jobs:
        if sizes[one.key] >= one.minimum:
            assert one.record.phase is JobPhase.RUNNING
        elif one.minimum <= room:
            raise AssertionError((one, sizes))
        elif one.minimum <= sum(cluster.nodes.values()):
            return  # nobody may pass it
    assert all(pod.running for pods in cluster.pods.values() for pod in pods.values() if pod.alive)


@pytest.mark.parametrize("policy", SharePolicy)
def test_no_fault_breaks_a_limit_or_lets_a_job_starve(policy: SharePolicy) -> None:
    check_faults(NUM_SCHEDULES, num_controllers=2, policy=policy)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", SharePolicy)
@pytest.mark.parametrize("num_controllers", [1, 2, 3])
def test_no_fault_of_many_breaks_a_limit_or_lets_a_job_starve(num_controllers: int, policy: SharePolicy) -> None:
    check_faults(MANY, num_controllers=num_controllers, policy=policy)


# ---------------------------------------------------------------- a node on which pods crash


def crash_for(hours: float, *, seed: int = 0, low: int = 2) -> Cluster:
    """A job of eight pods, of which one is on a node on which each pod crashes after five seconds."""
    cluster = Cluster(seed, {"good": 7, "bad": 1})
    places = frozenset(cluster.nodes)
    cluster.jobs["a"] = Served(job("a", low, 8, takes=8, nodes=places), most=8)
    cluster.sick = {"bad"}
    while cluster.now < 1000.0 + 3600.0 * hours:
        one_event(cluster, "h")
        cluster.advance()
        cluster.now += 5.0
    return cluster


def test_pod_that_crashes_again_and_again_is_not_replaced_and_the_others_go_on() -> None:
    cluster = crash_for(2.0)
    record = cluster.jobs["a"].job.record
    assert record.phase is JobPhase.RUNNING
    assert len(cluster.running("a")) == 7
    limit, tries = cluster.jobs["a"].job.backoff_limit, 2 * 3600 / STEADY_S
    assert limit + tries - 1 <= cluster.counts["crashed"] <= limit + 1 + tries
    assert cluster.counts["tried again"] == cluster.counts["crashed"] - limit - 1
    cluster.sick = set()
    settle(cluster, num_quiet=NUM_QUIET)
    assert len(cluster.running("a")) == 8


def test_job_that_needs_the_pod_that_crashes_fails() -> None:
    cluster = crash_for(0.5, low=8)
    record = cluster.jobs["a"].job.record
    assert (record.phase, cluster.counts["crashed"]) == (JobPhase.FAILED, cluster.jobs["a"].job.backoff_limit + 1)
