"""What the controller keeps of pods and nodes of others is all that it reads of them, and little."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ef_common.kubernetes import excerpts, reading
from ef_common.kubernetes.kinds import NODES, PODS
from ef_common.kubernetes.resource import JOB_LABEL, Json
from ef_common.kubernetes.watching import Copy
from tests.kubernetes.memory_api import MemoryApi
from tests.kubernetes.objects import GPU, node
from tests.waiting import poll_until

SMALL = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"cpu": "1", GPU: "1"}}
TAINT = {"key": "a", "value": "b", "effect": "NoSchedule"}


def pod(name: str = "web", **more: Any) -> Json:
    """A pod of others, with some of what there is in real ones."""
    container = {"name": "web", "image": "web:1", "resources": SMALL, "env": [{"name": "A", "value": "b" * 500}]}
    spec = {"nodeName": "n1", "containers": [container], "serviceAccountName": "web", **more.pop("spec", {})}
    meta = {"name": name, "namespace": "shop", "labels": {"app": "web"}, "annotations": {"sum": "c" * 500}}
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}], **more.pop("status", {})}
    return {"metadata": {**meta, "managedFields": [{"manager": "kubelet"}], **more}, "spec": spec, "status": status}


@pytest.mark.parametrize(
    "one",
    [
        pod(),
        pod(spec={"containers": [{"name": "a"}]}),
        pod(spec={"containers": [{"name": "a", "resources": SMALL}, {"name": "b", "resources": SMALL}]}),
        pod(spec={"initContainers": [{"name": "a", "resources": {"requests": {"cpu": "3"}}}]}),
        pod(spec={"initContainers": [{"name": "a", "resources": SMALL, "restartPolicy": "Always"}]}),
        pod(spec={"resources": {"requests": {"cpu": "5"}}}),
        pod(spec={"overhead": {"cpu": "250m", "memory": "1.5Mi"}}),
        pod(status={"phase": "Succeeded"}),
        pod(status={"phase": "Pending", "nominatedNodeName": "n1"}, spec={"nodeName": None}),
        pod(status={"phase": "Pending"}, spec={"nodeName": None}),
    ],
    ids=lambda one: json.dumps([one["spec"], one["status"]])[-40:],
)
def test_excerpt_of_a_pod_of_others_takes_the_same_room(one: Json) -> None:
    made = excerpts.of_pod(one)
    assert made is not None
    nodes = [node("n1"), node("n2")]
    assert reading.nodes_of(nodes, [made, made]) == reading.nodes_of(nodes, [one, one])
    assert reading.key_of(made) == "shop/web"
    assert not reading.job_key_of(made)
    assert len(json.dumps(made)) < 400


def test_pod_of_a_job_is_kept_as_a_whole() -> None:
    assert excerpts.of_pod(pod(labels={JOB_LABEL: "a"})) is None


@pytest.mark.parametrize("more", [{}, {"unschedulable": True}, {"taints": [TAINT]}], ids=str)
def test_excerpt_of_a_node_has_the_same_room_for_the_same_pods(more: Json) -> None:
    whole = node("n1", **more)
    whole["status"] |= {"images": [{"names": ["web:1"]}] * 50, "nodeInfo": {"kubeletVersion": "v1.36.2"}}
    whole["status"]["conditions"][0]["lastHeartbeatTime"] = "2026-01-01T00:00:00Z"
    made = excerpts.of_node(whole)
    assert reading.nodes_of([made], []) == reading.nodes_of([whole], [])
    for spec in ({}, {"nodeSelector": {"zone": "east"}}, {"nodeSelector": {"zone": "west"}}, {"tolerations": [TAINT]}):
        assert reading.places_of(spec, [made]) == reading.places_of(spec, [whole])
    assert len(json.dumps(made)) < 500


def test_change_of_what_nobody_reads_wakes_nobody(api: MemoryApi) -> None:
    news = list[None]()
    copy = Copy(api, PODS, on_change=lambda: news.append(None), excerpt=excerpts.of_pod)  # type: ignore[arg-type]
    copy.start()
    poll_until(lambda: api._watches)
    api.create(PODS, pod())
    api.create(PODS, pod("worker", labels={JOB_LABEL: "a"}))
    poll_until(lambda: copy.num_objects == 2)
    poll_until(lambda: len(news) == 3)  # the list, and two pods

    def version() -> str:
        (one,) = (one for one in copy.objects() if one["metadata"]["name"] == "web")
        return str(one["metadata"]["resourceVersion"])

    for number in range(10):
        made = api.change(PODS, "shop", "web", {"status": {"containerStatuses": [{"restartCount": number}]}})
    poll_until(lambda: version() == made["metadata"]["resourceVersion"])  # else a list would seem to be newer
    assert len(news) == 3
    for patch in ({"status": {"phase": "Failed"}}, {"spec": {"nodeName": "n2"}}):
        before = len(news)
        api.change(PODS, "shop", "web", patch)
        poll_until(lambda before=before: len(news) == before + 1)
    api.change(PODS, "shop", "worker", {"status": {"containerStatuses": []}})
    poll_until(lambda: len(news) == 6)
    worker, web = (api.get(PODS, "shop", name) for name in ("worker", "web"))
    copy.update(worker)
    assert copy._take("MODIFIED", worker)  # what a call has returned is news when it is watched
    assert not copy._take("MODIFIED", web)
    api.remove(PODS, "shop", "web")
    poll_until(lambda: len(news) == 7)
    copy.stop()


def test_heartbeat_of_a_node_wakes_nobody_and_its_end_does(api: MemoryApi) -> None:
    news = list[None]()
    copy = Copy(api, NODES, on_change=lambda: news.append(None), excerpt=excerpts.of_node)  # type: ignore[arg-type]
    copy.start()
    poll_until(lambda: api._watches)
    (name,) = (one["metadata"]["name"] for one in copy.objects())
    before = len(news)
    for time in ("10", "20"):
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": time}
        made = api.change(NODES, None, name, {"status": {"conditions": [ready]}})
    poll_until(lambda: copy.objects()[0]["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"])
    assert len(news) == before
    api.change(NODES, None, name, {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}})
    poll_until(lambda: len(news) == before + 1)
    copy.stop()
