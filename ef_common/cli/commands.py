"""The `elasticflow` command."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem, get_completion_class

from ef_common import __version__
from ef_common.cli import reporting
from ef_common.cli.common import RunDirectory, json_option, refusing
from ef_common.cli.kubernetes import kubernetes
from ef_common.cli.mpi import mpi
from ef_common.cli.slurm import slurm
from ef_common.cli.yarn import yarn
from ef_common.terminal import mark

if TYPE_CHECKING:
    from ef_common.report.status import Change

__all__ = ["main"]


def _print_version(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        click.echo(f"elasticflow {__version__}")
        context.exit()


def _complete_run(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Directories of runs below ./elasticflow-runs, the newest first; any directory if no run matches."""
    from ef_common.launch import run_directory

    if parameter.nargs == -1 and context.params.get(parameter.name or ""):  # [RUN] WORKERS: a number comes next
        return []
    found = [str(path) for path in run_directory.newest_first() if str(path).startswith(incomplete)]
    return [CompletionItem(path) for path in found] or [CompletionItem(incomplete, type="dir")]


def _complete_file(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


_run = click.argument(
    "run",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=False,
    shell_complete=_complete_run,
)


@click.group()
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Elastic, fault-tolerant training for PyTorch Lightning and Keras."""


@main.command()
@_run
@json_option
def audit(run: Path | None, as_json: bool) -> None:
    """Prove from the event log of RUN that the run kept its promises.

    RUN is the run directory (ELASTICFLOW_RUN_DIR). The default is the newest one below ./elasticflow-runs. Prints one
    line for each property: ✓ if it holds, ✗ if it does not, – if nothing was recorded that it could be checked by. The
    exit status is 0 if no property fails, 1 at the first violation, and 2 if the log cannot be read.
    """
    from ef_common.audit import audit as check  # numpy: not for --help and --version
    from ef_common.errors import UsageError
    from ef_common.launch import run_directory

    try:
        report = check(run or run_directory.newest())
    except (UsageError, OSError) as error:
        click.echo(f"elasticflow audit: {error}", err=True)
        sys.exit(2)
    if as_json:
        properties = {
            one.name: {"ok": one.ok, "checked": one.checked, "detail": one.detail} for one in report.properties
        }
        click.echo(json.dumps({"ok": report.ok, "properties": properties}))
    else:
        click.echo(report)
    sys.exit(0 if report.ok else 1)


@main.command()
@_run
@click.option(
    "--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="The file. Default: RUN/report.html."
)
@reporting.options
def report(run: Path | None, output: Path | None, png: Path | None, audits: bool, as_json: bool) -> None:
    """Write a report of RUN: one HTML file that a browser shows without a network.

    RUN is the run directory (ELASTICFLOW_RUN_DIR). The default is the newest one below ./elasticflow-runs. The report
    shows the outcome, the goodput and the audit; workers, samples per second, loss, batch, learning rate and what each
    change has cost over time; what each process did; and tables of the changes, checkpoints and warnings.
    """
    from ef_common.launch import run_directory
    from ef_common.report.timeline import snapshot_of

    with refusing("report"):
        place = run or run_directory.newest_readable()
        snapshot = snapshot_of(place, unaudited="" if audits else reporting.LEFT_OUT)
        reporting.write(snapshot, output or place / "report.html", whole=output is None, png=png, as_json=as_json)


# What is behind the script is the script's: a `--` there, too.
@main.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, add_help_option=False
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_file)
def run(arguments: tuple[str, ...]) -> None:
    """Run a training script elastically: `elasticflow run --nproc-per-node 4 train.py`.

    Accepts all options of torchrun, and `--checkpoint URL` and `--run-dir DIR`. See `elasticflow run --help`.
    """
    from ef_common.launch.command import main as run_job
    from ef_common.launch.last_exit import LastExit

    raise LastExit(run_job(arguments))


@main.command()
@click.option(
    "--rdzv-endpoint",
    "endpoint",
    metavar="ENDPOINT",
    required=True,
    help="As for the nodes of the job: HOST:PORT of this machine, a list, or a URL.",
)
@click.option("--rdzv-conf", "conf", metavar="KEY=VALUE,…", default="", help="Settings, as for the nodes of the job.")
@click.option("--rdzv-id", "job", metavar="ID", default="none", help="Tells several jobs at one URL apart.")
@click.option("--nnodes", metavar="MIN:MAX", default="1:8", show_default=True, help="How many nodes the job may have.")
@click.option("--local-addr", metavar="ADDRESS", help="Address at which others reach this machine.")
@click.option("--standby", is_flag=True, help="Never found the job: wait until somebody leads it.")
def coordinator(endpoint: str, conf: str, job: str, nnodes: str, local_addr: str | None, standby: bool) -> None:
    """Run a coordinator as a process of its own, on a machine without workers.

    It needs no GPU and no framework. It leads the job at ENDPOINT, or stands by if somebody leads it already. Nodes are
    started with the same --rdzv-endpoint. SIGTERM ends it, after it has handed over if another node can take over. One
    that leads ends by itself when the training is over, with status 0, or with 1 if the job has failed.
    """
    from ef_common.errors import ElasticFlowError
    from ef_common.launch.coordinator_alone import Alone

    try:
        sys.exit(Alone(endpoint, conf=conf, job=job, nnodes=nnodes, local_addr=local_addr, standby=standby).run())
    except ElasticFlowError as error:
        click.echo(f"elasticflow coordinator: {error}", err=True)
        sys.exit(2)


@main.command()
@click.option(
    "--framework",
    type=click.Choice(["lightning", "keras"]),
    default="lightning",
    show_default=True,
    help="The framework of the program that trains.",
)
@click.option("--workers", type=click.IntRange(2, 8), default=3, show_default=True, help="How many workers train.")
@click.option("--run-dir", type=RunDirectory(), help="Default: a new one, as for `run`.")
@click.option("--limit-s", type=float, default=300.0, show_default=True, help="Give up after so many seconds.")
def demo(framework: str, workers: int, run_dir: Path | None, limit_s: float) -> None:
    """Train a small network, kill one of its workers, let a new one join, and check that nothing was lost.

    It takes about a minute, needs no data, and ends with the accuracy, the audit and a picture of what happened.
    The exit status is 0 if one worker was lost, one has joined, and the audit finds nothing wrong.
    """
    import signal

    from ef_common.demo import play

    try:
        with refusing("demo"), play.ending_at_once():
            sys.exit(play.run(framework, workers=workers, run_dir=run_dir, limit_s=limit_s))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


@main.command("list")
@json_option
def list_runs(as_json: bool) -> None:
    """List the runs below ./elasticflow-runs that this machine has started, the newest first."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ef_common.launch import run_directory
    from ef_common.launch.run_directory import Launcher
    from ef_common.terminal import say

    with refusing("list"):
        found = run_directory.launchers()
    unknown = dict.fromkeys(field.name for field in fields(Launcher))
    records, table = [], Table("run", "state", "workers", "started", "command", show_edge=False)
    for path, one in found:
        if not isinstance(one, Launcher):
            say(str(one), color="yellow")
            records.append({"run": str(path), **unknown, "state": "unreadable"})
            table.add_row(escape(str(path)), "unreadable", "", "", "")
            continue
        records.append({"run": str(path), **asdict(one), "state": one.seen})
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.began))
        table.add_row(*map(escape, (str(path), one.seen, str(one.num_workers), began, " ".join(one.command))))
    if as_json:
        click.echo(json.dumps(records))
    else:
        Console().print(table)


