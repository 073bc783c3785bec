"""A cluster with ElasticFlow's controller, as the tests of it see it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from ef_common.errors import ClusterFailed, ClusterNotFound
from ef_common.kubernetes.api import Api
from ef_common.kubernetes.applying import apply_all
from ef_common.kubernetes.installation import NAMESPACE, manifests
from ef_common.kubernetes.kinds import CLASSES, EVENTS, JOBS, LEASES, PODS
from ef_common.kubernetes.resource import CONTROLLER, JOB_LABEL, Json
from ef_common.testing.harness_run import Run
from ef_common.testing.ports import free_ports
from tests.faults import launched, networks
from tests.faults.hosts import ENOUGH
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT
from tests.kubernetes import control_plane
from tests.kubernetes.control_plane import ACCOUNTS, ControlPlane
from tests.kubernetes.kubelets import GPU, Kubelets

GUARD_S = 240.0
LEASE_S = 4.0
_POLL_S = 0.1
_HERE = "default"
ENVIRON = {**launched.ENVIRON, "PYTHONUNBUFFERED": "1"}


def why_not() -> str | None:
    """Reason why this machine cannot have such a cluster, or None."""
    return control_plane.why_not() or networks.why_not()


MARKS = [
    pytest.mark.processes,
    pytest.mark.thorough,
    pytest.mark.timeout(530),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
"""Of tests that start a cluster."""


class Cluster:
    """A cluster whose nodes have one GPU each.

    Args:
        plane: Its control plane.
        kubelets: Its nodes.
        folder: For its files.
        door: A node without pods, on which controllers run, and where the API server is from there.

    Attributes:
        controllers: Those that were started.
        page: Where the newest one answers probes.
    """

    page = ""

    def __init__(self, plane: ControlPlane, kubelets: Kubelets, folder: Path, *, door: tuple[int, str]) -> None:
        self.plane, self.kubelets, self._folder, self._door = plane, kubelets, folder, door
        self.api = Api(str(plane.kubeconfig), manager="test")
        self.controllers: list[subprocess.Popen[bytes]] = []
        self._token = ""

    def install(self) -> None:
        """As a user does, but for the deployment: there are no images here."""
        things = [one for one in manifests(image="none") if one["kind"] != "Deployment"]
        for name, value in (("training", -10), ("serving", 1000)):
            head = {"apiVersion": CLASSES.api_version, "kind": CLASSES.kind}
            things.append({**head, "metadata": {"name": name}, "value": value})
        for thing in things:
            if thing["kind"] == "PriorityClass":
                self.api.create(CLASSES, thing)
            else:
                assert list(apply_all(self.api, [thing]))
        self.wait_until(self._is_served, "the new resource")
        self.wait_until(self._takes_pods, "the account of pods that name none")
        self._token = self.plane.token_of(NAMESPACE, CONTROLLER)

    def _is_served(self) -> bool:
        with contextlib.suppress(ClusterFailed):
            self.api.list(JOBS)
            return True
        return False

    def _takes_pods(self) -> bool:
        with contextlib.suppress(ClusterNotFound):
            return bool(self.api.get(ACCOUNTS, _HERE, "default"))
        return False

    # ------------------------------------------------------------ the controller

    def kubeconfig(self, *, server: str = "") -> Path:
        """That of a controller; it may reach the API server by another way."""
        return self.plane.write_kubeconfig(self._folder / "controller", self._token, namespace=NAMESPACE, server=server)

    def start_controller(self, *more: str, kubeconfig: Path | None = None) -> subprocess.Popen[bytes]:
        """Start one, with the rights that its installation gives it and no others.

        If it is told where the API server is, it runs where it reaches no pods.
        """
        command = [sys.executable, "-m", "ef_common.cli", "kubernetes", "controller"]
        node, server = self._door
        if kubeconfig is None:
            kubeconfig, command = self.kubeconfig(server=server), [*networks.inside(node), *command]
        (port,) = free_ports(1)
        self.page = f"http://127.0.0.1:{port}"
        options = [f"--kubeconfig={kubeconfig}", f"--page=127.0.0.1:{port}"]
        with (self._folder / "controller.log").open("ab") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command, *options, f"--lease-s={LEASE_S}", *more],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.controllers.append(process)
        return process

    def log(self) -> str:
        return (self._folder / "controller.log").read_text()

    def stop_controllers(self) -> None:
        for process in self.controllers:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        self.controllers.clear()
        for namespace in (NAMESPACE, _HERE):
            with contextlib.suppress(ClusterNotFound):
                self.api.delete(LEASES, namespace, CONTROLLER)

    def elasticflow(self, *arguments: str) -> str:
        """Give a command of ours, which must not fail; what it has printed."""
        done = self.call(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "KUBECONFIG": str(self.plane.kubeconfig)}
        command = [sys.executable, "-m", "ef_common.cli", "kubernetes", *arguments]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=GUARD_S)

    # ------------------------------------------------------------ what is there

    def wait_until(self, condition: Callable[[], object], what: str = "") -> None:
        """Wait until this holds, which asks the cluster."""
        deadline = time.monotonic() + GUARD_S
        while not condition():
            assert all(one.poll() in (None, -signal.SIGKILL) for one in self.controllers), self.log()
            assert time.monotonic() < deadline, f"waited in vain for {what}\n{self.story()}"
            time.sleep(_POLL_S)

    def story(self) -> str:
        """What is there, for whoever reads why a test has failed."""
        jobs = [json.dumps({"name": one["metadata"]["name"], **one.get("status", {})}) for one in self.jobs()]
        pods = [
            f"{one['metadata']['name']} {one['status'].get('phase')} on {one['spec'].get('nodeName')} "
            f"{one['metadata'].get('deletionTimestamp', '')}"
            for one in self.api.list(PODS, _HERE)[0]
        ]
        controller = self.log()[-4000:] if (self._folder / "controller.log").exists() else ""
        return "\n".join(["--- jobs", *jobs, "--- pods", *pods, "--- controller", controller])

    def jobs(self) -> list[Json]:
        return self.api.list(JOBS, _HERE)[0]

    def status(self, job: str) -> Json:
        found: Json = self.api.get(JOBS, _HERE, job).get("status") or {}
        return found

    def pods(self, job: str) -> dict[str, str]:
        """Phases of the pods of a job that are not being deleted."""
        found, _ = self.api.list(PODS, _HERE, labels=f"{JOB_LABEL}={job}")
        return {
            pod["metadata"]["name"]: pod["status"]["phase"]
            for pod in found
            if not pod["metadata"].get("deletionTimestamp")
        }

    def processes_of(self, pod: str) -> set[int]:
        """The processes of a pod that runs."""
        process = psutil.Process(self.kubelets.process_of(pod).pid)
        return {process.pid, *(child.pid for child in process.children(recursive=True))}

    def cut_off(self, pod: str) -> float:
        """Kill all of a pod at once, as a worker whose agent ends would leave gently; the time of the day."""
        killed_at = time.time()
        for process in self.processes_of(pod):
            with contextlib.suppress(ProcessLookupError):  # it went with its parent
                os.kill(process, signal.SIGKILL)
        return killed_at

    def events(self, job: str) -> list[str]:
        """What the controller has told of a job."""
        found, _ = self.api.list(EVENTS, _HERE)
        return [f"{one['reason']}: {one['message']}" for one in found if one["involvedObject"]["name"] == job]

    # ------------------------------------------------------------ others

    def serve(self, name: str) -> None:
        """A pod of somebody else's, of high priority, that takes a whole node."""
        container = {"name": "serve", "image": "none", "command": ["sleep", "1000"]}
        spec = {
            "priorityClassName": "serving",
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "containers": [{**container, "resources": {"limits": {GPU: "1"}}}],
        }
        meta = {"name": name, "namespace": _HERE, "labels": {"app": "serving"}}
        self.api.create(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})

    def is_running(self, pod: str) -> bool:
        return bool(self.api.get(PODS, _HERE, pod)["status"].get("phase") == "Running")

    def remove(self, pod: str, **options: Any) -> None:
        self.api.delete(PODS, _HERE, pod, **options)

    def clear(self) -> None:
        """Nobody has anything any more."""
        for job in self.jobs():
            self.api.delete(JOBS, _HERE, job["metadata"]["name"])
        for pod in self.api.list(PODS, _HERE)[0]:
            with contextlib.suppress(ClusterFailed):
                self.api.delete(PODS, _HERE, pod["metadata"]["name"], grace_s=1)
        self.wait_until(lambda: not self.api.list(PODS, _HERE)[0], "the end of all pods")
        for event in self.api.list(EVENTS, _HERE)[0]:
            with contextlib.suppress(ClusterFailed):
                self.api.delete(EVENTS, _HERE, event["metadata"]["name"])


