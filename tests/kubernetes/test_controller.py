"""The controller, its lease and its copies, with an API server in memory."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from urllib.error import HTTPError

import pytest

from ef_common.core.cluster import Decision, Doom, Job, Record, SharePolicy, arrivals
from ef_common.core.cluster.decide import LISTEN_S
from ef_common.core.cluster.state import LEFT
from ef_common.core.door_list import DoorList
from ef_common.errors import ClusterNotFound
from ef_common.kubernetes import asking, reading
from ef_common.kubernetes import controller as controllers
from ef_common.kubernetes.controller import Controller
from ef_common.kubernetes.kinds import BUDGETS, EVENTS, JOBS, LEASES, NODES, PODS, POLICIES, SECRETS, SERVICES, Kind
from ef_common.kubernetes.lease import DURATION_S, Lease
from ef_common.kubernetes.metrics import ALIVE_S, Metrics, Page
from ef_common.kubernetes.resource import CONTROLLER, DOORS_ANNOTATION, INDEX_LABEL, JOB_LABEL, METRICS_PORT, UID_LABEL
from ef_common.kubernetes.watching import Copy
from tests.kubernetes.memory_api import MemoryApi
from tests.kubernetes.objects import GPU, job, node
from tests.waiting import poll_until

rules = import_module("ef_common.core.cluster.decide")


class Acting:
    """A controller in a thread."""

    def __init__(self, api: MemoryApi, policy: SharePolicy = SharePolicy.FAIR, **settings: float) -> None:
        self.metrics = Metrics()
        self.controller = self.made(api, self.metrics, policy=policy, **settings)
        self.thread = threading.Thread(target=self.controller.run)
        self.thread.start()

    @staticmethod
    def made(api: MemoryApi, metrics: Metrics, **settings: Any) -> Controller:
        return Controller(api, namespace="system", metrics=metrics, **settings)  # type: ignore[arg-type]

    @property
    def looks(self) -> int:
        (line,) = [line for line in self.metrics.text().splitlines() if "looks_total" in line]
        return int(line.split()[1])

    def stop(self) -> None:
        self.controller.stop()
        self.thread.join()


@pytest.fixture
def acting(api: MemoryApi) -> Iterator[Acting]:
    one = Acting(api)
    yield one
    one.stop()


def pods(api: MemoryApi) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in api.list(PODS)[0] if "deletionTimestamp" not in pod["metadata"])


def own_name(api: MemoryApi) -> str:
    """Name of what belongs to the job."""
    return f"a-{api.get(JOBS, 'here', 'a')['metadata']['uid'][:8]}"


def status(api: MemoryApi) -> Any:
    return api.get(JOBS, "here", "a").get("status") or {}


def test_controller_makes_what_a_job_needs_and_tells_of_it(api: MemoryApi, acting: Acting) -> None:
    api.create(JOBS, job())
    poll_until(lambda: len(pods(api)) == 4)
    assert pods(api) == ["a-0", "a-1", "a-2", "a-3"]
    for kind in (SERVICES, SECRETS, POLICIES):
        assert api.get(kind, "here", own_name(api))["metadata"]["ownerReferences"]
    api.run_pods()
    poll_until(lambda: status(api).get("running") == 4)
    assert (status(api)["phase"], status(api)["starts"]) == ("Running", 1)
    poll_until(lambda: [one for one in api.list(EVENTS)[0] if one["reason"] == "Running"])
    text = acting.metrics.text()
    assert "elasticflow_controller_pods_created_total 4" in text
    assert 'elasticflow_controller_jobs{phase="Running"} 1' in text


def test_job_that_is_made_again_shares_nothing_with_the_one_before(api: MemoryApi, acting: Acting) -> None:
    """What belonged to a deleted job goes some time after it, and must not take that of the new one with it."""
    api.create(JOBS, job())
    poll_until(lambda: len(pods(api)) == 4)
    before = own_name(api)
    api.delete(JOBS, "here", "a")
    api.create(JOBS, job())  # the pods of the one before are not gone yet, either
    assert own_name(api) != before
    for kind in (SERVICES, SECRETS, POLICIES):
        poll_until(lambda kind=kind: own_name(api) in [one["metadata"]["name"] for one in api.list(kind)[0]])
        assert api.get(kind, "here", before)


def test_controller_divides_the_pods_by_its_policy(api: MemoryApi) -> None:
    acting = Acting(api, SharePolicy.GANG)
    try:
        for name in ("a", "b"):
            api.create(JOBS, job(name, high=3))
        poll_until(lambda: pods(api) == ["a-0", "a-1", "a-2"])
        poll_until(lambda: api.get(JOBS, "here", "b").get("status", {}).get("wanted") == 0)
    finally:
        acting.stop()


def test_job_without_a_network_policy_gets_none(api: MemoryApi, acting: Acting) -> None:
    api.create(JOBS, job(networkPolicy=False))
    poll_until(lambda: len(pods(api)) == 4)
    with pytest.raises(ClusterNotFound):
        api.get(POLICIES, "here", own_name(api))


@pytest.mark.parametrize("unknown", ["", "policy/v1"])
def test_minimum_of_a_job_stays_when_a_node_is_drained(
    api: MemoryApi, acting: Acting, monkeypatch: pytest.MonkeyPatch, unknown: str
) -> None:
    api.unknown.add(unknown)
    api.create(JOBS, job(low=2))
    poll_until(lambda: len(pods(api)) == 4)
    budget = api.get(BUDGETS, "here", own_name(api))
    asked = list[str]()
    monkeypatch.setattr(api, "apply", lambda kind, thing: asked.append(kind.api_version))
    api.create(JOBS, job("b", low=2))
    poll_until(lambda: asked)
    assert asked == [budget["apiVersion"]]  # as it is known by now
    meta = api.get(JOBS, "here", "a")["metadata"]
    assert budget["apiVersion"] == ("policy/v1beta1" if unknown else "policy/v1")
    assert budget["spec"] == {"minAvailable": 2, "selector": {"matchLabels": {JOB_LABEL: "a", UID_LABEL: meta["uid"]}}}


@pytest.mark.parametrize("spec", [{"low": 4}, {"disruptionBudget": False}], ids=str)
def test_job_that_must_not_keep_a_node_from_being_drained_has_no_budget(
    api: MemoryApi, acting: Acting, spec: dict[str, Any]
) -> None:
    api.create(JOBS, job(**spec))
    poll_until(lambda: len(pods(api)) == 4)
    with pytest.raises(ClusterNotFound):
        api.get(BUDGETS, "here", own_name(api))


def test_budget_follows_the_job(api: MemoryApi, acting: Acting) -> None:
    def lowest() -> Any:
        return api.get(BUDGETS, "here", own_name(api))["spec"]["minAvailable"]

    api.create(JOBS, job(low=2))
    poll_until(lambda: len(pods(api)) == 4)
    api.run_pods()
    for wanted, expected in ((False, 0), (True, 2)):
        api.change_spec(JOBS, "here", "a", disruptionBudget=wanted)
        poll_until(lambda expected=expected: lowest() == expected)
    assert len(pods(api)) == 4
    suspend(api)
    api.change_spec(JOBS, "here", "a", minWorkers=3, suspend=False)
    poll_until(lambda: lowest() == 3)


def suspend(api: MemoryApi) -> None:
    """Let the job have no pods."""
    api.change_spec(JOBS, "here", "a", suspend=True)
    poll_until(lambda: pods(api) == [])
    for pod in api.list(PODS)[0]:
        api.remove(PODS, "here", pod["metadata"]["name"])
    poll_until(lambda: status(api).get("phase") == "Suspended")


def test_job_that_grows_costs_a_call_for_each_pod_alone(api: MemoryApi, acting: Acting) -> None:
    api.create(JOBS, job(workers=2))
    poll_until(lambda: len(pods(api)) == 2)
    before = len(api.calls)
    api.change(JOBS, "here", "a", {"spec": {"workers": 4}})
    poll_until(lambda: len(pods(api)) == 4)
    assert [call for call in api.calls[before:] if call.startswith("create") and "events" not in call] == [
        "create pods a-2",
        "create pods a-3",
    ]


@pytest.mark.parametrize("added", [False, True])
def test_job_takes_room_once_at_most_for_pods_that_tolerate_no_node(api: MemoryApi, added: bool) -> None:
    """Clusters differ in whether pods get tolerations for the resources that they ask for."""
    api.adds_tolerations = added
    taint = {"key": GPU, "value": "present", "effect": "NoSchedule"}
    api.change(NODES, None, "n1", {"spec": {"taints": [taint]}, "status": {"allocatable": {GPU: "2"}}})
    tolerant = job("k", high=2)
    tolerant["spec"]["template"]["spec"]["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    api.create(JOBS, tolerant)
    controller = looking(api)

    def look_twice() -> None:
        for _ in range(2):
            read_all(controller)
            controller._look()
        for name in pods(api):
            if name.startswith("k"):
                api.end_pod(name, None)
        for pod in api.list(PODS)[0]:
            if "deletionTimestamp" in pod["metadata"]:
                api.remove(PODS, "here", pod["metadata"]["name"])

    look_twice()
    assert pods(api) == ["k-0", "k-1"]
    api.create(JOBS, job("j", high=1))
    seen = []
    for _ in range(4):
        look_twice()
        seen.append(pods(api))
    expected = ["j-0", "k-0"] if added else ["k-0", "k-1"]
    assert seen[-1] == expected, seen
    assert api.calls.count("delete pods k-1") == 1
    assert api.calls.count("create pods j-0") == 1


def test_list_that_is_older_than_the_answer_to_a_call_does_not_undo_it(api: MemoryApi) -> None:
    copy = Copy(api, NODES, on_change=lambda: None)  # type: ignore[arg-type]
    listed, version = api.list(NODES)
    made = api.create(NODES, node("n2"))
    copy.update(made)
    copy.update(api.change(NODES, None, "n1", {"spec": {"unschedulable": True}}))
    api.list = lambda kind, **_: (listed, version)  # type: ignore[assignment]
    copy._read_all()
    found = {one["metadata"]["name"]: one["spec"] for one in copy.objects()}
    assert found == {"n1": {"unschedulable": True}, "n2": {}}
    api.list = lambda kind, **_: ([], made["metadata"]["resourceVersion"])  # type: ignore[assignment]
    copy._read_all()
    assert [one["metadata"]["name"] for one in copy.objects()] == ["n1"]


def test_what_is_to_go_is_on_record_before_it_is_deleted(api: MemoryApi, acting: Acting) -> None:
    api.create(JOBS, job())
    poll_until(lambda: len(pods(api)) == 4)
    api.run_pods()
    poll_until(lambda: status(api).get("running") == 4)
    before = len(api.calls)
    api.change(JOBS, "here", "a", {"spec": {"workers": 2}})
    poll_until(lambda: pods(api) == ["a-0", "a-1"])
    calls = [call for call in api.calls[before:] if "lease" not in call and "events" not in call]
    assert calls.index("replace elasticjobs a") < calls.index("delete pods a-2")
    assert len(status(api)["leaving"]) == 2


def test_job_is_over_when_a_pod_says_so(api: MemoryApi, acting: Acting) -> None:
    api.create(JOBS, job(ttlSecondsAfterFinished=0))
    poll_until(lambda: len(pods(api)) == 4)
    api.run_pods(0)
    poll_until(lambda: not api.list(JOBS)[0])
    assert "delete elasticjobs a" in api.calls


def test_outage_and_lost_watches_do_no_harm(api: MemoryApi, acting: Acting) -> None:
    api.create(JOBS, job())
    poll_until(lambda: len(pods(api)) == 4)
    api.run_pods()
    poll_until(lambda: status(api).get("running") == 4)
    before = list(api.calls)
    api.down = True
    api.lose_watches()
    time.sleep(0.1)
    api.down = False
    api.remove(PODS, "here", "a-1")  # which no watch tells
    poll_until(lambda: "a-1" in pods(api))
    assert [call for call in api.calls[len(before) :] if "pods" in call] == ["create pods a-1"]


def test_refusal_is_told_and_tried_again(api: MemoryApi, acting: Acting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "RETRY_S", 0.3)
    api.refused["create pods a-0"] = "exceeded quota"
    api.create(JOBS, job(high=1))
    poll_until(lambda: [one for one in api.list(EVENTS)[0] if one["message"] == "exceeded quota"])
    poll_until(lambda: status(api).get("reason") == "exceeded quota")
    api.refused.clear()
    poll_until(lambda: pods(api) == ["a-0"])


@pytest.mark.parametrize("kind", [SERVICES, SECRETS, POLICIES, BUDGETS], ids=lambda kind: kind.plural)
def test_job_that_is_refused_what_its_pods_need_says_so_and_leaves_the_room_to_others(
    api: MemoryApi, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controllers, "_PAUSES_S", (0.0, 0.0))
    for name in ("a", "b"):
        api.create(JOBS, job(name))
    api.refused[f"create {kind.plural} {own_name(api)}"] = "exceeded quota"
    controller = looking(api)
    for _ in range(3):
        controller._look()
        read_all(controller)
    assert (status(api)["reason"], status(api)["refusal"]["limit"]) == ("exceeded quota", 0)
    (pending,) = [one for one in status(api)["conditions"] if one["type"] == "Pending"]
    assert pending["reason"] == "PodsRefused"
    assert pods(api) == ["b-0", "b-1", "b-2", "b-3"]


@pytest.mark.parametrize("kind", [SERVICES, SECRETS, POLICIES], ids=lambda kind: kind.plural)
def test_job_that_has_had_pods_goes_on_although_what_they_need_is_refused(api: MemoryApi, kind: Kind) -> None:
    api.create(JOBS, job(high=2))
    controller = looking(api)
    controller._look()
    assert pods(api) == ["a-0", "a-1"]
    api.refused[f"create {kind.plural} {own_name(api)}"] = "exceeded quota"
    api.delete(PODS, "here", "a-1")
    controller._belongings.forget_all_but(())  # as another one, which has made nothing yet
    for _ in range(3):
        read_all(controller)
        controller._look()
    assert pods(api) == ["a-0", "a-1"]
    assert "refusal" not in status(api)


def test_refusal_is_forgotten_when_the_job_is_changed(api: MemoryApi, acting: Acting) -> None:
    api.refused["create pods a-1"] = "exceeded quota"
    api.create(JOBS, job(high=2))
    poll_until(lambda: status(api).get("refusal", {}).get("limit") == 1)
    api.refused.clear()
    looks = acting.looks
    poll_until(lambda: acting.looks > looks + 2)
    assert pods(api) == ["a-0"]
    api.change_spec(JOBS, "here", "a", template={"metadata": {"labels": {"team": "x"}}})
    poll_until(lambda: pods(api) == ["a-0", "a-1"])
    poll_until(lambda: "refusal" not in status(api))


def test_job_ends_although_containers_beside_its_training_do_not(api: MemoryApi, acting: Acting) -> None:
    api.create(JOBS, job(high=2))
    poll_until(lambda: len(pods(api)) == 2)
    beside = {"name": "logs", "state": {"running": {}}}

    def ends(pod: str, exit_code: int) -> None:
        trained = {"name": "worker", "state": {"terminated": {"exitCode": exit_code}}}
        api.change_status(pod, {"containerStatuses": [beside, trained]})

    api.run_pods()
    poll_until(lambda: status(api).get("running") == 2)
    ends("a-1", 137)
    poll_until(lambda: "delete pods a-1" in api.calls)
    poll_until(lambda: status(api)["reason"] == "a-1 ended with status 137")
    assert status(api)["crashes"] == 1
    ends("a-0", 0)
    poll_until(lambda: status(api)["phase"] == "Succeeded")


def test_job_ends_although_a_proxy_is_put_before_its_training(
    api: MemoryApi, acting: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = api.create

    def admit(kind: Kind, thing: Any) -> Any:
        if kind is PODS:
            thing["spec"]["containers"].insert(0, {"name": "proxy"})
        return create(kind, thing)

    monkeypatch.setattr(api, "create", admit)
    api.create(JOBS, job(high=1))
    poll_until(lambda: pods(api) == ["a-0"])
    proxy = {"name": "proxy", "state": {"running": {}}}
    trained = {"name": "worker", "state": {"terminated": {"exitCode": 0}}}
    api.change_status("a-0", {"phase": "Running", "containerStatuses": [proxy, trained]})
    poll_until(lambda: status(api).get("phase") == "Succeeded")


def test_what_keeps_pods_from_starting_is_told_as_long_as_it_does(api: MemoryApi, acting: Acting) -> None:
    api.create(JOBS, job(high=1))
    poll_until(lambda: pods(api) == ["a-0"])
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "digits"'}
    api.change_status(
        "a-0", {"phase": "Pending", "containerStatuses": [{"name": "worker", "state": {"waiting": waiting}}]}
    )
    why = 'a-0 cannot start: ImagePullBackOff: Back-off pulling image "digits"'
    poll_until(lambda: status(api).get("reason") == why)
    poll_until(lambda: [one for one in api.list(EVENTS)[0] if one["message"] == why])
    api.run_pods()
    poll_until(lambda: status(api)["phase"] == "Running")
    assert "reason" not in status(api)


def test_job_whose_minimum_is_refused_takes_nothing(api: MemoryApi, acting: Acting) -> None:
    api.refused["create pods a-2"] = "exceeded quota"
    api.create(JOBS, job(low=3))
    poll_until(lambda: status(api).get("reason") == "exceeded quota")
    poll_until(lambda: pods(api) == [])
    assert "create pods a-3" not in api.calls


def test_job_that_grows_until_it_is_refused_keeps_what_it_has(api: MemoryApi, acting: Acting) -> None:
    api.refused["create pods a-2"] = "exceeded quota"
    api.create(JOBS, job())
    poll_until(lambda: status(api).get("refusal", {}).get("limit") == 2)
    poll_until(lambda: status(api).get("wanted") == 2)
    assert pods(api) == ["a-0", "a-1"]


def test_job_that_cannot_be_carried_out_keeps_nobody_waiting(api: MemoryApi, acting: Acting) -> None:
    bad = job("bad", high=1)
    bad["spec"]["template"]["spec"]["containers"][0]["env"] = "x"
    api.create(JOBS, bad)
    api.create(JOBS, job(high=1))
    poll_until(lambda: pods(api) == ["a-0"])
    poll_until(lambda: [one for one in api.list(EVENTS)[0] if one["involvedObject"]["name"] == "bad"])


def test_job_whose_template_is_malformed_fails_alone(api: MemoryApi) -> None:
    bad = job("bad", high=1)
    bad["spec"]["template"]["spec"]["priorityClassName"] = ["x"]
    api.create(JOBS, bad)
    api.create(JOBS, job(high=1))
    look(looking(api))
    assert pods(api) == ["a-0"]
    why = api.get(JOBS, "here", "bad")["status"]["reason"]
    assert "the template cannot be read" in why
    assert "priorityClassName must be a string" in why


@pytest.mark.parametrize("kind", [SERVICES, SECRETS, POLICIES, PODS], ids=lambda kind: kind.plural)
def test_what_a_quota_that_others_change_kept_from_being_made_is_made_later(api: MemoryApi, kind: Kind) -> None:
    api.create(JOBS, job(high=1))
    name = "a-0" if kind is PODS else own_name(api)
    api.contended.add(f"create {kind.plural} {name}")
    controller = looking(api)
    controller._look()
    assert not api.list(kind)[0]
    look(controller)
    assert api.get(kind, "here", name)
    assert pods(api) == ["a-0"]


@pytest.mark.parametrize("index", ["x", "1"])
def test_pod_whose_index_somebody_changes_is_still_the_same_one(api: MemoryApi, index: str) -> None:
    api.create(JOBS, job(high=2))
    controller = looking(api)
    controller._look()
    api.run_pods()
    api.change(PODS, "here", "a-0", {"metadata": {"labels": {INDEX_LABEL: index}}})
    api.remove(PODS, "here", "a-1")
    api.create(JOBS, job("b", high=1))
    look(controller)
    assert pods(api) == ["a-0", "a-1", "b-0"]


def test_job_whose_calls_fail_keeps_nobody_waiting(
    api: MemoryApi, acting: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controllers, "_PAUSES_S", (0.001, 0.05))
    why = "failed calling webhook: connection refused"
    api.failing["create pods bad-0"] = why
    api.create(JOBS, job("bad", high=1))
    poll_until(lambda: [one for one in api.list(EVENTS)[0] if one["message"] == why])
    looks = acting.looks
    api.create(JOBS, job(high=1))
    poll_until(lambda: pods(api) == ["a-0"])
    poll_until(lambda: acting.looks > looks + 2)  # so nobody takes it for one that hangs
    api.failing.clear()
    poll_until(lambda: pods(api) == ["a-0", "bad-0"])


def test_job_of_which_an_old_version_is_known_is_tried_twice_and_then_after_pauses(
    api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controllers, "_PAUSES_S", (600.0, 600.0))
    api.create(JOBS, job(high=1))
    controller = looking(api)
    api.change(JOBS, "here", "a", {"metadata": {"annotations": {"team": "x"}}})  # nobody tells the controller
    for woken in (True, False, False):
        controller._wake.clear()
        controller._look()
        assert controller._wake.is_set() is woken
    assert api.calls.count("replace elasticjobs a") == 2
    read_all(controller)
    controller._look()
    assert pods(api) == ["a-0"]


def looking(api: MemoryApi) -> Controller:
    """A controller that acts, and looks when it is told to."""
    one = Acting.made(api, Metrics())
    one._lease.keep()
    read_all(one)
    return one


def read_all(controller: Controller) -> None:
    """Let it know what is there."""
    for copy in controller._copies.values():
        copy._read_all()


def test_job_that_is_being_deleted_gets_no_pods_and_those_that_it_has_keep_their_room(api: MemoryApi) -> None:
    api.create(JOBS, job(high=4))
    controller = looking(api)
    controller._look()
    api.run_pods()
    api.remove(PODS, "here", "a-3")
    api.change(JOBS, "here", "a", {"metadata": {"deletionTimestamp": "2100-01-01T00:00:00Z"}})
    api.create(JOBS, job("b", high=2))
    read_all(controller)
    controller._look()
    assert pods(api) == ["a-0", "a-1", "a-2", "b-0"]


def test_pods_of_a_job_that_had_the_same_name_are_not_those_of_the_new_one(api: MemoryApi) -> None:
    api.create(JOBS, job(high=2))
    controller = looking(api)
    controller._look()
    api.run_pods()
    api.remove(JOBS, "here", "a")
    api.create(JOBS, job(high=2))
    read_all(controller)
    controller._look()
    assert (pods(api), status(api)["running"]) == (["a-0", "a-1"], 0)


def test_job_whose_calls_have_failed_comes_last(api: MemoryApi) -> None:
    for name in ("a", "b", "c"):
        api.create(JOBS, job(name, high=1))
    api.failing["create pods a-0"] = "failed calling webhook"
    controller = looking(api)
    controller._look()
    assert pods(api) == ["b-0", "c-0"]
    (version,) = controller._pauses
    controller._pauses[version] = (0.2, 0.0)
    things = {f"here/{name}": api.get(JOBS, "here", name) for name in ("a", "b", "c")}
    decisions = {key: Decision(Record()) for key in things}
    assert controller._order(things, decisions) == ["here/b", "here/c", "here/a"]
    gives = Decision(Record(), delete=(Doom(reading.pod_of(api.get(PODS, "here", "c-0")), "shrinks"),))
    decisions |= {"here/a": gives, "here/c": gives}
    assert controller._order(things, decisions) == ["here/c", "here/b", "here/a"]


def test_job_whose_calls_have_failed_is_tried_at_once_when_it_is_changed(
    api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controllers, "_PAUSES_S", (600.0, 600.0))
    api.create(JOBS, job(high=1))
    api.failing["create pods a-0"] = "failed calling webhook"
    controller = looking(api)
    controller._look()
    api.failing.clear()
    read_all(controller)
    controller._look()
    assert pods(api) == []
    api.change_spec(JOBS, "here", "a", backoffLimit=1)
    read_all(controller)
    controller._look()
    assert pods(api) == ["a-0"]


def test_controller_forgets_jobs_that_have_gone(api: MemoryApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "RETRY_S", 0.0)
    api.create(JOBS, job(high=1))
    api.refused["create pods a-0"] = "exceeded quota"
    controller = looking(api)

    def known() -> list[int]:
        belongings = controller._belongings._kept
        return list(map(len, (controller._pauses, controller._refusals, controller._teller._told, belongings)))

    controller._look()
    assert known() == [1, 1, 1, 1]
    api.remove(JOBS, "here", "a")
    read_all(controller)
    controller._look()
    assert known() == [0, 0, 0, 0]


def test_job_that_is_over_needs_nothing_any_more(api: MemoryApi) -> None:
    api.create(JOBS, job(high=1))
    controller = looking(api)
    controller._look()
    api.run_pods(0)
    api.remove(SERVICES, "here", own_name(api))
    controller._belongings.forget_all_but(())
    read_all(controller)
    controller._look()
    assert (status(api)["phase"], pods(api)) == ("Succeeded", ["a-0"])
    with pytest.raises(ClusterNotFound):
        api.get(SERVICES, "here", own_name(api))


def test_controller_that_takes_long_for_many_jobs_does_not_hang(api: MemoryApi) -> None:
    for name in ("a", "b", "c"):
        api.create(JOBS, job(name, high=1))
    controller, lived = looking(api), list[float]()
    controller._metrics.lives = lived.append  # type: ignore[method-assign]
    controller._look()
    assert len(lived) == 3 + 1


@pytest.mark.parametrize(("trouble", "fewest"), [("away", 1), ("failing", controllers._MAX_FAILURES)])
def test_api_server_in_trouble_is_left_alone_for_a_while(
    api: MemoryApi, monkeypatch: pytest.MonkeyPatch, trouble: str, fewest: int
) -> None:
    most = fewest + controllers._NUM_THREADS - 1  # the other calls were under way
    monkeypatch.setattr(controllers, "_PAUSE_S", 0.0)
    names = [f"j{number}" for number in range(3 * controllers._MAX_FAILURES)]
    for name in names:
        api.create(JOBS, job(name, high=1))
    controller = looking(api)
    if trouble == "away":
        api.down = True
    api.failing = {f"replace elasticjobs {name}": "etcdserver: request timed out" for name in names}
    before, told = api.num_failed, list[str]()
    monkeypatch.setattr(controller._teller, "tell", lambda thing, reason, message, **_: told.append(message))
    controller._look()
    first = api.num_failed - before
    assert fewest <= first <= most
    assert len(told) == (0 if trouble == "away" else first)  # an event could not be written, either
    controller._look()
    assert 2 * fewest <= len(controller._pauses) <= 2 * most  # others have had their turn
    api.down, api.failing = False, {}
    controller._stand_by()
    controller._look()
    assert all("status" in one for one in api.list(JOBS)[0])


def test_controller_that_loses_its_lease_in_an_outage_does_not_hang(api: MemoryApi) -> None:
    acting = Acting(api, lease_s=0.4)
    try:
        poll_until(lambda: "elasticflow_controller_leads 1" in acting.metrics.text())
        api.down = True
        poll_until(lambda: "elasticflow_controller_leads 0" in acting.metrics.text())
        assert not acting.metrics.hangs(time.time() + ALIVE_S + 1)
    finally:
        acting.stop()


def test_jobs_that_come_together_are_decided_on_together(api: MemoryApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "QUIET_S", 60.0)
    monkeypatch.setattr(arrivals, "PATIENCE_S", 60.0)
    controller = looking(api)
    assert controller._rest_s() == controllers._TICK_S
    for names in ("ab", "c"):
        for name in names:
            api.create(JOBS, job(name))
        read_all(controller)
        controller._look()
        assert pods(api) == []
    monkeypatch.setattr(arrivals, "QUIET_S", 0.0)
    assert controller._rest_s() == 0.0
    before = len(api.calls)
    controller._look()
    assert [name[0] for name in pods(api)] == ["a", "a", "b", "c"]
    assert not [call for call in api.calls[before:] if call.startswith("delete")]
    assert controller._rest_s() == controllers._TICK_S


def test_controller_that_stands_by_knows_of_no_jobs_that_wait(api: MemoryApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "QUIET_S", 60.0)
    for name in ("a", "b"):
        api.create(JOBS, job(name))
    controller = looking(api)
    controller._look()
    assert controller._arrivals.waiting
    controller._stand_by()
    monkeypatch.setattr(arrivals, "QUIET_S", 0.0)
    assert controller._rest_s() == controllers._TICK_S


def test_jobs_on_which_another_controller_has_decided_do_not_wait(
    api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        api.create(JOBS, job(name, high=1))
    first = looking(api)
    first._look()
    first._lease.give_up()
    api.remove(PODS, "here", "b-0")
    monkeypatch.setattr(arrivals, "QUIET_S", 60.0)
    looking(api)._look()
    assert pods(api) == ["a-0", "b-0"]


def test_job_that_comes_alone_does_not_wait(api: MemoryApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "QUIET_S", 60.0)
    monkeypatch.setattr(arrivals, "PATIENCE_S", 60.0)
    api.create(JOBS, job(high=1))
    controller = looking(api)
    controller._look()
    assert pods(api) == ["a-0"]


def test_jobs_wait_only_for_a_moment_although_nothing_else_happens(
    api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controllers, "_TICK_S", 600.0)
    monkeypatch.setattr(arrivals, "QUIET_S", 0.1)
    for name in ("a", "b"):
        api.create(JOBS, job(name, high=1))
    acting = Acting(api)
    try:
        poll_until(lambda: pods(api) == ["a-0", "b-0"])
    finally:
        acting.stop()


def test_several_jobs_are_acted_on_at_a_time(api: MemoryApi, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"j{number}" for number in range(controllers._NUM_THREADS)]
    api.create(NODES, node("n2", len(names)))
    for name in names:
        api.create(JOBS, job(name, high=1))
    together, create = threading.Barrier(len(names)), api.create

    def wait_and_create(kind: Kind, thing: Any) -> Any:
        if kind is PODS:
            together.wait(30.0)  # or it fails
        return create(kind, thing)

    monkeypatch.setattr(api, "create", wait_and_create)
    controller = looking(api)
    controller._look()
    assert pods(api) == [f"{name}-0" for name in names]


def test_job_that_cannot_be_decided_on_keeps_its_pods_and_the_others_are_acted_on(
    api: MemoryApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    api.create(JOBS, job(high=2))
    controller = looking(api)
    controller._look()
    api.run_pods()
    end_of = rules._advance

    def fail(job: Job, now: float) -> Record:
        if job.key == "here/a":
            raise OverflowError("too many")
        return end_of(job, now)

    monkeypatch.setattr(rules, "_advance", fail)
    api.create(JOBS, job("b"))
    for _ in range(2):
        read_all(controller)
        controller._look()
    assert pods(api) == ["a-0", "a-1", "b-0", "b-1"], "the node has room for four pods"
    messages = [one for one in caplog.records if "cannot be decided on" in one.message]
    assert [one.message[:6] for one in messages] == ["here/a"], "it is told once"
    assert messages[0].exc_info
    assert messages[0].exc_info[0] is OverflowError
    assert controller._metrics.health == "ok, but it cannot decide on here/a\n"
    assert "elasticflow_controller_jobs_failing 1" in controller._metrics.text()
    controller._metrics.leads(False)
    assert controller._metrics.health == "ok\n", "another controller acts, and tells of it"
    assert [one for one in api.list(EVENTS)[0] if "OverflowError('too many')" in one["message"]]
    monkeypatch.setattr(rules, "_advance", end_of)
    controller._look()
    assert controller._metrics.health == "ok\n"


def test_job_whose_status_cannot_be_read_does_not_stop_the_others(api: MemoryApi) -> None:
    for name in ("a", "b"):
        api.create(JOBS, job(name, high=1))
    api.change(JOBS, "here", "a", {"status": {"phase": "Nonsense"}})
    controller = looking(api)
    controller._look()
    assert pods(api) == ["b-0"]


def test_controller_that_cannot_decide_for_a_reason_of_no_single_job_says_so(
    api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.create(JOBS, job())
    api.create(JOBS, job("b"))
    decide = controllers.decide

    def fail(jobs: Any, *args: Any, **more: Any) -> Any:
        if len(jobs) > 1:
            raise ValueError("together")
        return decide(jobs, *args, **more)

    monkeypatch.setattr(controllers, "decide", fail)
    with pytest.raises(ValueError, match="together"):
        looking(api)._look()


def test_controller_that_is_no_longer_the_one_that_acts_begins_with_no_other_job(
    api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"j{number}" for number in range(3 * controllers._NUM_THREADS)]
    for name in names:
        api.create(JOBS, job(name, high=1))
    controller, replace = looking(api), api.replace

    def lose_lease(kind: Kind, thing: Any, **options: Any) -> Any:
        controller._lease._renewed_at = None
        return replace(kind, thing, **options)

    monkeypatch.setattr(api, "replace", lose_lease)
    controller._look()
    begun = [one for one in api.list(JOBS)[0] if one.get("status")]
    assert 1 <= len(begun) <= controllers._NUM_THREADS


def test_only_one_of_two_controllers_acts_and_the_other_one_takes_over(api: MemoryApi) -> None:
    first = Acting(api)
    poll_until(lambda: first.controller.leads)
    second = Acting(api)
    try:
        api.create(JOBS, job())
        poll_until(lambda: len(pods(api)) == 4)
        first.stop()
        api.change(JOBS, "here", "a", {"spec": {"workers": 1}})
        poll_until(lambda: len(pods(api)) == 1)
        made = [call for call in api.calls if call.startswith("create pods")]
        assert len(made) == len(set(made)) == 4
    finally:
        first.stop()
        second.stop()


# ---------------------------------------------------------------- where the others are


@pytest.fixture
def seeking(api: MemoryApi, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What pods show that look for their job, by their addresses; a controller that looks when it is told to."""
    nonces: dict[str, str] = {}
    monkeypatch.setattr(asking.Reports, "seekers_of", lambda reports, job: dict(nonces))
    return nonces


