"""`elasticflow yarn`: trainings as services of YARN."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ef_common.cli.common import RunDirectory, name_for, options_and_script, refusing, say_what_next, shown
from ef_common.launch.nnodes import DEFAULT_NNODES, nodes_of

if TYPE_CHECKING:
    from ef_common.launch.yarn import YarnJob


_run = click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))


@click.group()
def yarn() -> None:
    """Train in a cluster of Hadoop YARN, as a service whose containers come and go."""


@yarn.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--url", metavar="URL", default="http://localhost:8088", show_default=True, help="The ResourceManager.")
@click.option("--name", metavar="NAME", help="Of the service. Default: that of the script.")
@click.option("--nodes", metavar="MIN:MAX", default=DEFAULT_NNODES, show_default=True, help="Containers.")
@click.option("--containers", type=int, help="How many there are at the start. Default: MAX.")
@click.option("--cpus", type=click.IntRange(1), default=1, show_default=True, help="Of each container.")
@click.option("--memory", type=click.IntRange(1), default=4096, show_default=True, help="Of each container, in MB.")
@click.option("--gpus", type=click.IntRange(0), default=0, show_default=True, help="Of each container.")
@click.option("--queue", metavar="QUEUE", default="", help="Of YARN.")
@click.option(
    "--run-dir",
    type=RunDirectory(),
    help="Directory of the run, which all nodes share. Default: a new one in ./elasticflow-runs.",
)
@click.option("--checkpoint", metavar="URL", default="", help="Default: the directory of the run.")
@click.option("--dry-run", is_flag=True, help="Print the Yarnfile, and do nothing.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF RUN] SCRIPT [ARGUMENTS]...")
def submit(
    url: str,
    name: str | None,
    nodes: str,
    containers: int | None,
    cpus: int,
    memory: int,
    gpus: int,
    queue: str,
    run_dir: Path | None,
    checkpoint: str,
    dry_run: bool,
    arguments: tuple[str, ...],
) -> None:
    """Submit a training: `elasticflow yarn submit --url=http://rm:8088 --nodes=1:8 --gpus=1 train.py`.

    Each container is one node. Options of `elasticflow run` are accepted as --name=value.
    """
    import json

    from ef_common.launch import run_directory
    from ef_common.launch import yarn as services

    with refusing("yarn submit"):
        low, high = nodes_of(nodes, option="--nodes")
        run, command = options_and_script(arguments)
        training = services.Training(
            name=name or name_for(command[0], max_chars=services.MAX_NAME),
            containers=high if containers is None else containers,
            min_nodes=low,
            max_nodes=high,
            resource=services.Resource(cpus, memory, gpus),
            queue=queue,
            run=run,
            command=command,
        )
        place = (run_dir or run_directory.new_place(command[0])).resolve()
        if dry_run:
            click.echo(json.dumps(services.service_of(training, place), indent=2))
            return
        job = services.submit(training, place, url=url, checkpoint=checkpoint)
    where = shown(place)
    rows = (
        (f"elasticflow yarn status {where}", "which containers it has"),
        (f"elasticflow status {where}", "workers, progress, speed"),
        (f"elasticflow logs --follow {where}", "what happens"),
        (f"elasticflow yarn scale {where} CONTAINERS", "more containers or fewer"),
        (f"elasticflow yarn stop {where}", "end it; the workers are told to leave"),
    )
    say_what_next(f"Service {job.name} starts with {training.containers} containers.", rows)


@yarn.command()
@_run
@click.argument("containers", type=int)
def scale(run: Path, containers: int) -> None:
    """Let the service of RUN have CONTAINERS containers."""
    from ef_common.launch import yarn as services

    with refusing("yarn scale"):
        services.scale(_job_in(run), containers)
    click.echo(f"{containers} containers ordered")


@yarn.command()
@_run
def status(run: Path) -> None:
    """Show what YARN says of the service of RUN; `elasticflow status RUN` shows the training."""
    from ef_common.launch import yarn as services

    with refusing("yarn status"):
        job = _job_in(run)
        known = services.status_of(job)
    hosts = f": {', '.join(known.hosts)}" if known.hosts else ""
    click.echo(f"{job.name}: {known.state}, {len(known.hosts)} of {known.wanted} containers{hosts}")
    if known.diagnostics:
        click.echo(known.diagnostics)


@yarn.command()
@_run
def stop(run: Path) -> None:
    """End the service of RUN; its workers are told to leave."""
    from ef_common.launch import yarn as services

    with refusing("yarn stop"):
        services.stop(_job_in(run))


def _job_in(run: Path) -> YarnJob:
    from ef_common.errors import UsageError
    from ef_common.launch import yarn as services

    job = services.job_in(run)
    if job is None:
        raise UsageError(f"no service of YARN was submitted with that directory of a run. Received: {run}")
    return job
