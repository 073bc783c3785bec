"""What a scheduler's variables say of a command that names no endpoint: that it is one of several, and where they meet.

Without an endpoint each of them would silently run a training of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ef_common.errors import UsageError
from ef_common.launch.rendezvous_options import DEFAULT_PORT
from ef_common.protocol.addresses import format_address, is_loopback, parse_address

_MASTER_ADDR, _MASTER_PORT, _NNODES, _NODE_RANK = "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NNODES", "PET_NODE_RANK"
_TASKS = {
    "a Slurm step": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "an MPI job": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "an MPI launcher": ("PMI_SIZE", "PMI_RANK"),
}
"""Who starts the same command several times: the variables of how often, and of which one this is."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the nodes of a job meet.

    Args:
        endpoint: Host and port.
        is_host: Whether that is this node; None if the variables do not say so.
    """

    endpoint: str
    is_host: bool | None


def meeting_in(environ: Mapping[str, str]) -> Meeting | None:
    """Where the nodes meet, as Kubeflow's Trainer tells them; None for a job on this machine.

    Raises:
        UsageError: This is one of several tasks, and nothing says where they meet; or a variable is malformed.
    """
    host = environ.get(_MASTER_ADDR, "").strip()
    if host and not is_loopback(host) and environ.get(_NNODES, "1").strip() not in ("", "1", "1:1"):
        port = environ.get(_MASTER_PORT, "").strip() or DEFAULT_PORT
        address = parse_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", what=_MASTER_ADDR)
        rank = environ.get(_NODE_RANK, "").strip()
        return Meeting(format_address(address), is_host=rank == "0" if rank else None)
    for what, (size, rank) in _TASKS.items():
        number = environ.get(size, "").strip()
        if number.isdecimal() and int(number) > 1:
            raise UsageError(
                f"this is task {environ.get(rank, '?')} of {number} of {what}, and each of them would run a training "
                "of its own. Pass --rdzv-endpoint=HOST:PORT of one of them, or a place that all of them reach: "
                "--rdzv-endpoint=file:///shared/folder"
            )
    return None