def run_pods(api: MemoryApi) -> None:
    """All pods run, at addresses that end with their numbers."""
    api.run_pods()
    for name in pods(api):
        api.change(PODS, "here", name, {"status": {"podIP": f"10.0.0.{name[-1]}"}})


def of_a_job_that_runs(api: MemoryApi, **spec: object) -> Controller:
    """A controller of a job with this specification, whose pods run; it has not seen that yet."""
    api.create(JOBS, job(**spec))
    controller = looking(api)
    look(controller)
    run_pods(api)
    return controller


def told(api: MemoryApi, pod: str) -> DoorList:
    return DoorList.of((api.get(PODS, "here", pod)["metadata"].get("annotations") or {}).get(DOORS_ANNOTATION, ""))


def look(controller: Controller) -> None:
    read_all(controller)
    controller._look()


def test_pod_that_looks_for_its_job_is_told_where_all_are_and_again_when_that_has_changed(
    api: MemoryApi, seeking: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controllers, "_TELL_S", 0.0)
    controller = of_a_job_that_runs(api, high=2)
    look(controller)
    assert told(api, "a-0") == told(api, "a-1") == DoorList()
    seeking["10.0.0.1"] = "4f"
    look(controller)
    assert (told(api, "a-0"), told(api, "a-1")) == (DoorList(), DoorList(("10.0.0.0", "10.0.0.1"), (), "4f"))
    version = api.get(PODS, "here", "a-1")["metadata"]["resourceVersion"]
    look(controller)
    assert api.get(PODS, "here", "a-1")["metadata"]["resourceVersion"] == version
    api.remove(PODS, "here", "a-0")
    look(controller)
    assert told(api, "a-1") == DoorList(("10.0.0.1",), (), "4f")
    assert told(api, "a-0") == DoorList(("10.0.0.1",)), "with which it was created"


