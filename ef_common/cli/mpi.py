"""`elasticflow mpi`: an MPI launcher, told that a lost rank is no reason to end the job."""

from __future__ import annotations

import click

from ef_common.cli.common import run_with


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--mpirun", metavar="PROGRAM", default="mpirun", show_default=True, help="The launcher.")
@click.option("--dry-run", is_flag=True, help="Print the command, and do nothing.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF MPIRUN] elasticflow run SCRIPT ...")
def mpi(mpirun: str, dry_run: bool, arguments: tuple[str, ...]) -> None:
    """Run a job with mpirun: `elasticflow mpi -np 4 --hostfile hosts.txt elasticflow run train.py`.

    Adds the options of Open MPI or MPICH by which a rank that is lost does not end the job, and a secret. Ctrl-C lets
    the workers save a checkpoint and leave. The exit status is that of the training.
    """
    run_with(mpirun, arguments, command="mpi", dry_run=dry_run)
