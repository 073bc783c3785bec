"""A real Kubernetes on this machine: etcd, API server, scheduler and controller manager.

They are built by `build.sh` once, or those of another release, which are in the folder that `KUBERNETES` names.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ef_common.kubernetes.api import Api
from ef_common.kubernetes.kinds import NODES, Kind
from tests.kubernetes.programs import NEEDED, Programs

NAMESPACES = Kind("v1", "Namespace", "namespaces", namespaced=False)
DEFINITIONS = Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False)
ACCOUNTS = Kind("v1", "ServiceAccount", "serviceaccounts")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elasticflow"
BUILT = Path(os.environ.get("KUBERNETES") or CACHE / "kubernetes-1.20.2")
PROGRAMS = ("kube-apiserver", "kube-scheduler", "kube-controller-manager")
NODE_GRACE_S = 20
_TOKEN_S = 24 * 3600
_ADMIN, _USER = "admin-token", "user-token"


def why_not() -> str | None:
    """Reason why this machine cannot have a Kubernetes, or None."""
    if missing := [program for program in (etcd(), *NEEDED) if shutil.which(program) is None]:
        return f"not installed: {', '.join(missing)}"
    if missing := [program for program in PROGRAMS if not (BUILT / program).is_file()]:
        if os.environ.get("KUBERNETES"):
            return f"not found in {BUILT}: {', '.join(missing)}"
        return f"`make test-kubernetes` builds Kubernetes first, into {BUILT}"
    return None


def etcd() -> str:
    """A release may need a newer one than the machine has."""
    return str(BUILT / "etcd") if (BUILT / "etcd").is_file() else "etcd"


@functools.cache
def release() -> tuple[int, int]:
    """Which Kubernetes it is, such as (1, 20)."""
    command = [str(BUILT / "kube-apiserver"), "--version"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    major, minor, *_ = told.split()[-1].removeprefix("v").split(".")
    return int(major), int(minor)


def knows_rules() -> bool:
    """Whether its API server judges objects by the rules of their definition (CEL)."""
    return release() >= (1, 25)


class ControlPlane(Programs):
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
        super().__init__(folder, etcd=etcd(), num_ports=len(PROGRAMS))
        self._node_grace_s, self._audited = node_grace_s, audited
        self._ports = dict(zip(PROGRAMS, self.ports, strict=True))
        self.kubeconfig, self.audit_log = folder / "kubeconfig", folder / "audit.jsonl"

    @contextlib.contextmanager
    def without_api_server(self) -> Iterator[None]:
        """The API server is killed, and started again afterwards, and so is the scheduler, which lost its lease.

        One that is not started anew may end by itself: it takes a pod of the same name on another node, which has been
        created meanwhile, for the old one, and concludes that its cache is corrupted.
        """
        self.kill("kube-apiserver")
        try:
            yield
        finally:
            self.start_api_server()
            self.kill("kube-scheduler")
            self._start_scheduler()

    def _start(self) -> None:
        key = self._folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        tokens = f"{_ADMIN},admin,admin,system:masters\n{_USER},user,user,people\n"
        (self._folder / "tokens.csv").write_text(tokens)
        self.write_kubeconfig(self.kubeconfig, _ADMIN)
        self.start_etcd()
        self.start_api_server()
        self._start_scheduler()
        self.start(
            "kube-controller-manager",
            "--leader-elect=false",
            f"--service-account-private-key-file={key}",
            f"--node-monitor-grace-period={self._node_grace_s}s",
            "--horizontal-pod-autoscaler-sync-period=1s",
        )

    def _start_scheduler(self) -> None:
        self.start("kube-scheduler", "--leader-elect=false")

    def start_api_server(self) -> None:
        """Start it, and wait until it answers."""
        key = self._folder / "accounts.key"
        self._run(
            *(str(BUILT / "kube-apiserver"), self.etcd_option),
            *("--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--secure-port={self.address[1]}"),
            *(f"--cert-dir={self._folder}/certificates", "--service-cluster-ip-range=10.99.0.0/24"),
            *("--service-account-issuer=https://test", f"--service-account-signing-key-file={key}"),
            *(f"--service-account-key-file={key}", "--api-audiences=api", "--authorization-mode=RBAC"),
            *(f"--token-auth-file={self._folder}/tokens.csv", *self._auditing()),
        )
        self._wait_until_answered(self._ask, "kube-apiserver")

    def _ask(self) -> None:
        with contextlib.closing(Api(str(self.kubeconfig))) as api:
            api.list(NODES)
            api.get(NAMESPACES, None, "default")

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
        without_http = ("--port=0",) if release() < (1, 24) else ()
        self._run(
            *(str(BUILT / program), f"--kubeconfig={self.kubeconfig}", *without_http, "--bind-address=127.0.0.1"),
            *(f"--secure-port={self._ports[program]}", f"--cert-dir={self._folder}/certificates", *options),
        )

    @property
    def address(self) -> tuple[str, int]:
        """Where the API server is."""
        return "127.0.0.1", self._ports["kube-apiserver"]

    def write_kubeconfig(self, path: Path, token: str, *, namespace: str = "default", server: str = "") -> Path:
        """Write how somebody with this token reaches it, perhaps by another way."""
        cluster = {"server": server or "https://{}:{}".format(*self.address), "insecure-skip-tls-verify": True}
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
        """A token of a service account, as its pods get one."""
        tokens = Kind("v1", "ServiceAccount", f"serviceaccounts/{account}/token")
        asked = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "metadata": {"namespace": namespace},
            "spec": {"expirationSeconds": _TOKEN_S},
        }
        with contextlib.closing(Api(str(self.kubeconfig))) as api:
            token: str = api.create(tokens, asked)["status"]["token"]
            return token


@contextlib.contextmanager
def control_plane(**options: Any) -> Iterator[ControlPlane]:
    """Start one in a folder of its own, with these options of `ControlPlane`."""
    with (
        tempfile.TemporaryDirectory(prefix="ef-k8s-", ignore_cleanup_errors=True) as folder,
        ControlPlane(Path(folder), **options) as running,
    ):
        yield running
