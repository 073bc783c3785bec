"""``python -m tests.tiers run fast|all|launchers|every`` and ``changed``: ``make test``, ``make test-all``, and CI."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import click

from tests.tiers import changes, reports
from tests.tiers.bytecode import compiled
from tests.tiers.places import ROOT, guards_of, paths_of
from tests.tiers.reports import Outcome

REPORTS = ROOT / "build" / "tests"
_PACKAGES = [ROOT / name for name in ("ef_common", "ef_keras", "ef_lightning", "elasticflow")]
_TIERS = {
    "fast": "not thorough",
    "rest": "thorough and not launchers and not exhaustive",
    "all": "not launchers and not exhaustive",
    "launchers": "launchers and not exhaustive",
    "slow": "thorough and not exhaustive",
    "every": "",
}
_NO_TESTS = 5  # pytest's exit status: none was found
_MARGIN = 1.3  # this machine may be slower than the one on which the durations were measured


@click.group()
def main() -> None:
    """Run tests, say how long that will take, and end with one line of counts."""
    REPORTS.mkdir(parents=True, exist_ok=True)


@main.command()
@click.argument("tier", type=click.Choice(list(_TIERS)))
@click.option("--part", default="", help="A folder of the tests (keras), or of the product (ef_common/storage).")
@click.option("--jobs", default=0, help="Processes of pytest's. Default: three for two cores.")
@click.option(
    "--record",
    is_flag=True,
    help="Keep the durations (of fast, rest, or launchers), from which later runs are estimated.",
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def run(tier: str, part: str, jobs: int, record: bool, options: tuple[str, ...]) -> None:
    """Run the tests of a tier, or those of a part of the project. What follows `--` goes to pytest."""
    try:
        paths = [path for one in part.split() for path in paths_of(one)] or ["tests"]
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if record and tier in reports.PARTS:
        raise click.ClickException(f"durations are recorded in parts: {', '.join(reports.PARTS[tier])}")
    status, outcomes = _run(tier, paths, jobs or _num_jobs(), options)
    if record:
        reports.write_durations(tier, reports.durations_of(outcomes))
    sys.exit(status)


@main.command()
@click.option("--limit", default=600, show_default=True, help="Seconds; what would take longer is left out.")
def changed(limit: int) -> None:
    """Run what `make test` leaves out of the tests that guard what the last day's commits have changed."""
    files = changes.of_the_last_day()
    jobs = _num_jobs()
    left_s = (limit - reports.START_S) * jobs / _MARGIN
    paths: list[str] = []
    click.echo(f"{len(files)} files have changed. Of their tests, those that `make test` leaves out:")
    for place in guards_of(files):
        wanted = {file: s for file, s in reports.durations("slow", [place]).items() if s and file not in paths}
        taken = []
        for file, seconds in wanted.items():
            if seconds < left_s:
                left_s -= seconds
                taken.append(file)
        if wanted:
            spent_s = sum(wanted[file] for file in taken) / jobs
            click.echo(f"  {place:36} {len(taken):2} of {len(wanted):2} files fit: {_in_words(spent_s)}")
        paths += taken
    if paths:
        status, _ = _run("slow", paths, jobs)
        sys.exit(status)


def _run(tier: str, paths: list[str], jobs: int, options: tuple[str, ...] = ()) -> tuple[int, list[Outcome]]:
    """Run the tests of these paths. Returns pytest's exit status (0 if there are none), and what has come of them."""
    expected_s = reports.START_S + reports.estimate_s(tier, paths) / jobs
    click.echo(f"{' '.join(paths)}: about {_in_words(expected_s)}, in {jobs} processes. Reports are in {REPORTS}")
    begin = time.monotonic()
    report = REPORTS / f"{tier}.xml"
    report.unlink(missing_ok=True)
    distribution = ["-n", str(jobs), "--dist", "loadgroup"] if jobs > 1 else []
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-m", _TIERS[tier], f"--junitxml={report}", *distribution]
    paths = sorted(paths)  # pytest forgets a folder's fixtures if files of others stand between its own
    with compiled(_PACKAGES, ROOT / "tests"):
        status = subprocess.run([*command, *options, *paths], cwd=ROOT).returncode
    outcomes = reports.read(report) if report.exists() else []
    click.echo("\nThe slowest:")
    for outcome in reports.slowest(outcomes):
        click.echo(f"{outcome.duration_s:7.1f} s  {outcome.file}::{outcome.name}")
    click.echo(f"\nThat took {_in_words(time.monotonic() - begin)}.")
    click.echo(reports.closing_line(outcomes))
    return 0 if status == _NO_TESTS else status, outcomes


def _num_jobs() -> int:
    """Tests with processes wait for much of their time, so there may be more of them than cores."""
    cores = len(os.sched_getaffinity(0))
    return max(2, cores + cores // 2)


def _in_words(duration_s: float) -> str:
    minutes, seconds = divmod(round(duration_s), 60)
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


if __name__ == "__main__":
    main()
