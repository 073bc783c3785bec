"""``python -m tests.peers [TEST …]``: paths or names of tests, as `tests_pytorch/callbacks` of Lightning's, or
`keras/src/callbacks` of Keras's; else all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from tests.peers import meetings
from tests.peers.comparison import WAYS, Difference, compare, read_known, read_outcomes
from tests.peers.suites import Suite, suites_of

ROOT = Path(__file__).parents[2]
OUTCOMES = ROOT / "build" / "peers"
_TIMEOUT_S = 240


@click.command()
@click.argument("tests", nargs=-1)
@click.option("--way", "ways", multiple=True, type=click.Choice(WAYS), help="Only this one, beside the plain one.")
@click.option("--again", is_flag=True, help="Compare what the last run has left in build/peers.")
def main(tests: tuple[str, ...], ways: tuple[str, ...], again: bool) -> None:
    """Run the peers' own tests plain and with ElasticFlow, and hold the differences against those that are known."""
    OUTCOMES.mkdir(parents=True, exist_ok=True)
    is_as_known = [_is_as_known(suite, ways, again=again) for suite in suites_of(tests)]
    sys.exit(not all(is_as_known))


def _is_as_known(suite: Suite, chosen: tuple[str, ...], *, again: bool) -> bool:
    ways = tuple(way for way in suite.ways if way in chosen or not chosen)
    for way in () if again else ("plain", *ways):
        _run(suite, way)
    outcomes = {way: read_outcomes(_file(suite, way, "jsonl"), suite.name_of) for way in ("plain", *ways)}
    known = read_known(suite.known.read_text())
    found = [compare(way, outcomes["plain"], outcomes[way], known) for way in ways]
    for difference in found:
        if not difference.num_compared:
            files = " and ".join(str(_file(suite, way, "txt")) for way in ("plain", difference.way))
            raise click.ClickException(
                f"no test was run both plain and {difference.way}, and passed plain: see the ends of {files}. "
                f"Received: {' '.join(suite.tests)}"
            )
        _show(suite, difference)
    return not any(difference.unknown or difference.gone for difference in found)


def _file(suite: Suite, way: str, ending: str) -> Path:
    return OUTCOMES / f"{suite.name}-{way}.{ending}"


def _run(suite: Suite, way: str) -> None:
    """Run them in a process of their own: a test that ends it ends a worker of xdist's, and the others go on."""
    outcomes = _file(suite, way, "jsonl")
    outcomes.unlink(missing_ok=True)
    outcomes.touch()
    environment = {**os.environ, **suite.environment, "OMP_NUM_THREADS": "1"}
    paths = [str(ROOT), suite.environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    options = ["-q", "-p", "tests.peers.plugin", "-p", "no:cacheprovider", f"--timeout={_TIMEOUT_S}"]
    options += meetings.options(2) if way == "two" else ["-n", "1"]
    options += [f"--peer={suite.peer}", f"--way={way}", f"--outcomes={outcomes}", *suite.options]
    output = _file(suite, way, "txt")
    click.echo(f"{suite.name}, {way}: output in {output}")
    with output.open("w") as file, TemporaryDirectory() as scratch:  # some write into the folder that they are run in
        subprocess.run(
            [sys.executable, "-B", "-m", "pytest", *options, *suite.tests],
            cwd=suite.folder or scratch,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )


def _show(suite: Suite, difference: Difference) -> None:
    click.echo(
        f"\n{suite.name}, {difference.way}: {difference.num_compared} tests that pass plain were run, "
        f"{difference.num_used} with ElasticFlow in them"
    )
    for reason, number in sorted(difference.by_reason.items()):
        click.echo(f"  {number:4} fail, as is known: {reason}")
    for test in difference.unknown:
        click.echo(f"  fails, and is not in {suite.known.name}: {test}")
    for test in difference.gone:
        click.echo(f"  passes, and is still in {suite.known.name}: {test}")


if __name__ == "__main__":
    main()
