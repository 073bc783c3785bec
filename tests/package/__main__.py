"""``python -m tests.package``; see ``make package``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ef_common import __version__
from tests.package import interpreters, readme

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "package"
DIST = ROOT / "dist"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
_TORCH = "torch==2.13.0"
_EXTRAS = "lightning,pytorch-lightning"
_WITHOUT_KERAS = ("3.10",)
"""Our oldest Keras needs a newer Python."""


@dataclass(frozen=True)
class Finding:
    """What has come of one check.

    Attributes:
        name: Of the check.
        good: Whether it has passed; None if it could not be made.
        words: What was seen, or why it could not be made.
    """

    name: str
    good: bool | None
    words: str = ""


@click.command()
@click.option("--repository", help="URL under which the sources are published; links of the index's page lead there.")
@click.option(
    "--python", "versions", multiple=True, default=PYTHONS, help="Only this version; more than once for more."
)
def main(repository: str | None, versions: Sequence[str]) -> None:
    """Build the source distribution and the wheel into dist/, check them, and train with the wheel on each Python."""
    shutil.rmtree(PLACE, ignore_errors=True)
    shutil.rmtree(DIST, ignore_errors=True)
    PLACE.mkdir(parents=True)
    sources = _export(repository and repository.rstrip("/"))
    _run("build", [sys.executable, "-m", "build", "--outdir", DIST, sources], cwd=PLACE)
    (wheel,), (archive,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    findings = [
        _check("metadata (twine)", [sys.executable, "-m", "twine", "check", "--strict", wheel, archive]),
        _check("contents of the wheel", [sys.executable, "-m", "check_wheel_contents", wheel]),
        _try_archive(archive),
    ]
    if repository is None:
        findings.append(Finding("links", None, "without --repository, the index's page has no links to the sources"))
    for version in versions:
        findings += _try_wheel(wheel, version)
    _show(findings)
    sys.exit(any(finding.good is False for finding in findings))


def _export(repository: str | None) -> Path:
    """Copy what is in the repository, with the README and the metadata as the index shows them."""
    sources = PLACE / "sources"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, sources / name)
    page, project = sources / "README.md", sources / "pyproject.toml"
    tag = f"v{__version__}"
    page.write_text(readme.for_index(page.read_text(), repository=repository, tag=tag))
    if repository:
        head, rest = project.read_text().split("\n[project.optional-dependencies]", 1)
        project.write_text(f"{head}{readme.urls(repository, tag=tag)}\n[project.optional-dependencies]{rest}")
    return sources


def _try_archive(archive: Path) -> Finding:
    """Run a part of its tests from the unpacked source distribution."""
    place = PLACE / "unpacked"
    with tarfile.open(archive) as file:
        file.extractall(place, filter="data")
    (root,) = place.iterdir()
    missing = [name for name in ("docs", "examples", "tests", "CHANGELOG.md", "Makefile") if not (root / name).exists()]
    if missing:
        return Finding("source distribution", False, f"it lacks {', '.join(missing)}")
    command = [sys.executable, "-m", "pytest", "-q", "tests/core", "tests/test_docs.py"]
    return _check("source distribution: its tests", command, cwd=root)


def _try_wheel(wheel: Path, version: str) -> list[Finding]:
    """Install it into a new environment, train there with a kill and a newcomer, and audit."""
    interpreter = interpreters.find(version)
    if interpreter is None:
        return [Finding(f"Python {version}", None, "there is no such interpreter here")]
    environment, scratch = PLACE / f"venv-{version}", PLACE / f"scratch-{version}"
    scratch.mkdir()
    python = environment / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    try:
        _run(f"{version}-venv", [interpreter, "-m", "venv", environment], cwd=scratch)
        _run(f"{version}-torch", [*pip, _TORCH], cwd=scratch)
        extras = _EXTRAS if version in _WITHOUT_KERAS else f"{_EXTRAS},keras"
        _run(f"{version}-install", [*pip, f"{wheel}[{extras}]"], cwd=scratch)
        _run(f"{version}-checkers", [*pip, "mypy", "pyright"], cwd=scratch)  # pip 23 seeks for long if all come at once
    except click.ClickException as error:
        return [Finding(f"Python {version}", False, error.message)]
    shutil.copy(ROOT / "tests" / "typed" / "program.py", scratch)
    demo = [environment / "bin" / "elasticflow", "demo", "--run-dir", scratch / "run"]
    found = [
        _check(f"Python {version}: train, kill, join, audit", demo, cwd=scratch),
        _check(f"Python {version}: mypy", [python, "-m", "mypy", "--strict", "program.py"], cwd=scratch),
        _check(
            f"Python {version}: pyright", [python, "-m", "pyright", "--pythonpath", python, "program.py"], cwd=scratch
        ),
    ]
    shutil.rmtree(environment)
    return found


def _check(name: str, command: Sequence[str | Path], *, cwd: Path = PLACE) -> Finding:
    log = re.sub(r"[^\w.]+", "-", name).strip("-")
    try:
        last = _run(log, command, cwd=cwd)
    except click.ClickException as error:
        return Finding(name, False, error.message)
    return Finding(name, True, last)


def _run(name: str, command: Sequence[str | Path], *, cwd: Path) -> str:
    """Run a command with its output in a file; returns its last line.

    Raises:
        click.ClickException: It has failed; the message names the file.
    """
    output = PLACE / f"{name}.log"
    click.echo(f"{name} …")
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["NO_COLOR"] = "1"
    with output.open("w") as file:
        status = subprocess.run(
            list(command), cwd=cwd, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    if status:
        raise click.ClickException(
            f"exit status {status}: {lines[-1] if lines else ''} (see {output.relative_to(ROOT)})"
        )
    return lines[-1] if lines else ""


def _show(findings: Sequence[Finding]) -> None:
    table = Table("", "check", "")
    marks = {True: "[green]✓[/]", False: "[red]✗[/]", None: "–"}
    for finding in findings:
        table.add_row(marks[finding.good], finding.name, finding.words)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