def test_addresses_are_read_after_the_nonce_was_heard(api: MemoryApi, seeking: dict[str, str]) -> None:
    """The controller's own copy may be older than that."""
    api.create(JOBS, job(high=2))
    controller = looking(api)
    look(controller)
    api.run_pods()
    api.change(PODS, "here", "a-0", {"status": {"podIP": "10.0.0.0"}})
    read_all(controller)
    api.change(PODS, "here", "a-1", {"status": {"podIP": "10.0.0.1"}})
    seeking["10.0.0.0"] = "4f"
    controller._look()
    assert told(api, "a-0") == DoorList(("10.0.0.0", "10.0.0.1"), (), "4f")


def test_pod_is_not_told_what_was_meant_for_the_one_before_it(api: MemoryApi, seeking: dict[str, str]) -> None:
    controller = of_a_job_that_runs(api, high=1)
    read_all(controller)
    seeking["10.0.0.0"] = "4f"
    change = api.change

    def late(kind: Kind, namespace: str | None, name: str, patch: Any) -> Any:
        if DOORS_ANNOTATION in patch["metadata"].get("annotations", {}):
            made = api.get(PODS, "here", "a-0")
            api.remove(PODS, "here", "a-0")
            api.create(PODS, made)
        return change(kind, namespace, name, patch)

    api.change = late  # type: ignore[method-assign]
    controller._look()
    api.change = change  # type: ignore[method-assign]
    assert told(api, "a-0") == DoorList()
    look(controller)  # and it is tried again at once
    assert told(api, "a-0").nonce == "4f"


