"""What Kubeflow tells the pods of a job, as torchrun's static rendezvous needs it: their number, and the first of them.

The first pod may be lost and replaced by one of the same name, which knows nothing of the job. So the pods meet at
several of them, whose names follow from that of the first one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ef_common.errors import UsageError
from ef_common.launch.nnodes import nodes_of
from ef_common.launch.rendezvous_options import DEFAULT_PORT
from ef_common.protocol.addresses import Address, is_loopback, parse_address

POD = "a pod of Kubeflow"
MASTER_ADDR, NNODES, RDZV_ENDPOINT = "PET_MASTER_ADDR", "PET_NNODES", "PET_RDZV_ENDPOINT"
_MASTER_PORT, _NODE_RANK, _IN_KUBERNETES = "PET_MASTER_PORT", "PET_NODE_RANK", "KUBERNETES_SERVICE_HOST"
_OF_TRAINER = re.compile(r"(.+)-node-0-0\.\1")
_OF_OPERATOR = re.compile(r"(.+)-master-0")


@dataclass(frozen=True, slots=True)
class KubeflowPod:
    """One of several pods.

    Args:
        addresses: Of all of them, or of the first one if the names of the others do not follow from its name.
        is_first: Whether this is the first one; None if the variables do not say so.
    """

    addresses: tuple[Address, ...]
    is_first: bool | None

    def __str__(self) -> str:
        return POD


def pod_in(environ: Mapping[str, str]) -> KubeflowPod | None:
    """Which pod this is; None if nothing names the first one of several.

    Raises:
        UsageError: A variable is malformed; or there are several pods, and none of them is named.
    """
    host = environ.get(MASTER_ADDR, "").strip()
    _, number = nodes_of(environ.get(NNODES, "").strip() or "1", option=NNODES)
    if not host or is_loopback(host) or number == 1:
        _check_alone(environ)
        return None
    port_text = environ.get(_MASTER_PORT, "").strip() or DEFAULT_PORT
    first, port = parse_address(f"[{host}]:{port_text}" if ":" in host else f"{host}:{port_text}", what=MASTER_ADDR)
    rank = environ.get(_NODE_RANK, "").strip()
    return KubeflowPod(tuple((name, port) for name in _names(first, number)), is_first=rank == "0" if rank else None)


def _names(first: str, number: int) -> list[str]:
    if match := _OF_TRAINER.fullmatch(first):
        return [f"{match[1]}-node-0-{index}.{match[1]}" for index in range(number)]
    if match := _OF_OPERATOR.fullmatch(first):
        return [first, *(f"{match[1]}-worker-{index}" for index in range(number - 1))]
    return [first]


def is_one_of_elastic_pods(environ: Mapping[str, str]) -> bool:
    """Whether a PyTorchJob with an elastic policy may have several pods, which torchrun would find."""
    number = environ.get(NNODES, "").strip()
    told = _IN_KUBERNETES in environ and RDZV_ENDPOINT in environ and bool(number)
    return told and nodes_of(number, option=NNODES)[1] > 1


def _check_alone(environ: Mapping[str, str]) -> None:
    """A PyTorchJob without a master and without an elastic policy is told how many pods there are, and no more."""
    number = environ.get(NNODES, "").strip()
    if _IN_KUBERNETES in environ and number and nodes_of(number, option=NNODES)[0] > 1:
        raise UsageError(
            f"this is one of several pods ({NNODES}={number}), and each of them would run a training of its own. Give "
            "the PyTorchJob an elasticPolicy with `rdzvBackend: elasticflow`, or pass --rdzv-endpoint=HOST:PORT of one "
            "of the pods"
        )
