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


def _mark(ok: bool) -> str:
    mark = "✓" if ok else "✗"
    try:
        mark.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "ok  " if ok else "FAIL"
    return mark


if __name__ == "__main__":
    main()
