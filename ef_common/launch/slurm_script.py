"""The batch script of an elastic training under Slurm: an array, each task of which is one node.

Slurm lets a job shrink, and never grow. The tasks of an array are jobs of their own: those start for which there is
room, and the others join when there is. No host is named: the nodes find each other at a place that all of them share.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ef_common.errors import UsageError
from ef_common.launch.nnodes import nodes_of

NOTICE_S = 60
"""How long before the end of its time a task is told to go."""
OF_RUN = (
    *("autoscale", "duplicate-stderr-filters", "duplicate-stdout-filters", "event-log-handler", "local-ranks-filter"),
    *("log-dir", "log-format", "logs-specs", "max-restarts", "monitor-interval", "numa-binding", "rdzv-conf"),
    *("rdzv-endpoint", "rdzv-id", "redirects", "role", "scale-command", "shutdown-timeout", "start-method", "tee"),
    *("tls", "virtual-local-rank"),
)
"""Options of `elasticflow run` beside those that a submission has itself; all others are sbatch's."""
_OURS = ("array", "nodes", "no-requeue", "ntasks", "ntasks-per-node", "wrap", "-a", "-N", "-n")
"""Options of sbatch that make an array of nodes what it is."""


@dataclass(frozen=True, slots=True)
class SlurmSubmission:
    """An elastic training, as it is submitted.

    Args:
        min_nodes: Nodes, without which the training waits.
        max_nodes: Nodes, of which it has no more: tasks of the array.
        per_node: Workers of a node, as ``--nproc-per-node`` has it: a number, or a word such as ``gpu``.
        sbatch: Options for Slurm.
        run: Options for `elasticflow run`.
        command: The script and its arguments.
    """

    min_nodes: int
    max_nodes: int
    per_node: str
    sbatch: tuple[str, ...]
    run: tuple[str, ...]
    command: tuple[str, ...]

    @classmethod
    def parse(cls, nodes: str, arguments: Sequence[str], *, per_node: str = "1") -> SlurmSubmission:
        """Read a command line.

        Args:
            nodes: ``MIN:MAX``, or one number for both.
            arguments: Options of sbatch and of `elasticflow run` in the form ``--name=value``, the script, and what
                follows it.
            per_node: Workers of a node.

        Raises:
            UsageError: It is malformed; or there is no such script.
        """
        low, high = nodes_of(nodes, option="--nodes")
        number = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), len(arguments))
        options, command = arguments[:number], arguments[number:]
        if not command or not Path(command[0]).is_file():
            script = f"Received: {command[0]}" if command else "Received: no script"
            raise UsageError(
                "expected options, each as --name=value or -xVALUE, then a script that is there, and its arguments. "
                + script
            )
        for option in options:
            if (option.startswith("--") and option[2:].partition("=")[0] in _OURS) or option[:2] in _OURS:
                raise UsageError(
                    f"each task of the array is one node; --nodes=MIN:MAX says how many there are. Received: {option}"
                )
        return cls(
            *(low, high, per_node),
            sbatch=tuple(option for option in options if not _is_of_run(option)),
            run=tuple(option for option in options if _is_of_run(option)),
            command=tuple(command),
        )


def _is_of_run(option: str) -> bool:
    return option.startswith("--") and option[2:].partition("=")[0].replace("_", "-") in OF_RUN


def script_of(submission: SlurmSubmission, run_dir: Path, *, directory: Path, checkpoint: str = "") -> str:
    """The batch script.

    Args:
        submission: What is submitted.
        run_dir: Directory of the run, which all nodes share.
        directory: Working directory.
        checkpoint: URL of the checkpoints; "" for the directory of the run.
    """
    last = submission.max_nodes - 1
    given = {
        "job-name": Path(submission.command[0]).stem,
        # One that chooses its size begins with the fewest nodes, and asks for more.
        "array": f"0-{last}%{submission.min_nodes}" if _has(submission, "autoscale") else f"0-{last}",
        "nodes": "1",
        "ntasks": "1",
        "requeue": "",
        "signal": f"B:USR1@{NOTICE_S}",
        "open-mode": "append",
        "output": str(run_dir).replace("%", "%%") + "/slurm-%A_%a.out",
        "chdir": str(directory),
    }
    lines = [f"--{name}={value}" if value else f"--{name}" for name, value in given.items()]
    options = [
        f"--nnodes={submission.min_nodes}:{submission.max_nodes}",
        *((f"--nproc-per-node={submission.per_node}",) if submission.per_node != "1" else ()),
        *submission.run,
        *((f"--checkpoint={checkpoint}",) if checkpoint else ()),
        *submission.command,
    ]
    return _SCRIPT.format(
        sbatch="\n".join(f"#SBATCH {shlex.quote(line)}" for line in [*lines, *submission.sbatch]),
        run=shlex.quote(str(run_dir)),
        bin=shlex.quote(str(Path(sys.executable).parent)),
        checkpoint="" if checkpoint else '--checkpoint="file://$run" ',
        rendezvous="" if _has(submission, "rdzv-endpoint") else '--rdzv-endpoint="file://$run" ',
        options=shlex.join(options),
        others=f'    scancel --quiet --state=PENDING "${{SLURM_ARRAY_JOB_ID}}_[1-{last}]"' if last else "    :",
    )


def _has(submission: SlurmSubmission, name: str) -> bool:
    return any(option.partition("=")[0].replace("_", "-") == f"--{name}" for option in submission.run)


_SCRIPT = """\
#!/bin/bash
{sbatch}

# An elastic training. Each task of this array is one node: those start for which there is room, the others join later.
run={run}
task="${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
export PATH={bin}:$PATH
export ELASTICFLOW_TOKEN="${{ELASTICFLOW_TOKEN:-$(cat "$run/token")}}"

trap 'kill -USR1 $node 2>/dev/null' USR1 TERM    # it leaves at the next step
elasticflow run --run-dir="$run" {rendezvous}{checkpoint}\\
    {options} &
node=$!
while kill -0 $node 2>/dev/null; do wait $node; done
wait $node
status=$?

restarts=${{SLURM_RESTART_COUNT:-0}}
[ $status = 69 ] || [ $status -gt 128 ] || {{ [ $status = 2 ] && [ "$restarts" -gt 0 ]; }}    # 2: it finds no job, say
is_lost=$?
if [ $status = 75 ] || {{ [ $is_lost = 0 ] && [ "$restarts" -lt 20 ]; }}; then
    # It was told to go, or is lost: it comes back when there is room, unless Slurm has ended it for good.
    for pause in 1 2 4 8 0; do    # slurmctld may have too much to do, or be started again
        state=$(squeue --noheader --job="$task" --format=%T) &&
            {{ [ "$state" != RUNNING ] || scontrol requeue "$task"; }} && break
        sleep $pause
    done
elif [ $status -le 1 ]; then
    # The training is over, or has failed: those that still wait in the queue are not needed, except the first one.
{others}
fi
exit $status
"""
