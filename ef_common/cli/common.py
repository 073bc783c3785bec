"""What several commands do alike: say what is wrong, take their command line apart, and say what comes next."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import click

from ef_common.errors import ClusterFailed, ThreadFailed, UsageError


class RunDirectory(click.Path):
    """A directory that may be made. A shell leaves the `~` of `--run-dir=~/runs` to the program."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, with the home directory in place of `~`."""
        return super().convert(os.path.expanduser(value), param, ctx)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


@contextmanager
def refusing(command: str) -> Iterator[None]:
    """Print what is wrong as one line, and exit: with status 2 if the user can fix it, else with 1.

    A file that cannot be read or written is something that the user can fix.

    Args:
        command: Name of the command, without `elasticflow`.
    """
    try:
        yield
    except (UsageError, ClusterFailed, ThreadFailed) as error:
        click.echo(f"elasticflow {command}: {error}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except OSError as error:
        if error.filename is None:
            raise
        click.echo(f"elasticflow {command}: {error.filename2 or error.filename}: {error.strerror}", err=True)
        sys.exit(2)


def run_with(program: str, arguments: Sequence[str], *, command: str, dry_run: bool) -> None:
    """Run a job with a launcher of ranks or tasks, and exit with the status of the training.

    Args:
        program: The launcher.
        arguments: Its own, then `elasticflow run …`.
        command: Name of the command, without `elasticflow`.
        dry_run: Print what would be run, and do nothing.
    """
    from ef_common.launch import mpirun

    with refusing(command):
        line = mpirun.command_of(program, arguments)
    if dry_run:
        click.echo(shlex.join(line))
        return
    sys.exit(mpirun.run(line))


def options_and_script(arguments: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Options, each as ``--name=value``, and the script behind them with its arguments.

    Raises:
        UsageError: There is no script.
    """
    number = next((i for i, one in enumerate(arguments) if not one.startswith("-")), len(arguments))
    if number == len(arguments):
        raise UsageError("expected options, each as --name=value, then a script. Received: no script")
    return arguments[:number], arguments[number:]


def name_for(script: str, *, max_chars: int) -> str:
    """A name for the job of a script, which begins with a letter.

    Example:
        >>> name_for("/app/My_Script.v2.py", max_chars=52), name_for("01-digits.py", max_chars=52)
        ('my-script-v2', 'job-01-digits')
    """
    stem = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(script).stem.lower()).strip("-")
    return (stem if stem[:1].isalpha() else f"job-{stem}".strip("-"))[:max_chars].rstrip("-")


def say_what_next(done: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print what has been done, and the commands with which the user goes on.

    Args:
        done: A sentence.
        rows: Commands, and what each of them is for.
    """
    click.echo(f"{done} What next:")
    width = max(len(command) for command, _ in rows)
    for command, meaning in rows:
        click.echo(f"  {command:{width}}  {meaning}")


def shown(place: Path) -> Path:
    """A directory, as it is shown: below the working directory without that."""
    return place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
