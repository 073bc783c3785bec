"""Nodes of a test cluster: network namespaces, on which the command of a pod runs as a real process.

What a kubelet does, they do: they report the node and the pod, give the process its variables, send it SIGTERM when
the pod is deleted, and SIGKILL after its grace period, tell what it has written, and run other commands beside it. They
write the files of a downwardAPI volume, and write them anew when the pod has changed. Images, probes, volumes other
than these and emptyDir, limits, and name servers are not real: the headless services of the cluster are in the hosts
file of each node, from the endpoints that the real controller manager makes, or nowhere.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ef_common.errors import ClusterConflict, ClusterFailed, ClusterNotFound
from ef_common.kubernetes.api import Api
from ef_common.kubernetes.kinds import NODES, PODS, SECRETS, Kind
from ef_common.kubernetes.reading import time_of
from ef_common.kubernetes.resource import Json
from ef_common.kubernetes.watching import Copy
from tests.faults import networks
from tests.kubernetes.kubelet_server import ADDRESS, KubeletServer

ENDPOINTS = Kind("v1", "Endpoints", "endpoints")
NODE_LEASES = Kind("coordination.k8s.io/v1", "Lease", "leases")
GPU = "nvidia.com/gpu"
_BEAT_S = 5.0
_POLL_S = 0.05


def name_of(node: int) -> str:
    return f"node{node}"


def register(api: Api, name: str, *, gpus: int, address: str, kubelet: int = 0) -> Json:
    """Say that there is such a node, and that it is ready; and at which port its kubelet answers on this machine."""
    labels = {"kubernetes.io/hostname": name}
    head = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
    with contextlib.suppress(ClusterConflict):
        api.create(NODES, head)
    now = time_of(time.time())[:19] + "Z"
    has = {"cpu": "16", "memory": "64Gi", "pods": "50", GPU: str(gpus)}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    status = {
        "capacity": has,
        "allocatable": has,
        "addresses": [  # the API server asks for a host name first
            {"type": "InternalIP", "address": address},
            *([{"type": "Hostname", "address": ADDRESS}] if kubelet else []),
        ],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelet}},
        "conditions": [{**ready, "lastHeartbeatTime": now, "lastTransitionTime": now}],
    }
    while True:
        found = api.get(NODES, None, name)
        with contextlib.suppress(ClusterConflict):  # the control plane has written it meanwhile
            api.replace(NODES, {**found, "status": status}, sub="status")
            break
    return api.change(NODES, None, name, {"spec": {"taints": None}})


def is_ready(node: Json) -> bool:
    """Whether a node counts as one that answers."""
    return {one["type"]: one["status"] for one in node["status"]["conditions"]}.get("Ready") == "True"


class Kubelets:
    """The kubelets of all nodes, as threads of this process.

    Args:
        kubeconfig: Where the cluster is.
        outputs: Folder for what pods write.
        gpus: How many GPUs each node has, by its number.

    Attributes:
        has_names: Nodes know the names of services.
        lag_s: How long a change of a pod takes until its files are written anew.
        started: Names of the pods that were started, in this order.
    """

    def __init__(self, kubeconfig: Path, outputs: Path, gpus: Mapping[int, int]) -> None:
        self.outputs = outputs
        self.has_names = True
        self.lag_s = 0.0
        self.started: list[str] = []
        self._places: set[Path] = set()  # where such files are mounted
        self._use = -1  # a lock, shared by all clusters of this machine
        self._written: dict[str, str] = {}  # version of the pod (uid) of which its files are
        self._api = Api(str(kubeconfig), manager="kubelet")
        self._gpus = dict(gpus)
        self._numbers = {name_of(node): node for node in gpus}
        self._changed = threading.Event()
        self._pods = Copy(self._api, PODS, on_change=self._changed.set)
        self._endpoints = Copy(self._api, ENDPOINTS, on_change=self._changed.set)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._server = KubeletServer(outputs, run=self._start_in, log=self._log_of)
        self._seen: set[str] = set()
        self._ending: set[str] = set()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._names: dict[str, list[str]] = {}
        self.dead: set[int] = set()

    def __enter__(self) -> Kubelets:
        self._use = os.open("/", os.O_RDONLY)
        fcntl.flock(self._use, fcntl.LOCK_SH)
        self._server.__enter__()
        for node in self._gpus:
            self._register(node)
        self._pods.start()
        self._endpoints.start()
        for body in (self._beat, self._follow):
            self._start(body)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._changed.set()
        self._pods.stop()
        self._endpoints.stop()
        for process in list(self._processes.values()):
            _kill(process)
        for thread in list(self._threads):
            thread.join(10.0)
        self._server.__exit__()
        self._api.close()
        self._remove_places()

    def _remove_places(self) -> None:
        """Remove the folders that were made for mounts, unless another cluster is there: its mounts would go, too."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for place in self._places:
                with contextlib.suppress(FileNotFoundError):
                    place.rmdir()
        os.close(self._use)

    def process_of(self, pod: str) -> subprocess.Popen[bytes]:
        """The process of a pod that runs."""
        (uid,) = (one["metadata"]["uid"] for one in self._pods.objects() if one["metadata"]["name"] == pod)
        return self._processes[uid]

    @contextlib.contextmanager
    def without(self, node: int) -> Iterator[None]:
        """This node is gone meanwhile, with all that runs on it. Afterwards it is there again, as after a new start."""
        self.dead.add(node)
        networks.set_link(node, "down")
        try:
            for pid in networks.processes(node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            yield
        finally:
            networks.set_link(node, "up")
            self._patiently(lambda: self._register(node))
            self.dead.remove(node)
            self._changed.set()

    # ------------------------------------------------------------ a node

    def _register(self, node: int) -> Json:
        return register(
            self._api, name_of(node), gpus=self._gpus[node], address=networks.address(node), kubelet=self._server.port
        )

    def _beat(self) -> None:
        while not self._stopped.is_set():
            for name, node in self._numbers.items():
                if node not in self.dead:
                    with contextlib.suppress(ClusterFailed):
                        self._renew(name)
                        if not is_ready(self._api.get(NODES, None, name)):  # it has not been heard for a while
                            self._register(node)
            self._stopped.wait(_BEAT_S)

    def _renew(self, name: str) -> None:
        now = time_of(time.time())
        lease = {
            "apiVersion": NODE_LEASES.api_version,
            "kind": NODE_LEASES.kind,
            "metadata": {"name": name, "namespace": "kube-node-lease"},
            "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now},
        }
        try:
            self._api.change(NODE_LEASES, "kube-node-lease", name, {"spec": lease["spec"]})
        except ClusterNotFound:
            self._api.create(NODE_LEASES, lease)

    # ------------------------------------------------------------ pods

    def _follow(self) -> None:
        while not self._stopped.is_set():
            self._changed.wait(1.0)
            self._changed.clear()
            self._write_names()
            for pod in self._pods.objects():
                uid, node = pod["metadata"]["uid"], self._numbers.get(pod["spec"].get("nodeName") or "")
                if node is None or node in self.dead:
                    continue
                if uid in self._processes:
                    self._renew_files(pod)
                if pod["metadata"].get("deletionTimestamp"):
                    if uid not in self._ending:
                        self._ending.add(uid)
                        self._start(lambda pod=pod: self._end(pod))
                elif uid not in self._seen and pod["status"].get("phase", "Pending") == "Pending":
                    self._seen.add(uid)
                    self._start(lambda pod=pod, node=node: self._run(pod, node))

    def _start(self, body: Any) -> None:
        thread = threading.Thread(target=body, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, pod: dict[str, Any], node: int) -> None:
        meta, container = pod["metadata"], pod["spec"]["containers"][0]
        command = [*(container.get("command") or ()), *(container.get("args") or ())]
        with self._output(pod).open("ab") as output:
            process = self._popen(pod, node, command, stdout=output, stderr=subprocess.STDOUT)
        self._processes[meta["uid"]] = process
        self.started.append(meta["name"])
        self._report(pod, node, "Running", {"running": {"startedAt": time_of(time.time())[:19] + "Z"}})
        status = process.wait()
        _kill(process)  # what it has left behind in its session
        status = 128 - status if status < 0 else status
        while node in self.dead and not self._stopped.wait(_POLL_S):
            pass  # it reports when it is there again
        if not self._stopped.is_set():
            ended = {"exitCode": status, "finishedAt": time_of(time.time())[:19] + "Z"}
            self._report(pod, node, "Failed" if status else "Succeeded", {"terminated": ended})

    def _popen(self, pod: Json, node: int, command: Sequence[str], **pipes: Any) -> subprocess.Popen[bytes]:
        inside = (*networks.inside_as(node, _host_name(pod)), *self._mounting(pod))
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *inside, *command],
            env={**_base_environ(), **self._variables(pod, node)},
            cwd=pod["spec"]["containers"][0].get("workingDir"),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **pipes,
        )

    def _mounting(self, pod: Json) -> tuple[str, ...]:
        """Prefix of a command that sees the volumes of its pod where those are mounted."""
        self._write_files(pod)
        own = {one["name"] for one in pod["spec"].get("volumes") or () if {"emptyDir", "downwardAPI"} & set(one)}
        mounts = []
        for mount in pod["spec"]["containers"][0].get("volumeMounts") or ():
            if mount["name"] in own:
                folder, place = self._volume(pod, mount["name"]), mount["mountPath"]
                folder.mkdir(parents=True, exist_ok=True)
                if mount.get("readOnly"):
                    self._places.add(Path(place))
                mounts.append(f"mkdir -p {place} && mount --bind {folder} {place}")
        return ("sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh") if mounts else ()

    def _volume(self, pod: Json, name: str) -> Path:
        return self.outputs / "volumes" / pod["metadata"]["uid"] / name

    def _write_files(self, pod: Json) -> None:
        """Write the files of downwardAPI volumes, each at once as a whole."""
        self._written[pod["metadata"]["uid"]] = pod["metadata"]["resourceVersion"]
        for volume in pod["spec"].get("volumes") or ():
            folder = self._volume(pod, volume["name"])
            for item in (volume.get("downwardAPI") or {}).get("items") or ():
                folder.mkdir(parents=True, exist_ok=True)
                new = folder / f".{item['path']}"
                new.write_text(_field(pod, item["fieldRef"]["fieldPath"]))
                new.rename(folder / item["path"])

    def _renew_files(self, pod: Json) -> None:
        uid, version = pod["metadata"]["uid"], pod["metadata"]["resourceVersion"]
        if self._written.get(uid) == version:
            return
        self._written[uid] = version

        def renew() -> None:
            self._stopped.wait(self.lag_s)
            if self._written[uid] == version:  # else it has changed again since
                self._write_files(pod)

        if self.lag_s:
            self._start(renew)
        else:
            renew()

    def _output(self, pod: Json) -> Path:
        return self.outputs / f"{pod['metadata']['name']}.txt"

    def _start_in(self, namespace: str, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Another command in a pod."""
        pod = self._api.get(PODS, namespace, name)
        node = self._numbers[pod["spec"]["nodeName"]]
        return self._popen(pod, node, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def _log_of(self, namespace: str, name: str) -> tuple[Path, Callable[[], bool]]:
        """What a pod has written, and whether it may write more."""
        pod = self._api.get(PODS, namespace, name)
        process = self._processes[pod["metadata"]["uid"]]
        return self._output(pod), lambda: process.poll() is None

    def _end(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        process = self._processes.get(meta["uid"])
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(max(meta.get("deletionGracePeriodSeconds") or 0, 0.01))
            except subprocess.TimeoutExpired:
                _kill(process)

        def delete() -> Json:
            with contextlib.suppress(ClusterConflict):  # it has gone, and another one has its name
                return self._api.delete(PODS, meta["namespace"], meta["name"], uid=meta["uid"], grace_s=0)
            return {}

        self._patiently(delete)

    def _variables(self, pod: dict[str, Any], node: int) -> dict[str, str]:
        values = {"status.podIP": networks.address(node), "metadata.name": pod["metadata"]["name"]}
        found = {}
        for variable in pod["spec"]["containers"][0].get("env") or ():
            origin = variable.get("valueFrom") or {}
            if "fieldRef" in origin:
                found[variable["name"]] = values[origin["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in origin:
                found[variable["name"]] = self._secret(pod["metadata"]["namespace"], **origin["secretKeyRef"])
            else:
                found[variable["name"]] = variable.get("value", "")
        return found

    def _secret(self, namespace: str, *, name: str, key: str) -> str:
        secret = self._patiently(lambda: self._api.get(SECRETS, namespace, name))
        return base64.b64decode(secret["data"][key]).decode() if secret else ""

    def _patiently(self, call: Callable[[], Json]) -> Json | None:
        """Try again as long as the API server is away; None if the object is not there."""
        while not self._stopped.is_set():
            try:
                return call()
            except ClusterNotFound:
                return None
            except ClusterFailed:
                self._stopped.wait(_POLL_S)
        return None

    def _report(self, pod: dict[str, Any], node: int, phase: str, state: dict[str, Any]) -> None:
        name, address, is_ready = pod["metadata"]["name"], networks.address(node), str(phase == "Running")
        containers = [
            {"name": one["name"], "image": one.get("image", ""), "imageID": "", "restartCount": 0, "state": state}
            | {"ready": phase == "Running"}
            for one in pod["spec"]["containers"]
        ]
        conditions = [{"type": kind, "status": is_ready} for kind in ("Ready", "ContainersReady")]
        status = {
            "phase": phase,
            "podIP": address,
            "podIPs": [{"ip": address}],
            "hostIP": address,
            "conditions": [{"type": "PodScheduled", "status": "True"}, *conditions],
            "containerStatuses": containers,
        }

        def write() -> Json:
            found = self._api.get(PODS, pod["metadata"]["namespace"], name)
            if found["metadata"]["uid"] != pod["metadata"]["uid"]:
                return found
            return self._api.replace(PODS, {**found, "status": {**found["status"], **status}}, sub="status")

        self._patiently(write)

    # ------------------------------------------------------------ names

    def _write_names(self) -> None:
        names: dict[str, list[str]] = defaultdict(list)
        for endpoints in self._endpoints.objects() if self.has_names else ():
            meta = endpoints["metadata"]
            for subset in endpoints.get("subsets") or ():
                for one in [*(subset.get("addresses") or ()), *(subset.get("notReadyAddresses") or ())]:
                    if one.get("targetRef"):
                        for name in _names_of(one, meta):
                            names[name].append(one["ip"])
        if names != self._names:
            self._names = dict(names)
            for node in self._numbers.values():
                networks.set_names(node, self._names)


def _field(pod: Mapping[str, Any], path: str) -> str:
    """A field of a pod that its files may have: a label or an annotation."""
    found = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    assert found, path
    return str((pod["metadata"].get(found[1]) or {}).get(found[2], ""))


def _host_name(pod: Mapping[str, Any]) -> str:
    name: str = pod["spec"].get("hostname") or pod["metadata"]["name"]
    return name


def _names_of(address: Mapping[str, Any], service: Mapping[str, Any]) -> list[str]:
    """The names that an address of a service has for pods of the default namespace, and those that it has for all."""
    inside = f"{service['name']}.{service['namespace']}.svc"
    host = address.get("hostname")  # of a pod whose subdomain is the service
    names = [inside, *([f"{host}.{inside}"] if host else [])]
    if service["namespace"] == "default":
        names += [service["name"], *([f"{host}.{service['name']}", host] if host else [])]
    return list(dict.fromkeys(names))


def _base_environ() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "ELASTICFLOW_", "SLURM_", "KUBE"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return {**kept, "PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10.0)
