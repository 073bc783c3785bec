"""Trainings on a real Kubernetes: its API server, scheduler and controller manager, and pods that are processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("lightkube")

from ef_common.errors import ClusterRefused
from ef_common.kubernetes.api import Api
from ef_common.kubernetes.kinds import JOBS, NODES, PODS, SECRETS, SERVICES
from ef_common.kubernetes.resource import Json
from tests.faults.conftest import check_gentle
from tests.faults.hosts import ENOUGH
from tests.kubernetes import cluster as clusters
from tests.kubernetes import control_plane
from tests.kubernetes.cluster import Cluster, Training

pytestmark = clusters.MARKS
LEFT_OUT = "The job is not audited, as the event logs of some workers are missing."


def test_job_starts_with_what_fits_and_grows(training: Training, cluster: Cluster) -> None:
    for name in ("s1", "s2"):
        cluster.serve(name)
    cluster.wait_until(lambda: cluster.is_running("s1") and cluster.is_running("s2"), "serving")
    training.submit(1, 4)
    first = training.wait_for_world(2)
    training.wait_for_steps()
    status = cluster.status("a")
    assert (status["phase"], status["wanted"], status["starts"]) == ("Running", 2, 1)
    cluster.remove("s1")
    training.wait_for_world(3, after=first)
    training.wait_for_steps()
    check_gentle(training)
    (row,) = map(json.loads, cluster.elasticflow("status", "--json").splitlines())
    assert (row["name"], row["phase"], row["running"], row["max"]) == ("a", "Running", 3, 4)
    training.finish()
    assert cluster.status("a")["reason"] == "the training is over"
    assert {"Running: grows from 0 to 2 pods", "Succeeded: the training is over"} & set(cluster.events("a"))
    cluster.wait_until(lambda: set(cluster.pods("a").values()) == {"Succeeded"}, "the end of the pods")


def test_serving_takes_room_and_gives_it_back_and_no_step_is_lost(training: Training, cluster: Cluster) -> None:
    training.submit(1, 4)
    first = training.wait_for_world(4)
    training.wait_for_steps()
    for name in ("s1", "s2"):
        cluster.serve(name)
    second = training.wait_for_world(2, after=first)
    cluster.wait_until(lambda: cluster.is_running("s1") and cluster.is_running("s2"), "serving")
    training.wait_for_steps()
    check_gentle(training)
    assert cluster.status("a")["crashes"] == 0
    for name in ("s1", "s2"):
        cluster.remove(name)
    training.wait_for_world(4, after=second)
    training.wait_for_steps()
    check_gentle(training)
    training.finish()


def test_pod_that_is_killed_is_replaced(training: Training, cluster: Cluster) -> None:
    training.submit(1, 3)
    first = training.wait_for_world(3)
    training.wait_for_steps()
    victim = sorted(cluster.pods("a"))[0]
    signal_all(cluster, victim)
    training.wait_for_world(3, after=first)
    training.wait_for_steps()
    status = cluster.status("a")
    assert (status["crashes"], status["phase"], status["starts"]) == (1, "Running", 1)
    assert [event for event in cluster.events("a") if f"{victim} ended with status 137" in event]
    cluster.wait_until(lambda: "reason" not in cluster.status("a"), "the loss to be made up for")
    training.finish()


def signal_all(cluster: Cluster, pod: str) -> None:
    os.killpg(cluster.kubelets.process_of(pod).pid, signal.SIGKILL)


def test_controller_that_is_killed_is_replaced_and_nothing_is_done_twice(training: Training, cluster: Cluster) -> None:
    training.submit(1, 4)
    first = training.wait_for_world(4)
    cluster.controllers[0].kill()
    cluster.serve("s1")  # the scheduler makes room without it
    second = training.wait_for_world(3, after=first)
    cluster.remove("s1")
    cluster.start_controller()
    training.wait_for_world(4, after=second)
    training.wait_for_steps()
    check_gentle(training)
    training.finish()


def test_second_controller_takes_over_from_one_that_stands_still(training: Training, cluster: Cluster) -> None:
    training.submit(1, 2)
    first = training.wait_for_world(2)
    cluster.start_controller()
    cluster.controllers[0].send_signal(signal.SIGSTOP)
    cluster.elasticflow("scale", "a", "1")
    training.wait_for_world(1, after=first)
    cluster.controllers[0].send_signal(signal.SIGCONT)
    cluster.elasticflow("scale", "a", "2")
    training.wait_for_pods(2)
    training.wait_for_steps()
    check_gentle(training)
    training.finish()


def test_two_jobs_share_equally(training: Training, cluster: Cluster, tmp_path: Path) -> None:
    training.submit(1, 4)
    first = training.wait_for_world(4)
    training.wait_for_steps()
    other = Training(tmp_path / "b", cluster, "b").submit(1, 4)
    second = training.wait_for_world(2, after=first)
    other.wait_for_world(2)
    other.wait_for_steps()
    training.wait_for_steps()
    check_gentle(training)
    other.finish()
    training.wait_for_world(4, after=second)
    check_gentle(training)
    training.finish()


def test_job_that_is_suspended_goes_on_from_its_checkpoint(training: Training, cluster: Cluster) -> None:
    training.submit(1, 2)
    training.wait_for_world(2)
    training.wait_for_steps(10)
    assert "is suspended" in cluster.elasticflow("scale", "a", "0")
    training.wait_for_phase("Suspended")
    assert cluster.pods("a") == {}
    check_gentle(training)
    cluster.elasticflow("scale", "a", "2")
    training.wait_until(lambda _: [e for e in training.events("run") if e["resumed"]], "a run that goes on")
    training.wait_for_phase("Running")
    assert cluster.status("a")["starts"] == 2
    training.finish()


def test_all_pods_are_lost_and_the_job_starts_again_from_its_checkpoint(training: Training, cluster: Cluster) -> None:
    training.submit(2, 2, options={"checkpoint": f"file://{training.directory}/checkpoints"})  # after every second step
    training.wait_for_world(2)
    training.wait_for("checkpoint")
    for pod in list(cluster.pods("a")):
        signal_all(cluster, pod)
    training.wait_until(lambda _: [e for e in training.events("run") if e["resumed"]], "a run that goes on")
    training.wait_for_phase("Running")
    assert cluster.status("a")["crashes"] == 1
    training.finish()


def test_exception_in_the_script_fails_the_job(training: Training, cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise ValueError('this is wrong')")
    command = (sys.executable, "-m", "ef_common.cli", "run", f"--run-dir={training.directory}", f"{tmp_path}/bad.py")
    training.submit(1, 2, command=command)
    training.wait_for_phase("Failed")
    assert "the training has failed, as a-" in cluster.status("a")["reason"]
    failed = next(one for one in cluster.status("a")["conditions"] if one["type"] == "Failed")
    assert (failed["status"], failed["reason"]) == ("True", "TrainingFailed")
    cluster.wait_until(lambda: "Running" not in cluster.pods("a").values(), "the end of the pods")


def test_job_that_needs_what_no_node_has_waits_and_says_so(training: Training, cluster: Cluster) -> None:
    training.submit(5, 6)
    cluster.wait_until(lambda: "no room" in cluster.status("a").get("reason", ""), "its reason")
    assert cluster.status("a")["phase"] == "Pending"
    assert cluster.pods("a") == {}
    assert "there is no room for 5 pods, the minimum" in cluster.elasticflow("status", "a")


def test_node_that_is_cordoned_gets_no_pod(training: Training, cluster: Cluster) -> None:
    cluster.api.change(NODES, None, "node4", {"spec": {"unschedulable": True}})
    try:
        training.submit(1, 4)
        training.wait_for_world(3)
        training.wait_for_pods(3)
        assert cluster.status("a")["wanted"] == 3
    finally:
        cluster.api.change(NODES, None, "node4", {"spec": {"unschedulable": None}})
    training.wait_for_pods(4)


def test_job_that_makes_no_sense_is_refused_or_fails_with_a_sentence(training: Training, cluster: Cluster) -> None:
    with pytest.raises(ClusterRefused, match="minWorkers"):
        training.submit(0, 2)
    if control_plane.knows_rules():
        with pytest.raises(ClusterRefused, match="minWorkers must not be greater than maxWorkers"):
            training.submit(3, 2)
        return
    training.submit(3, 2)  # an older API server has no rule for two fields
    training.wait_for_phase("Failed")
    assert cluster.status("a")["reason"].startswith("minWorkers must not be greater than maxWorkers")
    assert cluster.pods("a") == {}


def test_controller_has_no_rights_but_those_that_it_needs(cluster: Cluster) -> None:
    api = Api(str(cluster.kubeconfig()))
    with pytest.raises(ClusterRefused, match="cannot list resource"):
        api.list(SECRETS)
    with pytest.raises(ClusterRefused, match="cannot patch resource"):
        api.change(SERVICES, "default", "a-0", {"metadata": {"labels": {"a": "b"}}})
    with pytest.raises(ClusterRefused, match="cannot update resource"):
        api.replace(PODS, {"metadata": {"namespace": "default", "name": "a-0"}}, sub="status")
    with pytest.raises(ClusterRefused, match="cannot patch resource"):
        api.change(JOBS, "default", "a", {"spec": {"workers": 1}})
    api.close()


def test_report_has_the_logs_of_all_pods_and_says_which_are_gone(training: Training, cluster: Cluster) -> None:
    training.submit(1, 2, apart=True)
    found = reported(cluster, lambda found: found["figures"]["world_size"] == 2 and found["figures"]["step"])
    assert {lane["host"] for lane in found["lanes"]} == {"a-0", "a-1"}
    assert found["audit"]["ok"] is True
    assert {line.split("  ")[0] for line in cluster.elasticflow("logs", "a").splitlines()} == {"a-0", "a-1"}
    page = training.directory / "page.html"
    assert cluster.elasticflow("report", "a", f"--output={page}") == f"The report is in {page}\n"
    assert "default/a" in page.read_text()

    signal_all(cluster, "a-0")
    found = reported(cluster, lambda found: found["audit"]["ok"] is None and found["figures"]["world_size"] == 2)
    assert found["audit"]["why"] == LEFT_OUT
    assert {lane["host"] for lane in found["lanes"] if lane["how"] != "silent"} >= {"a-0", "a-1"}
    lines = cluster.call("report", "a", "--json").stderr.splitlines()
    assert lines[0].startswith("The event logs of these workers are missing, as no pod that runs has them: a-0-")
    with ThreadPoolExecutor(1) as reader:
        told = reader.submit(cluster.elasticflow, "logs", "--follow", "a")
        for folder in cluster.kubelets.outputs.glob("volumes/*/own"):
            (folder / ENOUGH).touch()
        training.wait_for_phase("Succeeded")
        assert {line.split("  ")[0] for line in told.result().splitlines()} == {"a-0", "a-1"}
    late = cluster.call("report", "a")
    assert (late.returncode, late.stdout) == (1, "")
    assert "no pod of a runs" in late.stderr


def reported(cluster: Cluster, is_enough: Callable[[Json], object]) -> Json:
    """The first report of which that is so."""
    reports: list[Json] = []

    def look() -> bool:
        done = cluster.call("report", "a", "--json")
        reports.extend(map(json.loads, done.stdout.splitlines()))
        return bool(done.returncode == 0 and is_enough(reports[-1]))

    cluster.wait_until(look, "a report")
    return reports[-1]
