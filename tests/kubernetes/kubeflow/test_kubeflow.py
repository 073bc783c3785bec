"""The examples for Kubeflow's users: a real API server takes them, and the pods of each train together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from shlex import quote
from shutil import which
from typing import Any

import psutil
import pytest

pytest.importorskip("lightkube")

from ef_common.errors import ClusterConflict, ClusterFailed
from ef_common.kubernetes.kinds import PODS, SECRETS, SERVICES
from ef_common.kubernetes.resource import Json
from ef_common.testing.harness_run import Run
from tests.faults import networks
from tests.faults.hosts import ENOUGH
from tests.faults.test_mpi import AS_ROOT
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT
from tests.kubernetes import cluster as clusters
from tests.kubernetes.cluster import ENVIRON, GUARD_S, Cluster
from tests.kubernetes.kubeflow import definitions
from tests.kubernetes.kubeflow.examples import NAMES, example, with_containers, without_mounts
from tests.kubernetes.kubeflow.operators import (
    Made,
    hostfile_of,
    of_mpijob,
    of_pytorchjob,
    of_tfjob,
    of_trainjob,
)

pytestmark = clusters.MARKS

HERE = "default"
CONTROL = 4
"""A node without a GPU."""
ELASTICFLOW = str(Path(sys.executable).with_name("elasticflow"))
KINDS = {**definitions.KINDS, "Service": SERVICES}
QUIET_S = 15.0
"""Pods that would train alone would do so meanwhile."""


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    with clusters.cluster({1: 1, 2: 1, 3: 1, CONTROL: 0}) as running:
        for definition in definitions.definitions():
            running.api.create(definitions.DEFINITIONS, definition)
        for kind in definitions.KINDS.values():
            running.wait_until(lambda kind=kind: is_served(running, kind), kind.plural)
        yield running


def is_served(cluster: Cluster, kind: Any) -> bool:
    with contextlib.suppress(ClusterFailed):
        cluster.api.list(kind, HERE)
        return True
    return False


@pytest.fixture
def cluster(four: Cluster) -> Iterator[Cluster]:
    yield four
    for kind in (*definitions.KINDS.values(), SERVICES, SECRETS):
        for thing in four.api.list(kind, HERE)[0]:
            if thing["metadata"]["name"].startswith(("digits", "elasticflow")):
                four.api.delete(kind, HERE, thing["metadata"]["name"])
    four.clear()
    for node in range(1, CONTROL + 1):
        for pid in networks.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def kept(sent: Any, got: Any) -> bool:
    """Whether an object has all that was sent: an API server drops fields that it does not know."""
    if isinstance(sent, dict):
        return isinstance(got, dict) and all(name in got and kept(value, got[name]) for name, value in sent.items())
    if isinstance(sent, list):
        return len(sent) == len(got) and all(map(kept, sent, got))
    return bool(sent == got)


class Training(Run):
    """A training in pods that a stand-in for an operator of Kubeflow's makes.

    Args:
        directory: The run directory of all pods.
        cluster: The cluster.
        environ: Variables of the training.
    """

    def __init__(self, directory: Path, cluster: Cluster, environ: Mapping[str, str] = {}) -> None:
        super().__init__(directory, guard_s=GUARD_S)
        self._cluster, self._environ = cluster, environ
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "digits-token", "namespace": HERE}}
        cluster.api.create(SECRETS, {**secret, "stringData": {"token": "not for others"}})

    def submit(self, thing: Json) -> Json:
        """Let the API server have an object of an example, with a training of these tests in its containers."""
        fitted = with_containers(without_mounts(thing), self._fitted)
        made = self._cluster.api.create(KINDS[thing["kind"]], fitted)
        assert kept(fitted, made)
        return made

    def _fitted(self, container: Json) -> Json:
        command = [*container["command"], *container.pop("args", ())]
        if "elasticflow" not in command:  # an SSH server, in whose place the remote shell of these tests is
            return {**container, "command": ["sleep", "infinity"]}
        run, script = command.index("run"), command.index("/app/train.py")
        options = [one for one in command[run + 1 : script] if not one.startswith("--run-dir=")]
        ours = [f"--run-dir={self.directory}", "--monitor-interval=0.1"]
        command = [*command[: run + 1], *options, *ours, str(SCRIPT), json.dumps(OPTIONS)]
        given = [{"name": name, "value": value} for name, value in {**ENVIRON, **self._environ}.items()]
        container["env"] = [*container.get("env", ()), *given]
        return {**container, "command": [ELASTICFLOW if one == "elasticflow" else one for one in command]}

    def make(self, made: Made) -> None:
        """Make what is not there, as an operator does whenever something has changed."""
        for kind, things in zip((SERVICES, PODS), made, strict=True):
            for thing in things:
                if kind is PODS:
                    thing["spec"]["containers"][0]["workingDir"] = str(self.directory)
                with contextlib.suppress(ClusterConflict):
                    self._cluster.api.create(kind, thing)

    def kill(self, pod: str) -> None:
        """Kill a pod; it is there no more."""
        os.killpg(self._cluster.kubelets.process_of(pod).pid, signal.SIGKILL)
        self._cluster.wait_until(lambda: self.phases()[pod] == "Failed", f"the end of {pod}")
        self._cluster.api.delete(PODS, HERE, pod, grace_s=0)

    def pods(self) -> list[Json]:
        return self._cluster.api.list(PODS, HERE)[0]

    def phases(self) -> dict[str, str]:
        return {pod["metadata"]["name"]: pod["status"]["phase"] for pod in self.pods()}

    def finish(self, *others: str) -> None:
        """The training is enough: it was one, and all pods but these end well."""
        (self.directory / ENOUGH).touch()
        self._cluster.wait_until(
            lambda: all(phase == "Succeeded" for pod, phase in self.phases().items() if pod not in others),
            "the end of all pods",
        )
        assert len({tuple(event["members"]) for event in self.events("view", generation=1)}) == 1
        self.audit()

    def tails(self) -> str:
        outputs = sorted(self._cluster.kubelets.outputs.glob("digits-*.txt"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in outputs)


@pytest.fixture
def training(cluster: Cluster, tmp_path: Path) -> Training:
    return Training(tmp_path / "run", cluster)


@pytest.mark.parametrize("name", NAMES)
def test_api_server_takes_an_example_and_drops_nothing(cluster: Cluster, name: str) -> None:
    for kind, thing in example(name).items():
        assert kept(thing, cluster.api.create(KINDS[kind], thing))


def test_pods_of_a_pytorchjob_train_together_and_may_be_lost_and_come(training: Training, cluster: Cluster) -> None:
    objects = example("pytorchjob")
    training.submit(objects["Service"])
    job = training.submit(objects["PyTorchJob"])
    training.make(of_pytorchjob(job))
    first = training.wait_for_world(2)
    workers = {"pytorchReplicaSpecs": {"Worker": {"replicas": 3}}}
    job = cluster.api.change(definitions.PYTORCH_JOBS, HERE, "digits", {"spec": workers})
    training.make(of_pytorchjob(job))
    second = training.wait_for_world(3, after=first)
    training.wait_for_steps()
    training.kill("digits-worker-0")
    third = training.wait_for_world(2, after=second)
    training.make(of_pytorchjob(job))
    training.wait_for_world(3, after=third)
    training.wait_for_steps()
    training.finish()


def test_pods_of_a_trainjob_train_together_and_the_first_one_may_be_lost_and_come(
    training: Training, cluster: Cluster
) -> None:
    objects = example("trainjob")
    objects["TrainJob"]["spec"]["trainer"]["numNodes"] = 3
    runtime, job = training.submit(objects["TrainingRuntime"]), training.submit(objects["TrainJob"])
    training.make(of_trainjob(job, runtime))
    first = training.wait_for_world(3)
    training.wait_for_steps()
    training.kill("digits-node-0-0")
    second = training.wait_for_world(2, after=first)
    training.make(of_trainjob(job, runtime))
    training.wait_for_world(3, after=second)
    training.wait_for_steps()
    training.finish()


def trainjob(training: Training) -> Made:
    """The example, whose program says nothing of a range: the pods are told a number."""
    objects = example("trainjob")
    trainer = objects["TrainJob"]["spec"]["trainer"]
    trainer["numNodes"] = 3
    trainer["command"].remove("--nnodes=1:4")
    runtime, job = training.submit(objects["TrainingRuntime"]), training.submit(objects["TrainJob"])
    return of_trainjob(job, runtime)


def pytorchjob_with_master(training: Training) -> Made:
    """The example without its elastic policy, whose pods have a master instead."""
    job = example("pytorchjob")["PyTorchJob"]
    role = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    roles = {name: {**role, "replicas": number} for name, number in {"Master": 1, "Worker": 2}.items()}
    job["spec"] = {"pytorchReplicaSpecs": roles}
    return of_pytorchjob(training.submit(job))


@pytest.mark.parametrize("make", [trainjob, pytorchjob_with_master])
def test_pods_that_are_told_their_number_wait_for_all_and_are_one_job(
    training: Training, cluster: Cluster, make: Callable[[Training], Made]
) -> None:
    """Whichever of them is lost, also the first one, the others wait for the one that comes in its place."""
    services, pods = make(training)
    for pod in pods:
        environ = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
        assert environ["PET_NNODES"] == "3"
        assert not {"PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND"} & set(environ)
    training.make((services, pods[:2]))
    cluster.wait_until(lambda: list(training.phases().values()) == ["Running"] * 2, "two pods")
    training.wait_for("start", 2)
    time.sleep(QUIET_S)
    assert training.events("view") == [], "two of three train"
    training.make((services, pods))
    newest = training.wait_for_world(3)
    training.wait_for_steps()
    for pod in (pods[1], pods[0]):
        training.kill(pod["metadata"]["name"])
        training.make((services, pods))
        newest = training.wait_for_world(3, after=newest)
        training.wait_for_steps()
    training.finish()


def test_workers_of_a_tfjob_train_together_and_go_on_without_the_first_one(cluster: Cluster, tmp_path: Path) -> None:
    training = Training(tmp_path / "run", cluster, {"EF_TEST_TRAINING": "keras_tensorflow"})
    objects = example("tfjob")
    objects["TFJob"]["spec"]["tfReplicaSpecs"]["Worker"]["replicas"] = 3
    training.make(of_tfjob(training.submit(objects["TFJob"])))
    first = training.wait_for_world(3)
    training.wait_for_steps()
    training.kill("digits-worker-0")
    training.wait_for_world(2, after=first)
    training.wait_for_steps()
    training.finish()


class Mpi(Training):
    """A training under `mpirun`, in the pod of a launcher on a node of its own."""

    def start(self) -> int:
        """Start it; the generation of its first view."""
        (job,) = example("mpijob").values()
        roles = job["spec"]["mpiReplicaSpecs"]
        roles["Worker"]["replicas"] = 3
        (launcher,) = roles["Launcher"]["template"]["spec"]["containers"]
        launcher["command"][2:4] = ["--mpirun=mpirun.openmpi", "-np", "3"]
        made = self.submit(job)
        services, (*workers, launching) = of_mpijob(made)
        self.make((services, workers))
        self._cluster.wait_until(lambda: list(self.phases().values()) == ["Running"] * 3, "the workers")
        launching["spec"]["nodeName"] = f"node{CONTROL}"
        launching["spec"]["containers"][0]["env"] += with_shell(self._cluster, made, self.directory)
        self.make(([], [launching]))
        first = self.wait_for_world(3)
        self.wait_for_steps()
        return first

    def wait_for_launcher(self) -> str:
        """Wait for its end; its phase."""
        self._cluster.wait_until(lambda: self.phases()["digits-launcher"] != "Running", "the end of the launcher")
        return self.phases()["digits-launcher"]


@pytest.fixture
def mpi(cluster: Cluster, tmp_path: Path) -> Mpi:
    if which("mpirun.openmpi") is None:
        pytest.skip("not installed: openmpi-bin")
    return Mpi(tmp_path / "run", cluster, AS_ROOT)


def test_ranks_of_an_mpijob_train_together_and_go_on_without_one_that_is_killed(mpi: Mpi) -> None:
    first = mpi.start()
    for pid in networks.processes(1):
        process = psutil.Process(pid)
        if {ELASTICFLOW, str(SCRIPT)} & set(process.cmdline()):
            process.kill()
    mpi.wait_for_world(2, after=first)
    mpi.wait_for_steps()
    (mpi.directory / ENOUGH).touch()
    assert mpi.wait_for_launcher() == "Succeeded", mpi.tails()
    mpi.audit()


def test_worker_pod_of_an_mpijob_that_is_lost_ends_the_launcher(mpi: Mpi) -> None:
    mpi.start()
    for pid in networks.processes(1):
        os.kill(pid, signal.SIGKILL)
    assert mpi.wait_for_launcher() == "Failed", mpi.tails()


def nodes_of_pods(cluster: Cluster) -> dict[str, int]:
    pods, _ = cluster.api.list(PODS, HERE)
    return {pod["metadata"]["name"]: int(pod["spec"]["nodeName"].removeprefix("node")) for pod in pods}


def with_shell(cluster: Cluster, job: Json, folder: Path) -> list[Json]:
    """Variables of the launcher: the file of hosts, and a remote shell that enters the node of a worker."""
    (folder / "hostfile").write_text(hostfile_of(job))
    cases = "\n".join(
        f'{pod}.*) set -- {" ".join(map(quote, networks.inside_as(node, pod)))} sh -c "$*";;'
        for pod, node in nodes_of_pods(cluster).items()
    )
    shell = folder / "rsh"
    shell.write_text(
        "#!/bin/sh\n"
        "while case $1 in -*) true;; *) false;; esac; do shift 2; done\n"
        f'host=$1; shift\ncase $host in\n{cases}\n*) exit 255;;\nesac\nexec "$@"\n'
    )
    shell.chmod(0o755)
    variables = {"OMPI_MCA_orte_default_hostfile": str(folder / "hostfile"), "OMPI_MCA_plm_rsh_agent": str(shell)}
    return [{"name": name, "value": value} for name, value in variables.items()]
