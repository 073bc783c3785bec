"""An elastic training under Slurm, from the login node: submit it, give it more or fewer nodes, end it.

Slurm is asked through its own commands. Beside the event log, the directory of the run holds::

    job.sh       the batch script; `sbatch job.sh` starts the training again, from its checkpoint, after `scancel`
    token        the secret of the nodes, unless the user has set one
    slurm.json   which job of Slurm's it is
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from ef_common.errors import UsageError
from ef_common.files import write_whole
from ef_common.launch import environment, run_directory
from ef_common.launch.json_record import read_record
from ef_common.launch.run_directory import Unanswered
from ef_common.launch.slurm_script import SlurmSubmission, script_of

_RECORD, _SCRIPT, _TOKEN = "slurm.json", "job.sh", "token"
_TIMEOUT_S = 120.0
_HERE = "give this command on a machine of the Slurm cluster, such as its login node"


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job of Slurm's: an array of nodes.

    Args:
        number: That of the array.
        max_nodes: How many tasks the array has.
        per_node: Workers of a node; 0 if the node finds that out itself.
    """

    number: str
    max_nodes: int
    per_node: int


def submit(submission: SlurmSubmission, place: Path, *, checkpoint: str) -> SlurmJob:
    """Submit a training.

    Args:
        submission: It.
        place: Directory of the run, on a file system that all nodes share.
        checkpoint: URL of the checkpoints; "" for the directory of the run.

    Raises:
        UsageError: Slurm refuses it, or is not there; or the training in that directory is under way.
    """
    _check_for("sbatch")
    before = job_in(place)
    if before is not None and _is_queued(before):
        raise UsageError(f"Slurm job {before.number} trains there. Use another --run-dir. Received: {place}")
    otherwise = f"The job may be in the queue all the same: `squeue --me` shows it, and {place} is kept for it"
    with run_directory.removed_if_refused(place, otherwise=otherwise):
        run_directory.create(submission.command[0], place, local=False)
        if environment.TOKEN not in os.environ and not (place / _TOKEN).exists():
            write_whole(place / _TOKEN, f"{secrets.token_hex(16)}\n".encode(), mode=0o600)
        script = script_of(submission, place, directory=Path.cwd(), checkpoint=checkpoint)
        write_whole(place / _SCRIPT, script.encode())
        number = _ask("sbatch", "--parsable", str(place / _SCRIPT)).partition(";")[0]  # behind it is the cluster
    job = SlurmJob(number, submission.max_nodes, int(submission.per_node) if submission.per_node.isdecimal() else 0)
    run_directory.write_json(place / _RECORD, asdict(job))
    return job


def job_in(place: Path) -> SlurmJob | None:
    """The job that was submitted with this directory of a run; None for a run that Slurm does not know.

    Raises:
        UsageError: Its file cannot be read.
    """
    return read_record(SlurmJob, place / _RECORD)


def scale(job: SlurmJob, num_workers: int) -> None:
    """Let a job have so many workers: no more tasks run than have those, and the newest of the others leave.

    They are queued again, and come back when they are allowed to, and there is room.

    Raises:
        UsageError: Slurm refuses it, or whole nodes cannot have so many workers.
    """
    most = job.max_nodes * job.per_node
    if not job.per_node:
        raise UsageError(
            "each node of this run chooses its number of workers: allow so many nodes with "
            f"`scontrol update JobId={job.number} ArrayTaskThrottle=NODES`. Received: {num_workers}"
        )
    if num_workers % job.per_node or not job.per_node <= num_workers <= most:
        raise UsageError(
            f"this run can have {job.per_node} to {most} workers, {job.per_node} in each node. Received: {num_workers}"
            if job.per_node > 1
            else f"this run can have 1 to {most} workers. Received: {num_workers}"
        )
    num_nodes = num_workers // job.per_node
    limit(job, num_nodes)
    for task in _running(job)[num_nodes:]:
        _ask("scancel", "--batch", "--signal=USR1", f"{job.number}_{task}")


def limit(job: SlurmJob, num_nodes: int) -> None:
    """Let no more nodes of a job start than make so many. Those that run go on.

    Raises:
        UsageError: Slurm refuses it, or the job is smaller.
    """
    if num_nodes > job.max_nodes:
        raise UsageError(f"the array has {job.max_nodes} tasks, each of which is one node. Received: {num_nodes} nodes")
    _ask("scontrol", "update", f"JobId={job.number}", f"ArrayTaskThrottle={num_nodes}")


def stop(job: SlurmJob, *, kill: bool) -> None:
    """End a job.

    Args:
        job: It.
        kill: At once, without a checkpoint.

    Raises:
        UsageError: Slurm refuses it.
    """
    if kill:
        _ask("scancel", "--full", "--signal=KILL", job.number)
    _ask("scancel", job.number)


def hostnames(nodes: str) -> list[str]:
    """The hosts of a list such as ``node[1-3,7]``, as Slurm itself reads it.

    Raises:
        UsageError: Slurm cannot read it, or is not there.
    """
    return _ask("scontrol", "show", "hostnames", nodes).split()


def _running(job: SlurmJob) -> list[str]:
    """The tasks that run, the oldest first."""
    asked = ("--noheader", "--array", f"--jobs={job.number}", "--states=RUNNING", "--sort=S", "--format=%K")
    return _ask("squeue", *asked).split()


def _is_queued(job: SlurmJob) -> bool:
    try:
        return bool(_ask("squeue", "--noheader", f"--jobs={job.number}"))
    except UsageError:  # Slurm has forgotten it
        return False


def _check_for(command: str) -> None:
    if shutil.which(command) is None:
        raise UsageError(f"there is no `{command}` on the path: {_HERE}")


def _ask(command: str, *arguments: str) -> str:
    """What a command of Slurm's prints.

    Raises:
        UsageError: It fails; what it says in one line.
        Unanswered: It does not hear from Slurm in time.
    """
    _check_for(command)
    try:
        done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise Unanswered(f"`{command}` does not answer within {_TIMEOUT_S:g} s") from None
    if done.returncode:
        lines = [line.removeprefix(f"{command}: ").removeprefix("error: ") for line in done.stderr.splitlines()]
        kind = Unanswered if "timed out" in done.stderr else UsageError
        raise kind(f"{command}: {'; '.join(filter(None, lines)) or f'exit status {done.returncode}'}")
    return done.stdout.strip()
