"""What an MPI launcher tells a command that it has started several times: which one it is, and on which hosts they are.

The command is no MPI program, and never becomes one: the launcher's process manager is only asked for the hosts.

* Open MPI's `mpirun` (and PRRTE's) is a PMIx server, which knows the host of each rank; :mod:`ef_common.launch.pmix`
  asks it in a process of its own.
* MPICH's `mpiexec` (Hydra, and so Intel's) speaks PMI over a file descriptor: each rank says where it is, and all hear
  it (:mod:`ef_common.launch.pmi`).
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ef_common.errors import UsageError
from ef_common.launch import pmi
from ef_common.launch.child import SAFE_PATH
from ef_common.launch.environment import TOKEN
from ef_common.launch.finding import own_host
from ef_common.protocol.addresses import LOOPBACK

OPEN_MPI, MPICH = "Open MPI", "MPICH"
_VARIABLES = {
    OPEN_MPI: (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    MPICH: ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
_PMIX_JOB, _ORTE, _PMI_FD = "PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri", "PMI_FD"
PASS_ON = {OPEN_MPI: f"-x {TOKEN}", MPICH: f"-genvlist {TOKEN}"}
"""Options by which a launcher gives its ranks the token of the shell."""
_HOST_OF_HYDRA = "MPIR_CVAR_CH3_INTERFACE_HOSTNAME"  # as the user has named it
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the commands that an MPI launcher has started.

    Args:
        launcher: `OPEN_MPI` or `MPICH`.
        number: Of this one.
        size: How many there are.
        local_number: Of this one among those of its machine.
        local_size: How many there are on its machine.
    """

    launcher: str
    number: int
    size: int
    local_number: int
    local_size: int

    def __str__(self) -> str:
        return f"rank {self.number} of {self.size} of {self.launcher}"

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.local_size == self.size


@dataclass(frozen=True, slots=True)
class Hosts:
    """Where all ranks are.

    Args:
        names: Of the hosts, in the order of the ranks, each of them once.
        job: Name of the job, by which its ranks choose the same port, and those of other jobs another one.
    """

    names: list[str]
    job: str

    def port(self, ports: range) -> int:
        """A port that another job is not likely to have."""
        return ports[int.from_bytes(hashlib.sha256(self.job.encode()).digest()[:4], "big") % len(ports)]


def rank_in(environ: Mapping[str, str]) -> Rank | None:
    """Which rank this is; None for a command that was started once, or by something else."""
    for launcher, names in _VARIABLES.items():
        values = [environ.get(name, "").strip() for name in names]
        if all(value.isdecimal() for value in values):
            number, size, local_number, local_size = map(int, values)
            return Rank(launcher, number, size, local_number, local_size) if size > 1 else None
    return None


def hosts_of(rank: Rank, environ: Mapping[str, str]) -> Hosts:
    """Ask the process manager where all ranks are. All of them must ask, as those of MPICH wait for each other.

    Raises:
        UsageError: It does not tell.
    """
    if rank.launcher == MPICH:
        host = environ.get(_HOST_OF_HYDRA, "").strip() or own_host()
        fd = environ.get(_PMI_FD, "").strip()
        if not fd.isdecimal():
            raise UsageError(f"this is {rank}, and the process manager has left no descriptor in {_PMI_FD}")
        return Hosts(*pmi.exchange(host, rank=rank.number, size=rank.size, fd=int(fd), timeout_s=_TIMEOUT_S))
    job = f"{environ.get(_PMIX_JOB, '')} {environ.get(_ORTE, '')}"
    if rank.is_on_one_machine:
        return Hosts([LOOPBACK], job)
    return Hosts(_ask_pmix(rank), job)


def _ask_pmix(rank: Rank) -> list[str]:
    command = [sys.executable, *SAFE_PATH, "-m", "ef_common.launch.pmix", str(rank.size)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        return list(dict.fromkeys(map(str, json.loads(done.stdout))))
    except subprocess.TimeoutExpired:
        why = f"no answer within {_TIMEOUT_S:g} s"
    except (OSError, ValueError):
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    raise UsageError(f"this is {rank}, and PMIx does not tell where the other ranks are: {why}")
