"""Where the API server itself judges jobs by the rules of their definition.

That is a whole control plane, if its release knows rules; or else the part of a newer API server that keeps definitions
of resources, and objects of those, which `build_definitions.sh` builds once. It has neither pods nor accounts.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from ef_common.kubernetes.api import Api
from tests.kubernetes import control_plane
from tests.kubernetes.control_plane import CACHE, DEFINITIONS
from tests.kubernetes.programs import NEEDED, Programs

_ADMIN = "/O=system:masters/CN=admin"
PROGRAM = CACHE / "kubernetes-definitions" / "apiextensions-apiserver"


def why_not() -> str | None:
    """Reason why this machine has no such API server, or None."""
    if is_in_plane():
        return None
    if missing := [program for program in ("etcd", *NEEDED) if shutil.which(program) is None]:
        return f"not installed: {', '.join(missing)}"
    if not PROGRAM.is_file():
        return f"`make test-kubernetes` builds an API server for definitions first, into {PROGRAM.parent}"
    return None


def is_in_plane() -> bool:
    """Whether it is that of a whole control plane."""
    return control_plane.why_not() is None and control_plane.knows_rules()


@contextlib.contextmanager
def api_server() -> Iterator[Path]:
    """Start one in a folder of its own; the administrator's kubeconfig."""
    if is_in_plane():
        with control_plane.control_plane() as plane:
            yield plane.kubeconfig
        return
    with (
        tempfile.TemporaryDirectory(prefix="ef-k8s-", ignore_cleanup_errors=True) as folder,
        Definitions(Path(folder)) as server,
    ):
        yield server.kubeconfig


class Definitions(Programs):
    """Etcd, and that part of an API server, which lets those do everything who have the administrator's certificate.

    Args:
        folder: For its files.

    Attributes:
        kubeconfig: The administrator's.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, etcd="etcd", num_ports=1)
        self.kubeconfig = folder / "kubeconfig"

    def _start(self) -> None:
        certificate, key = self._folder / "admin.crt", self._folder / "admin.key"
        new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days=1", f"-subj={_ADMIN}"]
        subprocess.run([*new, f"-out={certificate}", f"-keyout={key}"], check=True, capture_output=True)
        (port,) = self.ports
        cluster = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "me", "user": {"client-certificate": str(certificate), "client-key": str(key)}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "me", "namespace": "default"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))
        self.start_etcd()
        self._run(
            *(str(PROGRAM), self.etcd_option, "--bind-address=127.0.0.1", f"--secure-port={port}"),
            *(f"--cert-dir={self._folder}/certificates", f"--client-ca-file={certificate}"),
            # There is no other API server that it could ask who somebody is, and which namespaces there are.
            *("--authentication-skip-lookup", f"--authentication-kubeconfig={self.kubeconfig}"),
            *(f"--authorization-kubeconfig={self.kubeconfig}", f"--kubeconfig={self.kubeconfig}"),
            "--disable-admission-plugins=NamespaceLifecycle,MutatingAdmissionWebhook,ValidatingAdmissionWebhook,"
            "MutatingAdmissionPolicy,ValidatingAdmissionPolicy",
        )
        self._wait_until_answered(self._ask, PROGRAM.name)

    def _ask(self) -> None:
        with contextlib.closing(Api(str(self.kubeconfig))) as api:
            api.list(DEFINITIONS)
