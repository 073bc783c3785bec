"""`elasticflow slurm`: trainings in a cluster of Slurm's."""

from __future__ import annotations

from pathlib import Path

import click

from ef_common.cli.common import RunDirectory, refusing, run_with, say_what_next, shown
from ef_common.launch.nnodes import DEFAULT_NNODES


@click.group()
def slurm() -> None:
    """Train in a Slurm cluster, on the nodes that are free."""


@slurm.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--nodes",
    metavar="MIN:MAX",
    default=DEFAULT_NNODES,
    show_default=True,
    help="The training waits for MIN nodes, and has at most MAX.",
)
@click.option(
    "--nproc-per-node",
    "per_node",
    metavar="NUMBER",
    default="1",
    show_default=True,
    help="Workers of a node, or `gpu`.",
)
@click.option(
    "--run-dir",
    type=RunDirectory(),
    help="Directory of the run, which all nodes share. Default: a new one in ./elasticflow-runs.",
)
@click.option(
    "--checkpoint", metavar="URL", default="", help="Where checkpoints are. Default: the directory of the run."
)
@click.option("--dry-run", is_flag=True, help="Print the batch script, and do nothing.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF SBATCH] SCRIPT [ARGUMENTS]...")
def submit(
    nodes: str, per_node: str, run_dir: Path | None, checkpoint: str, dry_run: bool, arguments: tuple[str, ...]
) -> None:
    """Submit a training: `elasticflow slurm submit --nodes=1:8 --partition=gpu --gpus-per-node=1 train.py`.

    The job is an array of MAX tasks, each of which is one node. The training starts with the nodes that are free, and
    grows. A task that Slurm preempts, or whose time is over, leaves at the next step, and is queued again. Options of
    sbatch and of `elasticflow run` are accepted as --name=value.
    """
    from ef_common.launch import run_directory
    from ef_common.launch import slurm as slurms
    from ef_common.launch.slurm_script import SlurmSubmission, script_of

    with refusing("slurm submit"):
        submission = SlurmSubmission.parse(nodes, arguments, per_node=per_node)
        place = (run_dir or run_directory.new_place(submission.command[0])).resolve()
        if dry_run:
            click.echo(script_of(submission, place, directory=Path.cwd(), checkpoint=checkpoint), nl=False)
            return
        job = slurms.submit(submission, place, checkpoint=checkpoint)
    where = shown(place)
    rows = (
        (f"squeue --jobs={job.number}", "which nodes it has"),
        (f"elasticflow status {where}", "workers, progress, speed"),
        (f"elasticflow logs --follow {where}", "what happens"),
        (f"elasticflow scale {where} WORKERS", "more nodes or fewer"),
        (f"scancel {job.number}", "save a checkpoint, and end"),
    )
    low, high = submission.min_nodes, submission.max_nodes
    say_what_next(f"Slurm job {job.number} starts with {low} to {high} nodes.", rows)


@slurm.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--dry-run", is_flag=True, help="Print the command, and do nothing.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF SRUN] elasticflow run SCRIPT ...")
def srun(dry_run: bool, arguments: tuple[str, ...]) -> None:
    """Run a job on the nodes of one allocation: `elasticflow slurm srun --ntasks-per-node=1 elasticflow run train.py`.

    Adds the options by which a node that is lost does not end the others, and a secret. Ctrl-C lets the workers save a
    checkpoint and leave. The exit status is that of the training.
    """
    run_with("srun", arguments, command="slurm srun", dry_run=dry_run)
