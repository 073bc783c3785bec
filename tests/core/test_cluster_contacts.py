"""Which pods are told where the others are: tables, and the cluster in which anything happens in any order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ef_common.core.cluster import Job, JobPhase, Pod, Record, WorkerReport, decide, doors_of
from ef_common.core.cluster.contacts import NUM_CONTACTS, contacts_of, seekers_of
from ef_common.core.door_list import MAX_LISTED, DoorList
from tests.core import cluster_model
from tests.core.cluster_model import Cluster, Served
from tests.core.test_cluster import job, made, nodes, one_event, pod, settle

SEEKING = "ppttsssssssssssssssskrrrrreufdddddd"
NUM_SCHEDULES = 60


def address(number: int) -> str:
    return f"10.0.0.{number}"


def at(index: int, **more: object) -> Pod:
    return replace(pod(index), address=address(index), **more)  # type: ignore[arg-type]


def running(*pods: Pod, **more: object) -> Job:
    return job("a", 1, 8, pods=pods, **{"record": Record(JobPhase.RUNNING, starts=1), **more})


def told(one: Job) -> list[str]:
    return [pod.name for pod in decide([one], nodes(8), 0.0)["a"].tell]


def test_pod_is_told_of_those_that_run_and_asks_those_that_are_about_to_start_or_to_go() -> None:
    one = running(
        *(at(0), at(1, running=False), at(2, gone_by=30.0), at(3, ended=True, running=False)),
        *(replace(pod(4), running=False), at(5)),
        record=Record(JobPhase.RUNNING, leaving=frozenset({"a5"})),
    )
    assert doors_of(one, "4f") == DoorList((address(0),), (address(1), address(2), address(5)), "4f")


def test_new_pods_are_created_with_a_few_addresses_that_of_rank_0_first() -> None:
    one = running(*(at(index) for index in range(NUM_CONTACTS + 1)))
    assert contacts_of(one) == DoorList(tuple(map(address, range(NUM_CONTACTS))))
    report = WorkerReport(0.0, 6, 1, 1, None, first=address(5))
    decision = decide([replace(one, report=report)], nodes(8), 0.0)["a"]
    assert (decision.create, decision.tell) == ((6, 7), ())
    assert decision.contacts == DoorList((address(5), *map(address, range(NUM_CONTACTS - 1))))


def test_pod_of_a_job_without_any_is_created_with_nothing() -> None:
    assert decide([job()], nodes(2), 0.0)["a"].contacts == DoorList()


def test_nobody_is_told_anything_who_does_not_ask() -> None:
    assert told(running(at(0), at(1))) == []


def test_pod_that_looks_for_its_job_is_told_until_it_knows_what_it_would_be_told() -> None:
    known = DoorList((address(1), address(0)), (), "4f")
    for before in (
        *(DoorList(), replace(known, nonce=""), replace(known, nonce="5a"), replace(known, doors=(address(0),))),
        *(replace(known, others=(address(9),)), replace(known, doors=(*known.doors, address(9)))),
    ):
        assert told(running(at(0, seeks="4f", told=before), at(1))) == ["a-0"], before
    assert told(running(at(0, seeks="4f", told=known), at(1))) == []
    assert told(running(at(0, seeks="4f", told=known), at(1), at(2, running=False))) == ["a-0"]


@pytest.mark.parametrize("change", [{"ended": True, "running": False}, {"gone_by": 30.0}, {"running": False}], ids=str)
def test_pod_that_does_not_run_or_is_to_go_is_told_nothing(change: dict[str, object]) -> None:
    assert told(running(at(0), at(1, seeks="4f", **change))) == []


def test_pod_that_goes_for_another_job_is_told_nothing() -> None:
    one = running(*(at(index, seeks=f"{index}") for index in range(3)), maximum=2)
    assert told(one) == ["a-0", "a-1"]


def test_job_of_very_many_pods_is_told_of_a_few_by_which_nobody_founds_it() -> None:
    many = [replace(pod(index), address=f"10.1.{index // 256}.{index % 256}") for index in range(MAX_LISTED + 1)]
    found = doors_of(running(*many), "4f")
    assert (len(found.doors), found.nonce) == (NUM_CONTACTS, "")
    asks = [replace(many[0], seeks="4f", told=found), replace(many[1], seeks="5a"), *many[2:]]
    assert [pod.name for pod in seekers_of(running(*asks))] == ["a-1"]


def test_each_pod_is_told_for_its_own_nonce() -> None:
    doors = DoorList((address(0), address(1)))
    pods = [at(index, seeks=nonce, told=replace(doors, nonce=nonce)) for index, nonce in enumerate(("4f", "5a"))]
    assert told(running(*pods)) == []
    assert told(running(pods[0], replace(pods[1], told=pods[0].told))) == ["a-1"]


# ---------------------------------------------------------------- anything in any order


def play(seed: int) -> Cluster:
    cluster = Cluster(seed, {"n0": 3, "n1": 3, "n2": 2}, num_controllers=2)
    for number in range(2):
        cluster.jobs[f"j{number}"] = made(cluster.random, number)
    for _ in range(cluster.random.randint(50, 300)):
        one_event(cluster, SEEKING)
    return cluster


def test_no_schedule_tells_a_pod_of_fewer_than_were_there_when_it_asked() -> None:
    num_told = late = 0
    for seed in range(NUM_SCHEDULES):
        cluster = play(seed)
        settle(cluster)
        for key, pods in cluster.pods.items():
            addresses = {pod.address for pod in pods.values()}
            for one in pods.values():
                if one.uid in cluster.seekers and key in cluster.jobs:
                    assert (one.told.nonce, set(one.told.doors)) == (cluster.seekers[one.uid], addresses), seed
        num_told += cluster.num_told
        late += cluster.num_late
    assert num_told > NUM_SCHEDULES
    assert late > 0, "some pods have changed since they were read"


def tell_late(cluster: Cluster, *, starts: bool = False) -> Pod:
    """A controller that sees pods late hears at once that one looks for its job; that pod, after it was told."""
    cluster.jobs["a"] = Served(job("a", 1, 2), most=2)
    (controller,) = cluster.controllers
    for _ in range(3):  # its pods are made, and run
        cluster.turn(controller)
    cluster.pods["a"]["a-1"] = replace(cluster.pods["a"]["a-1"], address="", running=False)
    old = cluster.picture()
    cluster.pods["a"]["a-1"] = replace(cluster.pods["a"]["a-1"], address="10.0.9.9", running=not starts)
    cluster.seekers["uid1"] = "4f"
    cluster.there["4f"] = frozenset({"uid1", "uid2"})
    controller.picture = replace(cluster.picture(), pods=old.pods)
    cluster.think(controller)
    while cluster.step(controller):
        pass
    return cluster.pods["a"]["a-0"]


def test_pod_is_told_what_is_there_after_it_has_asked_however_late_the_controller_sees_pods() -> None:
    one = tell_late(Cluster(0, {"n0": 4}))
    assert one.told == DoorList((one.address, "10.0.9.9"), (), "4f")


def test_simulator_finds_lists_of_what_was_known_before_a_pod_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(cluster: Cluster, job: Job) -> Job:
        return replace(job, pods=tuple(replace(pod, seeks="") for pod in job.pods))

    monkeypatch.setattr(Cluster, "read_pods", read)
    with pytest.raises(AssertionError, match=r"10\.0\.9\.9"):
        tell_late(Cluster(0, {"n0": 4}))


def test_simulator_finds_lists_that_lack_pods_which_do_not_run_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tell_late(Cluster(0, {"n0": 4}), starts=True).told.others == ("10.0.9.9",)
    monkeypatch.setattr(cluster_model, "doors_of", lambda job, nonce: replace(doors_of(job, nonce), others=()))
    with pytest.raises(AssertionError, match=r"10\.0\.9\.9"):
        tell_late(Cluster(0, {"n0": 4}), starts=True)
