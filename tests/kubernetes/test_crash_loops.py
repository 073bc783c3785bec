"""Pods that crash again and again on a real Kubernetes: on one node, while others train, and everywhere."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube")

from ef_common.core.cluster.losses import STEADY_S
from ef_common.errors import ClusterConflict
from ef_common.kubernetes.kinds import EVENTS, JOBS, NODES, PODS
from ef_common.kubernetes.reading import time_of
from tests.faults import networks
from tests.faults.conftest import check_gentle
from tests.kubernetes import cluster as clusters
from tests.kubernetes.cluster import Cluster, Training
from tests.kubernetes.kubelets import name_of
from tests.kubernetes.test_cluster import signal_all

pytestmark = clusters.MARKS

BROKEN = 4
"""The node on which all pods crash."""
QUIET_S = 10.0
"""The controller looks five times meanwhile, and replaces a pod that was lost for the fifth time in a row."""
CRASHING = ("sh", "-c", 'test ! -e broken-$(hostname -I) || exit 139; exec "$@"', "sh")
"""Before the command of a pod: on a node that is broken, it crashes at once."""


def marker(training: Training, node: int = BROKEN) -> Path:
    """A file that only pods of this node heed: where it is, they crash."""
    return training.directory / f"broken-{networks.address(node)}"


@contextlib.contextmanager
def cordoned(cluster: Cluster, node: int) -> Iterator[None]:
    cluster.api.change(NODES, None, name_of(node), {"spec": {"unschedulable": True}})
    try:
        yield
    finally:
        cluster.api.change(NODES, None, name_of(node), {"spec": {"unschedulable": None}})


def begin(training: Training, cluster: Cluster, **spec: Any) -> int:
    """A training in three pods, to which the broken node comes; the generation of its first view."""
    marker(training).touch()
    with cordoned(cluster, BROKEN):
        training.submit(2, 4, before=CRASHING, **spec)
        first = training.wait_for_world(3)
        training.wait_for_pods(3)
        training.wait_for_steps()
    return first


def wait_for_cap(training: Training, cluster: Cluster, cap: int | None, **fields: Any) -> None:
    """Wait until the job may have so many pods, and its status says this, too."""
    expected = {**fields, "cap": cap}
    cluster.wait_until(
        lambda: expected.items() <= {"cap": None, **training.status()}.items(), f"the status to say {expected}"
    )


def lost(crashes: str, *, limit: int, pod: str) -> str:
    return f"pods were lost {crashes} times in a row, and backoffLimit is {limit}: {pod}"


def check_told(training: Training, cluster: Cluster, *, crashes: int, limit: int) -> None:
    """The condition, the event and the table of jobs tell which pod was lost, and that none replaces it."""
    status = training.status()
    assert (status["phase"], status["starts"], status["crashes"]) == ("Running", 1, crashes)
    (running,) = [one for one in status["conditions"] if one["type"] == "Running"]
    assert (running["status"], running["reason"]) == ("True", "PodsNotReplaced")
    said = lost(str(crashes), limit=limit, pod="a-3 ended with status 139")
    assert running["message"] == f"{said}; no pods replace them for 10 minutes"

    def told() -> list[str]:
        return [one["type"] for one in cluster.api.list(EVENTS, "default")[0] if one["message"] == running["message"]]

    cluster.wait_until(lambda: told() == ["Warning"], "the event")
    assert running["message"] in cluster.elasticflow("status", "a")


def check_rest(training: Training, cluster: Cluster, *, pods: int) -> None:
    """The job trains, and nobody starts further pods."""
    before = len(cluster.kubelets.started)
    time.sleep(QUIET_S)
    training.wait_for_steps()
    assert len(cluster.kubelets.started) == before
    assert list(cluster.pods("a").values()) == ["Running"] * pods


def let_ten_minutes_pass(training: Training, cluster: Cluster) -> None:
    """The last loss was longer ago."""
    while True:
        found = cluster.api.get(JOBS, "default", training.name)
        status = {**found["status"], "crashedAt": time_of(time.time() - STEADY_S - 1)}
        with contextlib.suppress(ClusterConflict):  # the controller has written it meanwhile
            cluster.api.replace(JOBS, {**found, "status": status}, sub="status")
            return


def test_job_goes_on_without_a_node_on_which_each_pod_crashes_and_tries_again_later(
    training: Training, cluster: Cluster
) -> None:
    first = begin(training, cluster, backoffLimit=2)
    wait_for_cap(training, cluster, 3, crashes=3)
    check_told(training, cluster, crashes=3, limit=2)
    check_rest(training, cluster, pods=3)

    cluster.api.change(JOBS, "default", "a", {"spec": {"backoffLimit": 3}})  # at once
    wait_for_cap(training, cluster, 3, crashes=4)
    check_told(training, cluster, crashes=4, limit=3)
    let_ten_minutes_pass(training, cluster)  # once, and not more often
    wait_for_cap(training, cluster, 3, crashes=5)
    check_rest(training, cluster, pods=3)
    check_told(training, cluster, crashes=5, limit=3)

    check_gentle(training)
    assert training.events("view")[-1]["generation"] == first, "the others have noticed it"
    marker(training).unlink()
    let_ten_minutes_pass(training, cluster)
    training.wait_for_world(4, after=training.events("view")[-1]["generation"])
    training.wait_for_steps()
    wait_for_cap(training, cluster, None, starts=1)
    cluster.wait_until(lambda: "reason" not in training.status(), "the loss to be made up for")
    training.finish()


def test_pods_lost_meanwhile_are_not_replaced_and_those_that_went_for_others_are(
    training: Training, cluster: Cluster
) -> None:
    first = begin(training, cluster, backoffLimit=0)
    wait_for_cap(training, cluster, 3, crashes=1)
    for name in ("s1", "s2"):  # one of them has the node that is broken
        cluster.serve(name)
    cluster.wait_until(lambda: cluster.is_running("s1") and cluster.is_running("s2"), "serving")
    second = training.wait_for_world(2, after=first)
    assert training.status()["cap"] == 3
    (gives_back,) = [name for name in ("s1", "s2") if node_of(cluster, name) != name_of(BROKEN)]
    cluster.remove(gives_back)
    third = training.wait_for_world(3, after=second)
    check_gentle(training)
    wait_for_cap(training, cluster, 3, crashes=1)

    victim, last, *_ = sorted(cluster.pods("a"), reverse=True)
    signal_all(cluster, victim)
    training.wait_for_world(2, after=third)
    wait_for_cap(training, cluster, 2, phase="Running")
    check_rest(training, cluster, pods=2)
    signal_all(cluster, last)
    training.wait_for_phase("Failed")
    check_failed(training, cluster, crashes=r"\d", limit=0, pod=f"{last} ended with status 137")


def node_of(cluster: Cluster, pod: str) -> str:
    node: str = cluster.api.get(PODS, "default", pod)["spec"]["nodeName"]
    return node


def check_failed(training: Training, cluster: Cluster, *, crashes: str, limit: int, pod: str) -> None:
    """The condition, the event and the table of jobs tell of the losses, and nobody starts further pods."""
    status = training.status()
    (failed,) = [one for one in status["conditions"] if one["type"] == "Failed"]
    assert (failed["status"], failed["reason"]) == ("True", "BackoffLimitExceeded")
    assert re.fullmatch(lost(crashes, limit=limit, pod=pod), failed["message"])
    assert status["reason"] == failed["message"]
    cluster.wait_until(lambda: f"Failed: {failed['message']}" in cluster.events("a"), "the event")
    assert failed["message"] in cluster.elasticflow("status", "a")
    before = len(cluster.kubelets.started)
    time.sleep(QUIET_S)
    assert len(cluster.kubelets.started) == before


SCRIPT = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.mark.parametrize("what", ["command", "script"])
def test_job_of_which_each_pod_crashes_fails_and_says_which_one_and_how(
    training: Training, cluster: Cluster, what: str
) -> None:
    script = training.directory / "crashes.py"
    script.write_text(SCRIPT)
    run = (sys.executable, "-m", "ef_common.cli", "run", f"--run-dir={training.directory}", str(script))
    command, status = {"command": (("sh", "-c", "exit 3"), 3), "script": (run, 139)}[what]
    training.submit(1, 2, command=command, backoffLimit=3)
    training.wait_for_phase("Failed")
    assert training.status()["crashes"] == 4
    check_failed(training, cluster, crashes="4", limit=3, pod=f"a-[01] ended with status {status}")
    assert "Failed" in cluster.pods("a").values(), "a pod whose logs can be read"