@main.command()
@_run
@click.option("--kill", is_flag=True, help="Kill the workers: they leave without a checkpoint.")
def stop(run: Path | None, kill: bool) -> None:
    """Stop RUN, or its node on this machine: workers save a checkpoint, if they have a place for it, and leave.

    RUN is the directory that `elasticflow run` printed. The default is the newest one below ./elasticflow-runs.
    A job of `elasticflow slurm submit` is canceled as a whole.
    """
    from ef_common.launch import run_directory
    from ef_common.launch import slurm as slurms

    with refusing("stop"):
        place = run or run_directory.newest()
        job = slurms.job_in(place)
        if job is None:
            run_directory.stop(place, kill=kill)
        else:
            slurms.stop(job, kill=kill)


@main.command()
@_run
@click.option("--once", is_flag=True, help="Print the table once and exit.")
@click.option("--serve", is_flag=True, help="Serve a live page for browsers, and /metrics for Prometheus.")
@click.option(
    "--address", metavar="HOST:PORT", default="127.0.0.1:8642", show_default=True, help="Where to serve them."
)
@json_option
def status(run: Path | None, once: bool, serve: bool, address: str, as_json: bool) -> None:
    """Show the state of RUN: workers, progress, speed, recent changes, and the outcome if it has ended.

    RUN is the directory that `elasticflow run` printed. The default is the newest one below ./elasticflow-runs.

    With --serve, the live page has a key that follows from the job's token, if that is in ELASTICFLOW_TOKEN. It must be
    there to serve on an address that other machines reach.
    """
    if serve:
        _serve(run, address)
        return
    from rich.console import Console
    from rich.live import Live

    from ef_common.launch import run_directory
    from ef_common.report import status as statuses
    from ef_common.report import status_table as tables

    console, usage = Console(), tables.Usage()
    with refusing("status"), suppress(KeyboardInterrupt):
        current = statuses.Status(run_directory.check_is_run(run or run_directory.newest_readable()))
        current.update()
        if as_json:
            click.echo(json.dumps(tables.as_json(current, usage, time.time())))
            return
        if once or not console.is_terminal:
            console.print(tables.render(current, usage, time.time()))
            return
        with Live(console=console, auto_refresh=False) as live:
            while True:
                ended = statuses.over(current.run_dir)
                current.update()
                live.update(tables.render(current, usage, time.time()), refresh=True)
                if ended:
                    return
                time.sleep(0.5)


