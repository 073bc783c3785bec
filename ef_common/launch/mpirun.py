"""`elasticflow mpi` and `elasticflow slurm srun`: a launcher that ends the job with the training, not with a lost rank.

Such a launcher ends with status 0 whatever its ranks say (Open MPI), or with the status of the one that was lost
(MPICH, Slurm), and it kills the ranks within a second when it is told to end. So it is started as a child: each rank
says with which status it ends, and a signal to this process lets the workers leave.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import FrameType
from typing import IO

from ef_common import threads
from ef_common.errors import UsageError
from ef_common.launch.environment import RANK_STATUS, TOKEN
from ef_common.launch.mpi import MPICH, OPEN_MPI, PASS_ON
from ef_common.launch.signals import Wishes, handled, to_end

SLURM, SRUN = "Slurm", "srun"
_OPTIONS = {
    OPEN_MPI: ("--enable-recovery", *PASS_ON[OPEN_MPI].split()),
    MPICH: ("-disable-auto-cleanup",),
    SLURM: ("--kill-on-bad-exit=0", "--no-kill"),
}
"""Ranks of MPICH and tasks of Slurm have all variables of the shell anyway."""
_RANK = (
    'p=; told=; trap "told=1; kill -USR1 \\$p 2>/dev/null" USR1; "$@" & p=$!; [ "$told" ] && kill -USR1 $p; '
    "while kill -0 $p 2>/dev/null; do wait $p; done; wait $p"
)
"""A rank of MPICH that a signal ends takes those of its machine with it; one that has an exit status does not.

The signal may come when the rank runs and its number is not known yet.
"""
_NAMES = {OPEN_MPI: ("Open MPI", "OpenRTE", "PRRTE"), MPICH: ("HYDRA", "Intel(R) MPI"), SLURM: ("slurm ", "slurm-wlm ")}
_NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_STATUS = re.compile(rb"(?:^ *\d+: )?elasticflow-rank-status: (\d{1,9}) (\d{1,9})\r?\n?$")
"""`srun --label` begins each line with the number of the task. Other text before it is shown, such as a label of Open
MPI or a progress bar of another rank."""
_EMPTY = re.compile(rb"^(?: *\d+: )?([ \r]*)\n$")
"""A line that looks empty. `tell_status` writes the end of one, in case there is an unfinished one."""
_MAX_BYTES = 1 << 16
_VERSION_S = 30.0
_LEFT, _LOST = os.EX_TEMPFAIL, os.EX_UNAVAILABLE
INTERRUPTED = 128 + signal.SIGINT


def launcher_of(program: str) -> str:
    """Which launcher a program is.

    Raises:
        UsageError: It is not there, or none that is known.
    """
    if shutil.which(program) is None:
        other = "" if program == SRUN else ", or name it with --mpirun"
        raise UsageError(f"there is no `{program}` on the path: give this command on a machine that has it{other}")
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_VERSION_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"`{program} --version` has failed: {error}") from None
    said = done.stdout + done.stderr
    for launcher, names in _NAMES.items():
        if any(name in said for name in names):
            return launcher
    first = said.strip().partition("\n")[0]
    raise UsageError(
        f"expected srun, or the mpirun of Open MPI, MPICH or Intel MPI. Received: {program}, which says: {first}"
    )


def command_of(program: str, arguments: Sequence[str]) -> list[str]:
    """The command with the options that it takes.

    Args:
        program: Such as ``mpirun`` or ``srun``.
        arguments: Of it, with the program that it starts.

    Raises:
        UsageError: See `launcher_of`; or nothing is started.
    """
    number = next((i for i, one in enumerate(arguments) if os.path.basename(one) == "elasticflow"), None)
    if number is None:
        raise UsageError(
            f"expected what {program} takes, and then `elasticflow run train.py`. "
            f"Received: {' '.join(arguments) or 'nothing'}"
        )
    launcher = launcher_of(program)
    if launcher == OPEN_MPI:
        return [program, *_OPTIONS[launcher], "-x", RANK_STATUS, *arguments]
    if launcher == SLURM:
        return [program, *_OPTIONS[launcher], *arguments]
    return [program, *_OPTIONS[launcher], *arguments[:number], "bash", "-c", _RANK, "rank", *arguments[number:]]


def tell_status(status: int, environ: Mapping[str, str]) -> None:
    """Tell the command that has started this rank, if it is one of this module's, with which status it ends."""
    if environ.get(RANK_STATUS):
        number = next((environ[name] for name in _NUMBERS if environ.get(name, "").isdecimal()), "0")
        sys.stderr.write(f"\nelasticflow-rank-status: {number} {status}\n")
        sys.stderr.flush()


def run(command: Sequence[str]) -> int:
    """Run such a command to its end.

    Returns:
        0 if a rank has finished the training; else 1 if one has failed, 75 if one has left, the status of the lost
        ranks if all are lost, or what the launcher says.
    """
    os.environ.setdefault(TOKEN, secrets.token_hex(16))
    os.environ[RANK_STATUS] = "1"
    statuses: dict[int, int] = {}
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        said = process.stderr or io.BytesIO()
        reader = threads.start(
            partial(_pass_on, said, statuses),
            name="elasticflow-mpi",
            job="passes on what the ranks say",
            on_failure=lambda failure: said.close(),  # or the launcher would wait until somebody reads it
        )
        ending = _Ending(process)
        with handled([*to_end(), signal.SIGUSR1], ending.note):
            launcher_status = process.wait()
        reader.join()
    status = status_of(launcher_status, list(statuses.values()))
    return INTERRUPTED if status and signal.SIGINT in ending.signals else status


def status_of(launcher: int, ranks: Sequence[int]) -> int:
    """The exit status of a job from those of its launcher and of its ranks, as far as these have said them."""
    if not ranks:
        return 128 - launcher if launcher < 0 else launcher or 1
    if 0 in ranks:
        return 0
    gone = _LEFT if _LEFT in ranks else max(ranks)
    return max((one for one in ranks if one < _LEFT and one != _LOST), default=gone)


class _Ending:
    """What signals do: the first one lets the workers leave, the second one kills them."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.signals = Wishes()

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.signals.add(number):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGUSR1 if len(self.signals) == 1 else signal.SIGTERM)


def _pass_on(source: IO[bytes], statuses: dict[int, int]) -> None:
    held = b""  # a line that looks empty, until it is known whether it is that of a status
    while line := source.readline(_MAX_BYTES):
        found = _STATUS.search(line)
        if found:
            statuses[int(found[1])] = int(found[2])
            held, line = _EMPTY.sub(rb"\1", held), line[: found.start()]
        _show(held)
        held = line if _EMPTY.match(line) else b""
        if not held:
            _show(line)
    _show(held)


def _show(content: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(2, content)
