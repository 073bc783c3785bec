"""A training, as a user submits it from the command line: an `ElasticJob` that could as well be written by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ef_common.errors import UsageError
from ef_common.kubernetes.resource import API_VERSION, KIND, MAX_NAME, NAME_FORM, Json, autoscale_in

_AUTOSCALE, _RUN_DIR = "--autoscale=", "--run-dir="
_GROUP = 1000
_VOLUMES: dict[str, tuple[str, dict[str, str]]] = {
    "run": ("/run/elasticflow", {}),
    "tmp": ("/tmp", {}),
    "shm": ("/dev/shm", {"medium": "Memory"}),
}
"""Where a pod may write, and what each place is. A container has 64 MiB of shared memory else, which is too little for
the processes of a `DataLoader`; this one counts as memory of the pod."""


@dataclass(frozen=True, slots=True)
class Submission:
    """An elastic training.

    Args:
        name: Of the job.
        namespace: Where it is.
        min_workers: Worker pods, without which it waits.
        max_workers: Worker pods, of which it has no more.
        image: Of the pods; it has ElasticFlow, the framework and the script.
        command: The script in the image, and its arguments.
        per_pod: Workers of a pod: a number, or `gpu`.
        resources: What each pod needs, by its name in Kubernetes.
        checkpoint: URL of the checkpoints; "" for none.
        priority_class: Name of the priority class; "" for none.
        environ: Variables of the pods.
        run: Options for `elasticflow run`. Of these, `--autoscale` is a field of the job.
        spares: Pods beyond `max_workers`, which wait in case one is lost.
        claims: Where the pods mount volumes, by the names of their claims. All pods share them.
    """

    name: str
    namespace: str
    min_workers: int
    max_workers: int
    image: str
    command: tuple[str, ...]
    per_pod: str = "1"
    resources: Mapping[str, str] | None = None
    checkpoint: str = ""
    priority_class: str = ""
    environ: Mapping[str, str] | None = None
    run: tuple[str, ...] = ()
    spares: int = 0
    claims: Mapping[str, str] | None = None

    def job(self) -> Json:
        """The job.

        Raises:
            UsageError: Its name is not valid for a job, or the settings of `--autoscale` are wrong.
        """
        if not (re.fullmatch(NAME_FORM, self.name) and self.name[0].isalpha()):
            raise UsageError(
                f"the name of a job has at most {MAX_NAME} small letters, digits and hyphens, and begins with a "
                f"letter. Received: {self.name}"
            )
        spec: Json = {"minWorkers": self.min_workers, "maxWorkers": self.max_workers, "nprocPerNode": self.per_pod}
        if self.checkpoint:
            spec["checkpoint"] = self.checkpoint
        if self.priority_class:
            spec["priorityClassName"] = self.priority_class
        if self.spares:
            spec["spares"] = self.spares
        if (autoscale := self._autoscale) is not None:
            spec["autoscale"] = autoscale_in(autoscale)
        spec["template"] = {"spec": self._pod()}
        meta = {"name": self.name, "namespace": self.namespace}
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "spec": spec}

    @property
    def _autoscale(self) -> str | None:
        given = [option.removeprefix(_AUTOSCALE) for option in self.run if option.startswith(_AUTOSCALE)]
        return given[-1] if given and given[-1] != "off" else None

    def _pod(self) -> Json:
        """A pod that the strictest standard for pods allows."""
        run = [option for option in self.run if not option.startswith(_AUTOSCALE)]
        claimed = {path.rstrip("/") for path in (self.claims or {}).values()}
        volumes = {name: (path, kind) for name, (path, kind) in _VOLUMES.items() if path not in claimed}
        container: Json = {
            "name": "worker",
            "image": self.image,
            "command": ["elasticflow", "run", *self._run_dir, *run],
            "args": list(self.command),
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
        }
        if self.resources:
            container["resources"] = {"limits": dict(self.resources)}
        if self.environ:
            container["env"] = [{"name": name, "value": value} for name, value in self.environ.items()]
        pod: Json = {
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": [{"name": name, "emptyDir": dict(kind)} for name, (_, kind) in volumes.items()],
        }
        for number, (claim, path) in enumerate((self.claims or {}).items()):
            pod["securityContext"]["fsGroup"] = _GROUP  # else root alone may write there
            name = f"claim-{number}"
            pod["volumes"].append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
            container["volumeMounts"].append({"name": name, "mountPath": path})
        return pod

    @property
    def _run_dir(self) -> tuple[str, ...]:
        """The run directory, if the user does not name one: the root file system cannot be written to."""
        return () if any(option.startswith(_RUN_DIR) for option in self.run) else (f"{_RUN_DIR}/run/elasticflow",)


def pairs(texts: Sequence[str], *, option: str) -> dict[str, str]:
    """Read `NAME=VALUE`, as an option has it several times.

    Raises:
        UsageError: One of them is none.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UsageError(f"expected NAME=VALUE. Received: {option}={text}")
        found[name] = value
    return found


def row(job: Mapping[str, Any]) -> dict[str, Any]:
    """What `status` says of a job."""
    spec, status = job["spec"], job.get("status") or {}
    most = spec.get("maxWorkers", 0)
    return {
        "name": job["metadata"]["name"],
        "namespace": job["metadata"]["namespace"],
        "phase": status.get("phase", "Pending"),
        "running": status.get("running", 0),
        "training": status.get("training"),
        "generation": status.get("generation"),
        "step": status.get("step"),
        "checkpoint": status.get("checkpointStep"),
        "samples_per_s": status.get("samplesPerSecond"),
        "changes": status.get("changes", []),
        "asked": status.get("asked", 0),
        "wanted": status.get("wanted", 0),
        "min": spec.get("minWorkers", 1),
        "max": min(most, spec.get("workers", most)),
        "starts": status.get("starts", 0),
        "reason": status.get("reason", ""),
    }
