"""``python -m tests.peers [TEST …]``: paths or names of Lightning's tests, relative to its folder `tests`; else all."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import click

from tests.peers.comparison import Difference, compare, read_known, read_outcomes
from tests.peers.plugin import WAYS

ROOT = Path(__file__).parents[2]
KNOWN = Path(__file__).with_name("known_failures.txt")
OUTCOMES = ROOT / "build" / "peers"
_TIMEOUT_S = 240


@click.command()
@click.argument("tests", nargs=-1)
@click.option("--way", "ways", multiple=True, type=click.Choice(WAYS[1:]), help="Only this one, beside the plain one.")
@click.option("--again", is_flag=True, help="Compare what the last run has left in build/peers.")
def main(tests: tuple[str, ...], ways: tuple[str, ...], again: bool) -> None:
    """Run Lightning's own tests plain and with ElasticFlow, and hold the differences against those that are known."""
    source = os.environ.get("LIGHTNING_SRC")
    if not source:
        click.echo(
            "Lightning's own tests are not run: LIGHTNING_SRC does not name a checkout of its repository "
            f"(https://github.com/Lightning-AI/pytorch-lightning, best of the tag {version('lightning')})."
        )
        return
    folder = Path(source).resolve() / "tests"
    if not (folder / "tests_pytorch").is_dir():
        raise click.ClickException(f"LIGHTNING_SRC has no tests/tests_pytorch. Received: {source}")
    known = read_known(KNOWN.read_text())
    chosen = ways or WAYS[1:]
    OUTCOMES.mkdir(parents=True, exist_ok=True)
    for way in () if again else ("plain", *chosen):
        _run(way, folder, tests or ("tests_pytorch",))
    plain = read_outcomes(OUTCOMES / "plain.jsonl")
    found = [compare(way, plain, read_outcomes(OUTCOMES / f"{way}.jsonl"), known) for way in chosen]
    for difference in found:
        if not difference.num_compared:
            raise click.ClickException(
                f"no test was run both plain and {difference.way}, and passed plain: see the ends of plain.txt and "
                f"{difference.way}.txt in {OUTCOMES}. Received: LIGHTNING_SRC={source}"
            )
        _show(difference)
    sys.exit(any(difference.unknown or difference.gone for difference in found))


def _run(way: str, folder: Path, tests: tuple[str, ...]) -> None:
    """Run them in a process of their own: a test that ends it ends a worker of xdist's, and the others go on."""
    outcomes = OUTCOMES / f"{way}.jsonl"
    outcomes.unlink(missing_ok=True)
    outcomes.touch()
    more = os.environ.get("PYTHONPATH")
    paths = [str(ROOT), str(folder), *([more] if more else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HDF5_PLUGIN_PATH": "disable",  # TensorFlow sets it when it is imported, and the suite blames the test at hand
    }
    options = ["-q", "-p", "tests.peers.plugin", "-p", "no:cacheprovider", "-n", "1", "--timeout", str(_TIMEOUT_S)]
    command = [sys.executable, "-B", "-m", "pytest", *options, f"--way={way}", f"--outcomes={outcomes}", *tests]
    click.echo(f"{way}: output in {OUTCOMES / way}.txt")
    with (OUTCOMES / f"{way}.txt").open("w") as output:
        subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)


def _show(difference: Difference) -> None:
    click.echo(f"\n{difference.way}: {difference.num_compared} tests that pass plain were run")
    for reason, number in sorted(difference.by_reason.items()):
        click.echo(f"  {number:4} fail, as is known: {reason}")
    for test in difference.unknown:
        click.echo(f"  fails, and is not in {KNOWN.name}: {test}")
    for test in difference.gone:
        click.echo(f"  passes, and is still in {KNOWN.name}: {test}")


if __name__ == "__main__":
    main()
