"""The `elasticflow` command."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

__all__ = ["main"]


def _version() -> str:
    try:
        return version("elasticflow")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"


def _print_version(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        click.echo(f"elasticflow {_version()}")
        context.exit()


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
@click.argument("run", type=click.Path(path_type=Path))
def audit(run: Path) -> None:
    """Prove from the event log of RUN that it kept its promises.

    RUN is the directory that ELASTICFLOW_RUN_DIR named. Prints one line per property. Exits with 0 if all
    hold, 1 at a violation, 2 if the log cannot be read.
    """
    from ef_common.audit import audit as check  # numpy: not for --help and --version
    from ef_common.events import EventLogError

    try:
        report = check(run)
    except (EventLogError, OSError) as error:
        click.echo(f"elasticflow audit: {error}", err=True)
        sys.exit(2)
    for found in report.properties:
        click.echo(f"{_mark(found.ok)} {found.name}: {found.detail}")
    sys.exit(0 if report.ok else 1)


@main.group()
def horovod() -> None:
    """Horovod as an engine."""


@horovod.command("build")
@click.option("--force", is_flag=True, help="Build anew, though there is a wheel for these versions.")
@click.option("--install/--no-install", default=True, help="Install the wheel and try it. Default: yes.")
def build_horovod(force: bool, install: bool) -> None:
    """Build Horovod for the torch and TensorFlow that are installed here.

    Needs a C++ compiler, cmake, and some minutes the first time; the wheel is kept for the next environment with
    the same versions.
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
                click.echo(f"{_mark(True)} two processes have summed with Horovod for {framework}")
    except ElasticFlowError as error:
        click.echo(f"elasticflow horovod build: {error}", err=True)
        sys.exit(1)


@main.command()
def doctor() -> None:
    """Show versions, engines and devices, and what is missing."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ef_common.doctor import examine

    table = Table("", "found", "to mend it", show_edge=False)
    for finding in examine():
        table.add_row(*map(escape, (finding.subject, finding.found, finding.remedy)))
    Console().print(table)


def _mark(ok: bool) -> str:
    mark = "✓" if ok else "✗"
    try:
        mark.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "ok  " if ok else "FAIL"
    return mark


if __name__ == "__main__":
    main()