def test_pod_that_shows_another_nonce_all_the_time_is_told_now_and_then(
    api: MemoryApi, seeking: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = of_a_job_that_runs(api, high=1)
    lists, calls = list[str](), api.list
    monkeypatch.setattr(api, "list", lambda *args, labels="", **more: (lists.append(labels), calls(*args, **more))[1])
    for number in range(10):
        seeking["10.0.0.0"] = f"{number}"
        look(controller)
    assert told(api, "a-0").nonce == "0"
    assert len([labels for labels in lists if labels]) == 1
    controller._told_at.clear()
    look(controller)
    assert told(api, "a-0").nonce == "9"


def test_controller_that_may_not_change_pods_says_so_and_does_all_the_rest(
    api: MemoryApi, seeking: dict[str, str]
) -> None:
    controller = of_a_job_that_runs(api, high=2)
    api.refused["change pods a-0"] = "cannot patch resource"
    seeking.update({"10.0.0.0": "4f", "10.0.0.1": "5a"})
    look(controller)
    why = "a-0 cannot be told the addresses of other pods: cannot patch resource"
    assert [one["type"] for one in api.list(EVENTS)[0] if one["message"] == why] == ["Warning"]
    assert told(api, "a-1").nonce == "5a"
    assert controller._pauses == {}
    api.change(JOBS, "here", "a", {"spec": {"workers": 1}})
    look(controller)
    assert pods(api) == ["a-0"]


def test_pods_that_find_their_job_by_themselves_cost_no_calls(api: MemoryApi, saying: Saying, acting: Acting) -> None:
    api.create(JOBS, job(high=2))
    poll_until(lambda: len(pods(api)) == 2)
    saying.run_pods()
    poll_until(lambda: status(api).get("training") == 1)
    versions = [pod["metadata"]["resourceVersion"] for pod in api.list(PODS)[0]]
    saying.wait_for_more(20)
    assert [pod["metadata"]["resourceVersion"] for pod in api.list(PODS)[0]] == versions


def test_page_of_a_pod_that_looks_for_its_job_reaches_its_annotation(
    api: MemoryApi, saying: Saying, acting: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def page(door: tuple[str, int]) -> str:
        return 'elasticflow_seeking{nonce="00112233445566ff"} 1\n'

    monkeypatch.setattr(asking, "_page", page)
    api.create(JOBS, job(high=1))
    poll_until(lambda: len(pods(api)) == 1)
    saying.run_pods()
    poll_until(lambda: told(api, "a-0") == DoorList(("10.0.0.1",), (), "00112233445566ff"))


# ---------------------------------------------------------------- what workers say


class Saying:
    """What the workers of a job say."""

    def __init__(self, api: MemoryApi, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(asking, "EVERY_S", 0.02)
        self.values = {"workers": 1, "view_generation": 1, "step": 1, "samples_per_second": 5, "nodes_wanted": 0}
        self.num_asked = 0
        self._api = api
        monkeypatch.setattr(asking, "_page", self._answer)

    async def _answer(self, door: tuple[str, int]) -> str:
        assert door == ("10.0.0.1", METRICS_PORT)
        self.num_asked += 1
        return "".join(f"elasticflow_{name} {value}\n" for name, value in self.values.items())

    def run_pods(self) -> None:
        """All pods run, and can be asked."""
        self._api.run_pods()
        for pod in self._api.list(PODS)[0]:
            self._api.change(PODS, "here", pod["metadata"]["name"], {"status": {"podIP": "10.0.0.1"}})

    def wait_for_more(self, number: int = 5) -> None:
        before = self.num_asked
        poll_until(lambda: self.num_asked >= before + number)


@pytest.fixture
def saying(api: MemoryApi, monkeypatch: pytest.MonkeyPatch) -> Saying:
    return Saying(api, monkeypatch)


def test_status_tells_of_the_training_and_is_not_written_for_each_step(
    api: MemoryApi, saying: Saying, acting: Acting
) -> None:
    api.create(JOBS, job(high=2))
    poll_until(lambda: len(pods(api)) == 2)
    saying.run_pods()
    poll_until(lambda: status(api).get("training") == 1)
    before = len(api.calls)
    for step in range(2, 12):
        saying.values["step"] = step
        saying.wait_for_more(2)
    assert [call for call in api.calls[before:] if "elasticjobs" in call] == []
    saying.values.update(workers=2, view_generation=2)
    poll_until(lambda: status(api).get("training") == 2)
    assert (status(api)["generation"], status(api)["step"], status(api)["samplesPerSecond"]) == (2, 11, 5)
    assert [call for call in api.calls[before:] if "elasticjobs" in call] == ["replace elasticjobs a"]


def test_each_change_of_the_workers_is_an_event(api: MemoryApi, saying: Saying, acting: Acting) -> None:
    api.create(JOBS, job(high=2))
    poll_until(lambda: len(pods(api)) == 2)
    saying.run_pods()

    def told() -> list[str]:
        return [one["message"] for one in api.list(EVENTS)[0] if one["reason"] == "Trains"]

    poll_until(lambda: told() == ["workers that train: 1 (view 1, step 1)"])
    saying.values["step"] = 11
    saying.wait_for_more()
    saying.values.update(workers=2, view_generation=2)
    poll_until(lambda: told()[1:] == ["workers that train: 2 (view 2, step 11)"])
    for number in (1, 2):
        api.change_spec(JOBS, "here", "a", workers=number)
        looks = acting.looks
        poll_until(lambda number=number: status(api).get("wanted") == number)
        poll_until(lambda looks=looks: acting.looks > looks + 1)
    assert len(told()) == 2


def test_job_whose_pod_ends_well_while_another_one_trains_on_is_not_over(
    api: MemoryApi, saying: Saying, acting: Acting
) -> None:
    api.create(JOBS, job(high=2))
    poll_until(lambda: len(pods(api)) == 2)
    saying.run_pods()
    poll_until(lambda: status(api).get("training") == 1)
    api.end_pod("a-1", 0)
    looks = acting.looks
    poll_until(lambda: acting.looks > looks + 2)
    assert (status(api)["phase"], pods(api)) == ("Running", ["a-0", "a-1"])
    api.end_pod("a-0", 0)
    poll_until(lambda: status(api)["phase"] == "Succeeded")


def test_new_controller_waits_for_an_answer_before_it_takes_a_job_for_over(api: MemoryApi) -> None:
    controller = of_a_job_that_runs(api, high=2)
    api.end_pod("a-1", 0)
    look(controller)
    assert status(api)["phase"] == "Running"
    controller._asks_since = time.time() - LISTEN_S
    look(controller)
    assert status(api)["phase"] == "Succeeded"


def test_pod_that_does_not_train_goes_first(api: MemoryApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking.Reports, "idle_of", lambda reports, job: frozenset({"10.0.0.0"}))
    controller = of_a_job_that_runs(api, high=2)
    look(controller)
    api.change(JOBS, "here", "a", {"spec": {"workers": 1}})
    look(controller)
    assert pods(api) == ["a-1"]


def test_pods_are_read_again_before_a_job_is_left_without_one(api: MemoryApi) -> None:
    """What the controller knows of the other pods may be old."""
    controller = of_a_job_that_runs(api, low=2, high=3, backoffLimit=0)
    look(controller)
    api.end_pod("a-2", 139)
    read_all(controller)
    api.end_pod("a-1", 139)
    controller._look()
    assert (status(api)["crashes"], status(api)["phase"]) == (0, "Running")
    look(controller)
    assert status(api)["phase"] == "Failed"


def test_pods_that_are_lost_too_often_are_not_replaced_and_an_event_tells_it_once(api: MemoryApi) -> None:
    controller = of_a_job_that_runs(api, low=2, high=3, backoffLimit=0)
    look(controller)
    api.end_pod("a-2", 139)
    for _ in range(3):
        look(controller)
    assert (pods(api), status(api)["cap"], status(api)["phase"]) == (["a-0", "a-1"], 2, "Running")
    (running,) = [one for one in status(api)["conditions"] if one["type"] == "Running"]
    assert running["reason"] == "PodsNotReplaced"
    told = [one for one in api.list(EVENTS)[0] if one["message"] == running["message"]]
    assert [one["type"] for one in told] == ["Warning"]
    another = looking(api)
    another._look()
    assert [one for one in api.list(EVENTS)[0] if one["message"] == running["message"]] == told


@pytest.mark.parametrize(("per_s", "is_told"), [(100.0, True), (0.01, False)], ids=["few jobs", "many jobs"])
def test_progress_is_told_now_and_then_and_less_often_for_many_jobs(
    api: MemoryApi, saying: Saying, acting: Acting, monkeypatch: pytest.MonkeyPatch, per_s: float, is_told: bool
) -> None:
    monkeypatch.setattr(controllers, "_PROGRESS_S", 0.02)
    monkeypatch.setattr(controllers, "_PROGRESS_PER_S", per_s)
    api.create(JOBS, job(high=1))
    poll_until(lambda: len(pods(api)) == 1)
    saying.run_pods()
    poll_until(lambda: status(api).get("step") == 1)
    saying.values["step"] = 7
    if is_told:
        poll_until(lambda: status(api)["step"] == 7)
    else:
        saying.wait_for_more(10)
        assert status(api)["step"] == 1


def test_job_that_chooses_its_size_has_the_pods_for_which_its_training_asks(
    api: MemoryApi, saying: Saying, acting: Acting
) -> None:
    api.create(JOBS, job(autoscale={}))
    poll_until(lambda: pods(api) == ["a-0"])
    saying.run_pods()
    saying.wait_for_more()
    assert pods(api) == ["a-0"]
    saying.values["nodes_wanted"] = 3
    poll_until(lambda: len(pods(api)) == 3)
    saying.run_pods()
    saying.values["nodes_wanted"] = 2
    poll_until(lambda: status(api).get("asked") == 2)
    assert len(pods(api)) == 3  # the training lets one go
    before = len(api.calls)
    api.end_pod("a-0", LEFT)
    poll_until(lambda: "delete pods a-0" in api.calls[before:])
    saying.wait_for_more()
    assert pods(api) == ["a-1", "a-2"]
    assert "create pods a-0" not in api.calls[before:]


def test_nobody_is_asked_by_a_controller_that_stands_by(api: MemoryApi, saying: Saying, acting: Acting) -> None:
    api.create(JOBS, job(high=1))
    poll_until(lambda: len(pods(api)) == 1)
    saying.run_pods()
    saying.wait_for_more()
    lease = api.get(LEASES, "system", CONTROLLER)
    api.replace(LEASES, {**lease, "spec": {**lease["spec"], "holderIdentity": "another"}})
    acting.controller._lease.keep()
    poll_until(lambda: not acting.controller.leads)
    poll_until(lambda: acting.controller._reports.of("here/a") is None)


# ---------------------------------------------------------------- the lease


class Holder:
    """A controller, from the view of the lease."""

    now = 0.0

    def __init__(self, api: MemoryApi, name: str) -> None:
        self.lease = Lease(
            api,  # type: ignore[arg-type]
            "system",
            name,
            clock=lambda: Holder.now,
            wall=lambda: 1e9,
        )


@pytest.fixture
def holders(api: MemoryApi) -> tuple[Lease, Lease]:
    Holder.now = 0.0
    return Holder(api, "one").lease, Holder(api, "two").lease


def test_lease_has_one_holder_and_another_one_when_it_is_not_renewed(holders: tuple[Lease, Lease]) -> None:
    one, two = holders
    assert (one.keep(), two.keep()) == (True, False)
    Holder.now = DURATION_S - 1
    assert one.keep()
    assert not two.keep()  # it sees that it was renewed
    Holder.now = 2 * DURATION_S - 2
    assert not one.is_mine  # long before another one may take it
    assert not two.keep()
    Holder.now = 2 * DURATION_S
    assert two.keep()
    assert not one.keep()


def test_lease_that_is_given_up_is_free(holders: tuple[Lease, Lease], api: MemoryApi) -> None:
    one, two = holders
    one.keep()
    one.give_up()
    assert not one.is_mine
    assert two.keep()
    assert api.get(LEASES, "system", CONTROLLER)["spec"]["holderIdentity"] == "two"


def test_lease_that_two_ask_for_at_once_has_one_holder(
    holders: tuple[Lease, Lease], api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = holders
    one.keep()
    one.give_up()
    reads = MemoryApi.get

    def get(self: MemoryApi, *args: Any) -> Any:
        found = reads(self, *args)
        monkeypatch.setattr(MemoryApi, "get", reads)
        assert one.keep()
        return found

    monkeypatch.setattr(MemoryApi, "get", get)
    assert not two.keep()
    assert one.is_mine


def test_lease_is_kept_for_a_while_if_nobody_answers(holders: tuple[Lease, Lease], api: MemoryApi) -> None:
    one, _ = holders
    one.keep()
    api.down = True
    Holder.now = DURATION_S / 2 - 1
    assert one.keep()
    Holder.now = DURATION_S / 2
    assert not one.keep()


# ---------------------------------------------------------------- the page


def test_page_says_whether_the_controller_lives() -> None:
    metrics, ready = Metrics(), threading.Event()
    page = Page("127.0.0.1", 0, metrics=metrics, is_ready=ready.is_set)
    page.start()
    try:

        def ask(path: str) -> tuple[int, str]:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{page.port}{path}") as answer:
                    return answer.status, answer.read().decode()
            except HTTPError as error:
                with error:
                    return error.code, error.read().decode()

        assert ask("/healthz") == (200, "ok\n")
        assert ask("/readyz")[0] == 503
        ready.set()
        assert ask("/readyz") == (200, "ok\n")
        metrics.leads(True)
        metrics.looked(time.time() - ALIVE_S - 1)
        assert ask("/healthz") == (503, "it hangs\n")
        assert "elasticflow_controller_looks_total 1" in ask("/metrics")[1]
        assert ask("/else")[0] == 404
    finally:
        page.stop()


def test_controller_that_ends_its_calls_after_it_has_lost_its_lease_does_not_hang_later() -> None:
    metrics = Metrics()
    metrics.leads(True)
    metrics.lives(100.0)
    assert metrics.hangs(100.0 + ALIVE_S + 1)
    metrics.leads(False)
    metrics.lives(101.0)
    metrics.looked(102.0)
    assert not metrics.hangs(102.0 + ALIVE_S + 1)
