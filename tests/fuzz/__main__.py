"""Fuzz a target: ``python -m tests.fuzz manifest --runs 100000`` or ``… --seconds 60``.

What it finds is written to the folder of `--findings`, and given again as ``--input FILE``.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import tempfile
from pathlib import Path

import atheris
import click

with atheris.instrument_imports(include=["ef_common"]), contextlib.redirect_stderr(io.StringIO()):
    from tests.fuzz.targets import BROKEN, TARGETS

from tests.fuzz.mutations import mutate_json


def _mutated(data: bytes, max_size: int, seed: int) -> bytes:
    rng = random.Random(seed)
    changed = mutate_json(data, rng) if rng.random() < 0.8 else atheris.Mutate(data, max_size)
    return changed if len(changed) <= max_size else data


@click.command()
@click.argument("name", type=click.Choice(list(TARGETS)), required=False)
@click.option("--runs", type=int, default=-1, help="End after so many inputs.")
@click.option("--seconds", type=int, default=0, help="End after so long; 0 for no limit.")
@click.option("--seed", type=int, default=0, help="Of the mutations; 0 for another one each time.")
@click.option("--findings", type=click.Path(path_type=Path), default=Path("build/fuzz"), help="Folder for findings.")
@click.option("--input", "given", type=click.Path(exists=True, path_type=Path), help="Run this input only.")
def main(name: str | None, runs: int, seconds: int, seed: int, findings: Path, given: Path | None) -> None:
    """Fuzz one of the targets until it fails; without a name, list them."""
    if name is None:
        click.echo("\n".join(one for one in TARGETS if one != BROKEN))
        return
    target = TARGETS[name]
    if given is not None:
        target.run(given.read_bytes())
        return
    findings.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="elasticflow-corpus-") as corpus:
        for number, data in enumerate(target.seeds):
            (Path(corpus) / str(number)).write_bytes(data)
        options = [
            f"-runs={runs}",
            f"-max_total_time={seconds}",
            f"-seed={seed}",
            f"-artifact_prefix={findings}/{name}-",
        ]
        arguments = [sys.argv[0], *options, "-timeout=10", "-rss_limit_mb=2048", "-max_len=20000", corpus]
        atheris.Setup(arguments, target.run, custom_mutator=_mutated)
        atheris.Fuzz()  # ends the process


main()