def _serve(run: Path | None, address: str) -> None:
    from ef_common.launch import run_directory
    from ef_common.launch.environment import read_environment
    from ef_common.protocol.addresses import parse_address

    try:
        from ef_common.report.serve import Server
    except ImportError as error:
        click.echo(f"elasticflow status --serve needs pip install 'elasticflow-training[live]': {error}", err=True)
        sys.exit(2)
    with refusing("status"), suppress(KeyboardInterrupt):
        place = run_directory.check_is_run(run or run_directory.newest_readable())
        token = read_environment().token
        server = Server(place, parse_address(address, what="--address"), token=token)
        server.run(on_start=lambda: click.echo(f"{place} is shown at {server.url} until Ctrl-C"))


@main.command()
@_run
@click.option("--follow", "-f", is_flag=True, help="Go on until the run, if this machine has started it, has ended.")
@click.option("--json", "as_json", is_flag=True, help="Print the events as they are logged, one JSON object per line.")
def logs(run: Path | None, follow: bool, as_json: bool) -> None:
    """Print what has happened in RUN, from the event logs of all workers, in chronological order.

    RUN is the run directory (ELASTICFLOW_RUN_DIR). The default is the newest one below ./elasticflow-runs.
    """
    from ef_common.events import Follower
    from ef_common.launch import run_directory
    from ef_common.report import status as statuses

    with refusing("logs"), suppress(KeyboardInterrupt):
        place = run_directory.check_is_run(run or run_directory.newest_readable())
        if as_json:
            follower = Follower(place)
        else:
            current = statuses.Status(place, on_news=_print_change)
        while True:
            ended = not follow or statuses.over(place)
            if as_json:
                for record in follower.news():
                    click.echo(json.dumps(record))
            else:
                current.update()
            if ended:
                return
            time.sleep(0.5)


def _print_change(change: Change) -> None:
    click.echo(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(change.time))}  {change}")


