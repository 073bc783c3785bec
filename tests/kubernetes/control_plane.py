"""A real Kubernetes on this machine: etcd, API server, scheduler and controller manager, built by `build.sh` once."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ef_common.errors import ClusterFailed
from ef_common.kubernetes.api import Api
from ef_common.kubernetes.kinds import NODES, SECRETS, Kind

NAMESPACES = Kind("v1", "Namespace", "namespaces", namespaced=False)
BUILT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elasticflow" / "kubernetes-1.20.2"
PROGRAMS = ("kube-apiserver", "kube-scheduler", "kube-controller-manager")
NODE_GRACE_S = 20
_GUARD_S = 120.0
_RUNS_S, _STANDS_S = 0.1, 0.9
_ADMIN, _USER = "admin-token", "user-token"


def why_not() -> str | None:
    """Reason why this machine cannot have a Kubernetes, or None."""
    if missing := [program for program in ("etcd", "openssl", "setpriv") if shutil.which(program) is None]:
        return f"not installed: {', '.join(missing)}"
    if not all((BUILT / program).is_file() for program in PROGRAMS):
        return f"`make test-kubernetes` builds Kubernetes first, into {BUILT}"
    return None


class ControlPlane:
    """Its programs run between entering and leaving it, and end with this process in any case.

    Args:
        folder: For its files.
        node_grace_s: How long a node may say nothing before it counts as lost.
        audited: A user whose calls are in the audit log, each with one line; "" for nobody.

    Attributes:
        kubeconfig: The administrator's.
        audit_log: Lines of JSON.
    """

    def __init__(self, folder: Path, *, node_grace_s: int = NODE_GRACE_S, audited: str = "") -> None:
        self._folder, self._node_grace_s, self._audited = folder, node_grace_s, audited
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._etcd, self._peers, self._port, scheduler, manager = _free_ports(5)
        self._ports = {"kube-scheduler": scheduler, "kube-controller-manager": manager}
        self.kubeconfig, self.audit_log = folder / "kubeconfig", folder / "audit.jsonl"

    def __enter__(self) -> ControlPlane:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for program in reversed(list(self._running)):
            self.kill(program)

    def kill(self, program: str) -> None:
        """End one of them at once."""
        process = self._running.pop(program)
        process.kill()
        process.wait()

    @contextlib.contextmanager
    def standing_still(self, program: str) -> Iterator[None]:
        """One of them does nothing meanwhile, and loses nothing."""
        self._running[program].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._running[program].send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def slow(self, program: str) -> Iterator[None]:
        """One of them does something for a tenth of each second only."""
        over = threading.Event()

        def slow_down() -> None:
            while not over.wait(_RUNS_S):
                with self.standing_still(program):
                    over.wait(_STANDS_S)

        thread = threading.Thread(target=slow_down)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextlib.contextmanager
    def without_api_server(self) -> Iterator[None]:
        """The API server is killed, and started again afterwards."""
        self.kill("kube-apiserver")
        try:
            yield
        finally:
            self.start_api_server()

    def _start(self) -> None:
        key = self._folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        tokens = f"{_ADMIN},admin,admin,system:masters\n{_USER},user,user,people\n"
        (self._folder / "tokens.csv").write_text(tokens)
        self.write_kubeconfig(self.kubeconfig, _ADMIN)
        self.start_etcd()
        self.start_api_server()
        self.start("kube-scheduler", "--leader-elect=false")
        self.start(
            "kube-controller-manager",
            "--leader-elect=false",
            f"--service-account-private-key-file={key}",
            f"--node-monitor-grace-period={self._node_grace_s}s",
            "--horizontal-pod-autoscaler-sync-period=1s",
        )

    def start_etcd(self) -> None:
        """Start it; it finds what it has written before."""
        here, peers = f"http://127.0.0.1:{self._etcd}", f"http://127.0.0.1:{self._peers}"
        self._run(
            *("etcd", f"--data-dir={self._folder}/etcd", f"--listen-client-urls={here}"),
            *(f"--advertise-client-urls={here}", f"--listen-peer-urls={peers}"),
            *(f"--initial-advertise-peer-urls={peers}", f"--initial-cluster=default={peers}", "--unsafe-no-fsync"),
        )

    def start_api_server(self) -> None:
        """Start it, and wait until it answers."""
        key = self._folder / "accounts.key"
        self._run(
            *(str(BUILT / "kube-apiserver"), f"--etcd-servers=http://127.0.0.1:{self._etcd}"),
            *("--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--secure-port={self._port}"),
            *(f"--cert-dir={self._folder}/certificates", "--service-cluster-ip-range=10.99.0.0/24"),
            *("--service-account-issuer=https://test", f"--service-account-signing-key-file={key}"),
            *(f"--service-account-key-file={key}", "--api-audiences=api", "--authorization-mode=RBAC"),
            *(f"--token-auth-file={self._folder}/tokens.csv", *self._auditing()),
        )
        self._wait_for_api_server()

    def _auditing(self) -> tuple[str, ...]:
        if not self._audited:
            return ()
        policy = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived", "ResponseStarted"],
            "rules": [{"level": "Metadata", "users": [self._audited]}, {"level": "None"}],
        }
        (self._folder / "audit.yaml").write_text(yaml.safe_dump(policy))
        return f"--audit-policy-file={self._folder}/audit.yaml", f"--audit-log-path={self.audit_log}"

    def start(self, program: str, *options: str) -> None:
        """Start the scheduler or the controller manager."""
        self._run(
            *(str(BUILT / program), f"--kubeconfig={self.kubeconfig}", "--port=0", "--bind-address=127.0.0.1"),
            *(f"--secure-port={self._ports[program]}", f"--cert-dir={self._folder}/certificates", *options),
        )

    def _run(self, *command: str) -> None:
        name = Path(command[0]).name
        with (self._folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
            )

    def _wait_for_api_server(self) -> None:
        deadline = time.monotonic() + _GUARD_S
        while True:
            with contextlib.suppress(ClusterFailed), contextlib.closing(Api(str(self.kubeconfig))) as api:
                api.list(NODES)
                api.get(NAMESPACES, None, "default")
                return
            for name, process in self._running.items():
                assert process.poll() is None, (self._folder / f"{name}.log").read_text()[-4000:]
            assert time.monotonic() < deadline, (self._folder / "kube-apiserver.log").read_text()[-4000:]
            time.sleep(0.1)

    @property
    def address(self) -> tuple[str, int]:
        """Where the API server is."""
        return "127.0.0.1", self._port

    def write_kubeconfig(self, path: Path, token: str, *, namespace: str = "default", server: str = "") -> Path:
        """Write how somebody with this token reaches it, perhaps by another way."""
        cluster = {"server": server or f"https://127.0.0.1:{self._port}", "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "me", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "me", "namespace": namespace}}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path

    def token_of(self, namespace: str, account: str) -> str:
        """The token of a service account, which the controller manager makes."""
        deadline = time.monotonic() + _GUARD_S
        with contextlib.closing(Api(str(self.kubeconfig))) as api:
            while time.monotonic() < deadline:
                for secret in api.list(SECRETS, namespace)[0]:
                    owner = (secret["metadata"].get("annotations") or {}).get("kubernetes.io/service-account.name")
                    if owner == account and "token" in (secret.get("data") or {}):
                        return base64.b64decode(secret["data"]["token"]).decode()
                time.sleep(0.1)
        raise AssertionError(f"no token of {namespace}/{account}")


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def control_plane(**options: Any) -> Iterator[ControlPlane]:
    """Start one in a folder of its own, with these options of `ControlPlane`."""
    with (
        tempfile.TemporaryDirectory(prefix="ef-k8s-", ignore_cleanup_errors=True) as folder,
        ControlPlane(Path(folder), **options) as running,
    ):
        yield running
