"""`TF_CONFIG`: what Kubeflow's TFJob, and others who start TensorFlow on several machines, tell each of the processes.

It names all of them by their roles, and says which one this is. Elastic training needs no more of it than a place where
they meet: those that train are all alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ef_common.errors import UsageError
from ef_common.protocol.addresses import Address, parse_address

VARIABLE = "TF_CONFIG"
_ROLES = ("chief", "master", "worker")
"""Those that train, in the order in which they are counted."""


@dataclass(frozen=True, slots=True)
class Task:
    """One of the processes.

    Args:
        role: `worker`, `chief` or `master`.
        index: Of this one among those of its role.
        addresses: Of all that train.
    """

    role: str
    index: int
    addresses: tuple[Address, ...]

    def __str__(self) -> str:
        return f"{self.role} {self.index} of {VARIABLE}"


def task_in(environ: Mapping[str, str]) -> Task | None:
    """Which process this is; None for the only one.

    Raises:
        UsageError: The variable is malformed, names a role that does not train, or does not name the other processes.
    """
    cluster, role, index = _read(environ.get(VARIABLE, "").strip() or "{}")
    if not cluster:
        return None
    if role not in _ROLES:
        raise UsageError(
            f"this is {role} {index} of {VARIABLE}, which has nothing to do in an elastic training: leave out all "
            f"replicas but {' and '.join((_ROLES[0], _ROLES[-1]))}"
        )
    if isinstance(cluster.get("worker"), Mapping):
        raise UsageError(
            f"this is {role} {index} of {VARIABLE}, which does not name the other workers (enableDynamicWorker): pass "
            "--rdzv-endpoint=HOST:PORT of the first one"
        )
    texts = [str(text) for one in _ROLES for text in cluster.get(one) or ()]
    addresses = tuple(parse_address(text, what=f"each address in {VARIABLE}") for text in texts)
    return Task(role, index, addresses) if len(addresses) > 1 else None


def _read(text: str) -> tuple[Mapping[str, Any], str, int]:
    """The processes by their roles, and which one this is."""
    try:
        config = json.loads(text)
        cluster, task = config.get("cluster") or {}, config.get("task") or {}
        if cluster:
            return {**cluster}, str(task["type"]), int(task["index"])
        return {}, "", 0
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UsageError(
            f'{VARIABLE} must be JSON: {{"cluster": {{"worker": ["HOST:PORT", …]}}, "task": {{"type": "worker", '
            f'"index": 0}}}}. Received: {text}'
        ) from None