class Training(Run):
    """A training in the cluster, whose pods share a directory of events.

    Args:
        directory: That directory.
        cluster: The cluster.
        name: Of the job.
    """

    def __init__(self, directory: Path, cluster: Cluster, name: str) -> None:
        super().__init__(directory, guard_s=GUARD_S)
        self.name, self._cluster = name, cluster
        self.uid = ""

    def submit(
        self,
        low: int,
        high: int,
        *,
        command: tuple[str, ...] = (),
        before: tuple[str, ...] = (),
        options: Mapping[str, Any] | None = None,
        grace_s: int = 40,
        apart: bool = False,
        **spec: Any,
    ) -> Training:
        """Submit it, as a file that somebody has written by hand.

        Args:
            low: Its minimum.
            high: Its maximum.
            command: That of its pods; by default, they train.
            before: What stands before this command.
            options: Of the training.
            grace_s: How long a pod may take to leave.
            apart: Each pod has a run directory of its own.
            spec: Further fields of the job.
        """
        place = self.directory / "own" if apart else self.directory
        run = (sys.executable, "-m", "ef_common.cli", "run", f"--run-dir={place}", "--monitor-interval=0.1")
        training = json.dumps({**OPTIONS, **(options or {})})
        container = {
            "name": "worker",
            "image": "none",
            "command": [*before, *(command or (*run, str(SCRIPT), training))],
            "env": [{"name": name, "value": value} for name, value in ENVIRON.items()],
            "resources": {"limits": {GPU: "1"}},
            "workingDir": str(self.directory),
            "volumeMounts": [{"name": "own", "mountPath": str(place)}] if apart else [],
        }
        volumes = [{"name": "own", "emptyDir": {}}] if apart else []
        pod = {"terminationGracePeriodSeconds": grace_s, "containers": [container], "volumes": volumes}
        job = {
            "apiVersion": JOBS.api_version,
            "kind": JOBS.kind,
            "metadata": {"name": self.name, "namespace": _HERE},
            "spec": {
                "minWorkers": low,
                "maxWorkers": high,
                "priorityClassName": "training",
                "checkpoint": f"file://{self.directory}/checkpoints",
                "template": {"spec": pod},
                **spec,
            },
        }
        self.uid = self._cluster.api.create(JOBS, job)["metadata"]["uid"]
        return self

    def check(self) -> None:
        ended = [one for one in self._cluster.controllers if one.poll() not in (None, -signal.SIGKILL)]
        assert not ended, self._cluster.log()

    def status(self) -> Json:
        return self._cluster.status(self.name)

    def wait_for_phase(self, phase: str) -> None:
        self._cluster.wait_until(lambda: self.status().get("phase") == phase, f"{self.name} to be {phase}")

    def wait_for_pods(self, number: int) -> None:
        """Wait until so many run, and no others are there."""
        self._cluster.wait_until(
            lambda: list(self._cluster.pods(self.name).values()) == ["Running"] * number, f"{number} pods"
        )

    def members(self) -> list[str]:
        """Pods whose workers are in the newest view; the others are spares, or have not joined yet."""
        view = self.events("view")[-1]
        pids = {event["pid"] for event in self.events("start") if event["worker"] in view["members"]}
        running = [pod for pod, phase in self._cluster.pods(self.name).items() if phase == "Running"]
        return [pod for pod in running if pids & self._cluster.processes_of(pod)]

    def finish(self) -> None:
        """The training is enough: it ends well, and with it the job."""
        (self.directory / ENOUGH).touch()
        self.wait_for_phase("Succeeded")
        self.audit()

    def tails(self) -> str:
        outputs = sorted(self._cluster.kubelets.outputs.glob(f"{self.name}-*.txt"))
        texts = [f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in outputs]
        return "\n".join([*texts, self._cluster.story()])


@contextlib.contextmanager
def cluster(gpus: Mapping[int, int]) -> Iterator[Cluster]:
    """Make a cluster whose nodes have so many GPUs, by their numbers, and take it away again."""
    with (
        tempfile.TemporaryDirectory(prefix="ef-pods-", ignore_cleanup_errors=True) as text,
        networks.nodes(len(gpus) + 1),
        control_plane.control_plane() as plane,
        networks.served(len(gpus) + 1, plane.address) as (host, port),
        Kubelets(plane.kubeconfig, Path(text), gpus) as kubelets,
    ):
        made = Cluster(plane, kubelets, Path(text), door=(len(gpus) + 1, f"https://{host}:{port}"))
        try:
            made.install()
            yield made
        finally:
            made.stop_controllers()
            made.api.close()
