"""What the commands that write a report do alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ef_common.cli.common import json_option
from ef_common.errors import UsageError

LEFT_OUT = "The audit was left out (--no-audit)."
_Command = TypeVar("_Command", bound=Callable[..., object])
_OPTIONS = (
    click.option(
        "--png", type=click.Path(path_type=Path, dir_okay=False), help="Also draw a picture (needs matplotlib)."
    ),
    click.option("--audit/--no-audit", "audits", default=True, help="Audit the run. Default: yes."),
    json_option,
)


def options(command: _Command) -> _Command:
    """Give a command the options of all reports: `png`, `audits` and `as_json`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def write(snapshot: dict[str, Any], target: Path, *, whole: bool, png: Path | None, as_json: bool) -> None:
    """Write the report of a run, and say where it is.

    Args:
        snapshot: The data that it shows.
        target: Its file.
        whole: Those who read the file find all of it or what was there before. The folder must be writable for that.
        png: File for a picture, or None for no picture.
        as_json: Print the data, and write no file.

    Raises:
        UsageError: A file cannot be written.
    """
    from ef_common.events import finite
    from ef_common.files import write_whole
    from ef_common.report.page import page

    if as_json:
        click.echo(json.dumps(finite(snapshot)))
        return
    _write(target, page(snapshot).encode(), how=write_whole if whole else Path.write_bytes)
    click.echo(f"The report is in {target}")
    if png is not None:
        from ef_common.report.image import picture

        _write(png, picture(snapshot), how=Path.write_bytes)
        click.echo(f"The picture is in {png}")


def _write(path: Path, content: bytes, *, how: Callable[[Path, bytes], object]) -> None:
    try:
        how(path, content)
    except OSError as error:
        raise UsageError(f"cannot write the file: {error.strerror}. Received: {path}") from None