@main.command()
@click.argument("arguments", nargs=-1, metavar="[RUN] WORKERS", shell_complete=_complete_run)
@click.option("--wait/--no-wait", default=True, help="Wait until the job has so many workers. Default: yes.")
def scale(arguments: tuple[str, ...], wait: bool) -> None:
    """Scale RUN to WORKERS workers: start more, or let the newest ones leave.

    RUN is the directory that `elasticflow run` printed. The default is the newest one below ./elasticflow-runs.
    The exit status is 1 if the run ends before it has that many workers.
    """
    from ef_common.cli.scaling import Scaling
    from ef_common.launch import run_directory

    *runs, workers = arguments or ("",)
    if not workers.isdecimal() or len(runs) > 1:
        raise click.UsageError(
            f"expected a directory, or none, and a number of workers. Received: {' '.join(arguments)!r}"
        )
    try:
        with refusing("scale"):
            scaling = Scaling(Path(runs[0]) if runs else run_directory.newest(), int(workers))
            reached, text = scaling.wait() if wait else (True, scaling.plan)
    except KeyboardInterrupt:
        reached, text = True, "not waiting any longer; the job is scaled all the same"
    click.echo(text)
    sys.exit(0 if reached else 1)


main.add_command(slurm)
main.add_command(mpi)
main.add_command(yarn)
main.add_command(kubernetes)


@main.group()
def horovod() -> None:
    """Build Horovod, which moves gradients for Keras on TensorFlow."""


@horovod.command("build")
@click.option("--force", is_flag=True, help="Build again even if there is a wheel for these versions.")
@click.option("--install/--no-install", default=True, help="Install the wheel and test it. Default: yes.")
def build_horovod(force: bool, install: bool) -> None:
    """Build Horovod for the torch and TensorFlow that are installed here.

    Needs a C++ compiler, make, CMake and Python's headers, and takes some minutes the first time. The wheel is cached
    for the next environment with the same versions.
    """
    from ef_common.errors import ElasticFlowError
    from ef_common.horovod import build as building
    from ef_common.horovod.proof import prove

    try:
        wheel = building.build(say=click.echo, force=force)
        if install:
            building.install(wheel, say=click.echo)
            for framework in building.frameworks():
                prove(framework)
                click.echo(f"{mark(True)} two processes have summed with Horovod for {framework}")
    except (ElasticFlowError, OSError) as error:
        click.echo(f"elasticflow horovod build: {error}", err=True)
        sys.exit(1)


@main.command()
@click.option("--thorough", is_flag=True, help="Also import each package, in processes of their own (some seconds).")
@json_option
def doctor(thorough: bool, as_json: bool) -> None:
    """Show versions and devices, what is missing, and the command that fixes it.

    Reads what is installed without importing it. With --thorough, packages are imported as well: a broken one is
    found, and engines and devices are listed as each package sees them.
    """
    from ef_common.cli.doctor import examine

    findings = examine(thorough=thorough)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings]))
        return

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "found", show_edge=False)
    for finding in findings:
        table.add_row(escape(finding.subject), escape(finding.found))
    Console().print(table)
    remedies = [finding for finding in findings if finding.remedy]
    if remedies:  # commands are to be copied: in a table, they would be folded
        click.echo("\nHow to fix what you need:")
        width = max(len(finding.subject) for finding in remedies)
        for finding in remedies:
            click.echo(f"  {finding.subject:{width}}  {finding.remedy}")
    if not thorough:
        click.echo(
            "\nNo package was imported. `elasticflow doctor --thorough` also imports them, and finds broken ones."
        )


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that lets SHELL complete commands, options and runs.

    \b
    bash: add to ~/.bashrc    eval "$(elasticflow completion bash)"
    zsh:  add to ~/.zshrc     eval "$(elasticflow completion zsh)"   (after compinit)
    fish: run once            elasticflow completion fish > ~/.config/fish/completions/elasticflow.fish

    RUN is completed with the directories below ./elasticflow-runs, the newest first.
    """  # noqa: D301
    script = get_completion_class(shell)
    if script is None:  # another click
        raise click.UsageError(f"click has no completion for it. Received: {shell}")
    click.echo(script(main, {}, "elasticflow", "_ELASTICFLOW_COMPLETE").source())
