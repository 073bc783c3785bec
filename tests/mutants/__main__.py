"""``python -m tests.mutants [NAME …]``; see ``make mutants``."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from tests.mutants.catalogue import MUTANTS, Mutant
from tests.tiers.places import ROOT, guards_of

_LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__", ".*_cache", "mutants")
_LIMIT_S = 3600.0
_REST = "thorough and not exhaustive"
UNTIL = ("guards", "fast", "all")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Attempt:
    """Some tests that a mutant has to face.

    Attributes:
        tier: "fast" or "all": whose tests they are.
        expression: Of pytest's marks.
        paths: Files and folders; none for all.
    """

    tier: str
    expression: str
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """What has become of a mutant.

    Attributes:
        name: Of the mutant.
        killed_in: "fast" or "all": the tier that has found it; "" if neither has.
        by: A test that has failed.
        duration_s: Until then.
    """

    name: str
    killed_in: str
    by: str
    duration_s: float


def attempts(mutant: Mutant, *, until: str) -> list[Attempt]:
    """From the tests that are most likely to find it on to all of them, or to the last of ``until``."""
    guards = tuple(guards_of([mutant.file]))
    found = {
        "guards": [
            Attempt("fast", "not thorough and not processes", guards),
            Attempt("fast", "not thorough and processes", guards),
        ],
        "fast": [Attempt("fast", "not thorough")],
        "all": [Attempt("all", _REST, guards), Attempt("all", _REST)],
    }
    return [attempt for group in UNTIL[: UNTIL.index(until) + 1] for attempt in found[group]]


def break_the_product(mutant: Mutant, tree: Path) -> None:
    """Copy the project, with this change.

    Raises:
        click.ClickException: The text that it changes does not stand there exactly once.
    """
    shutil.copytree(ROOT, tree, ignore=_LEFT_OUT)
    file = tree / mutant.file
    source = file.read_text()
    if source.count(mutant.old) != 1:
        raise click.ClickException(f"{mutant.name}: its text stands {source.count(mutant.old)} times in {mutant.file}")
    file.write_text(source.replace(mutant.old, mutant.new))


def face(attempt: Attempt, tree: Path, *, jobs: int, log: Path) -> str:
    """Run the tests in a tree. Returns one that has failed, or ""."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", attempt.expression]
    command += ["-n", str(jobs), "--dist", "loadgroup", "--tb=short", *sorted(attempt.paths)]  # see `tests.tiers`
    environ = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tree.parent)}
    with log.open("a+") as output:
        begin = output.tell()
        try:
            status = subprocess.run(command, cwd=tree, env=environ, stdout=output, stderr=output, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "(the tests do not end)"
        output.seek(begin)
        failed = _FAILED.findall(output.read())
    if status.returncode in (0, 5):  # 5: there are no such tests
        return ""
    return failed[0] if failed else f"(pytest has ended with status {status.returncode})"


def judge(mutant: Mutant, *, until: str, jobs: int, logs: Path) -> Result:
    """Let it face all attempts until one finds it."""
    begin = time.monotonic()
    log = logs / f"{mutant.name}.txt"
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="ef-mutant-") as folder:
        tree = Path(folder) / "tree"
        break_the_product(mutant, tree)
        for attempt in attempts(mutant, until=until):
            if by := face(attempt, tree, jobs=jobs, log=log):
                return Result(mutant.name, attempt.tier, by, time.monotonic() - begin)
    return Result(mutant.name, "", "", time.monotonic() - begin)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--guards-only", "until", flag_value="guards", help="Survivors of the guards of their file face no more.")
@click.option("--fast-only", "until", flag_value="fast", help="Survivors of `make test` do not face `make test-all`.")
@click.option("--all", "until", flag_value="all", default="all", help="Survivors face every test. This is the default.")
@click.option("--jobs", default=3, show_default=True, help="Processes of pytest's.")
@click.option("--results", "path", default=ROOT / "build/mutants/results.jsonl", type=click.Path(path_type=Path))
@click.option("--resume", is_flag=True, help="Leave out those that have a result already.")
def main(names: tuple[str, ...], until: str, jobs: int, path: Path, resume: bool) -> None:
    """Break the product in each way of the catalogue, and see which tests notice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = [Result(**json.loads(line)) for line in path.read_text().splitlines()] if resume and path.exists() else []
    done = {result.name for result in known}
    chosen = [mutant for mutant in MUTANTS if mutant.name in (names or [m.name for m in MUTANTS])]
    if strange := set(names) - {mutant.name for mutant in chosen}:
        raise click.ClickException(f"there are no such mutants: {', '.join(sorted(strange))}")
    with path.open("a" if resume else "w") as file:
        for mutant in chosen:
            if mutant.name in done:
                continue
            result = judge(mutant, until=until, jobs=jobs, logs=path.parent)
            known.append(result)
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            what = f"killed in {result.killed_in:4} by {result.by}" if result.killed_in else "SURVIVES"
            click.echo(f"{result.duration_s:6.0f} s  {mutant.name:50} {what}")
    fast = sum(result.killed_in == "fast" for result in known)
    survivors = [result.name for result in known if not result.killed_in]
    click.echo(f"{len(known)} mutants: {fast} killed by `make test`, {len(known) - fast - len(survivors)} more by")
    click.echo(f"`make test-all`, {len(survivors)} survive: {', '.join(survivors) or '–'}")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
