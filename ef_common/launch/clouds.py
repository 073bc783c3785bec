"""What SkyPilot and SageMaker tell each of several machines of a cloud, on which they run the same command."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ef_common.errors import UsageError
from ef_common.launch.rendezvous_options import DEFAULT_PORT

_SKYPILOT, _SAGEMAKER = "SKYPILOT_NODE_IPS", "SM_HOSTS"
NAMES = {_SKYPILOT: "SkyPilot", _SAGEMAKER: "SageMaker"}
"""Of clouds, by the variables that name their machines."""


@dataclass(frozen=True, slots=True)
class CloudNode:
    """One of the machines.

    Args:
        number: Which one this is; "?" if that is not known.
        hosts: Names or addresses of all, in one order.
        variable: The variable that names them.
        task: What only the nodes of one job have in common where several jobs may be on a machine; "" elsewhere.
    """

    number: str
    hosts: tuple[str, ...]
    variable: str
    task: str = ""

    def __str__(self) -> str:
        return f"node {self.number} of {len(self.hosts)} of {NAMES[self.variable]}"

    def port(self, ports: range) -> int:
        """Where the nodes of this job meet: one of these ports if several jobs may be on a machine."""
        return ports[zlib.crc32(self.task.encode()) % len(ports)] if self.task else DEFAULT_PORT


def node_in(environ: Mapping[str, str]) -> CloudNode | None:
    """Which machine this is; None for the only one.

    Raises:
        UsageError: A variable is malformed.
    """
    hosts = tuple(environ.get(_SKYPILOT, "").split())
    if len(hosts) > 1:
        task = environ.get("SKYPILOT_TASK_ID", "").strip()
        return CloudNode(environ.get("SKYPILOT_NODE_RANK", "?"), hosts, _SKYPILOT, task)
    hosts = _hosts_of_sagemaker(environ.get(_SAGEMAKER, "").strip() or "[]")
    if len(hosts) > 1:
        this = environ.get("SM_CURRENT_HOST", "")
        number = str(hosts.index(this)) if this in hosts else "?"
        return CloudNode(number, hosts, _SAGEMAKER)
    return None


def _hosts_of_sagemaker(text: str) -> tuple[str, ...]:
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, str) and host for host in hosts):
        raise UsageError(f'{_SAGEMAKER} must be a JSON list of hosts: ["algo-1", "algo-2"]. Received: {text}')
    return tuple(hosts)
