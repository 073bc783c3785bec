"""The whole grid, as a table: ``python -m tests.chaos grid``."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import shutil
import tempfile
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track

from tests.chaos import cells, trial
from tests.chaos.cells import Cell
from tests.chaos.trial import Weights
from tests.faults.hosts import HOSTS, is_there

_references: dict[str, Weights] = {}  # of this process
Outcome = tuple[Cell, str, float]
"""A cell, what went wrong, and the seconds that it took."""


def _carry_out(cell: Cell) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="elasticflow-chaos-", ignore_cleanup_errors=True) as directory:
        if cell.deterministic and cell.host not in _references:
            _references.clear()
            _references[cell.host] = trial.undisturbed(cell.host, Path(directory) / "undisturbed")
        return cell, *trial.timed(cell, Path(directory), _references.get(cell.host) if cell.deterministic else None)


@click.command()
@click.option("--host", "hosts", multiple=True, type=click.Choice(list(HOSTS)), help="Only these; default: all.")
@click.option("--fault", "faults", multiple=True, type=click.Choice(list(cells.FATES)), help="Only these.")
@click.option("--moment", "moments", multiple=True, type=click.Choice(list(cells.MOMENTS)), help="Only these.")
@click.option("--jobs", default=2, show_default=True, help="Cells at a time.")
@click.option("--table", type=click.Path(path_type=Path), help="Write the results there, as Markdown.")
@click.option("--failures", default=Path("build/chaos"), type=click.Path(path_type=Path), help="Evidence of failures.")
def grid(
    hosts: tuple[str, ...],
    faults: tuple[str, ...],
    moments: tuple[str, ...],
    jobs: int,
    table: Path | None,
    failures: Path,
) -> None:
    """Carry out the grid: each fault, in each worker, at each moment, plain and bit for bit."""
    console = Console(highlight=False, soft_wrap=True)
    chosen = [host for host in hosts or HOSTS if is_there(host)]
    for host in set(hosts or HOSTS) - set(chosen):
        console.print(f"{host} is left out: it needs a GPU, or a Horovod that is built")
    wanted = [
        cell
        for deterministic in (False, True)
        for cell in cells.cells(chosen, deterministic=deterministic)
        if cell.fault in (faults or cells.FATES) and cell.moment in (moments or cells.MOMENTS)
    ]
    wanted.sort(key=lambda cell: cell.host)  # a forkserver has the modules of one host
    shutil.rmtree(failures, ignore_errors=True)
    failures.mkdir(parents=True)
    outcomes = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
        done = concurrent.futures.as_completed([pool.submit(_carry_out, cell) for cell in wanted if _can_run(cell)])
        for future in track(done, f"{len(wanted)} cells", total=len(wanted), console=console):
            cell, error, seconds = future.result()
            outcomes.append((cell, error, seconds))
            if error:
                (failures / f"{cell}.txt").write_text(error)
                console.print(f"{cell}: {error.splitlines()[0]}")
    (failures / "outcomes.json").write_text(json.dumps([(str(cell), error, s) for cell, error, s in outcomes]))
    if table is not None:
        table.write_text(_table(outcomes))
    num_failed = sum(bool(error) for _, error, _ in outcomes)
    console.print(f"{len(outcomes)} cells, {num_failed} failed; evidence in {failures}")
    raise SystemExit(bool(num_failed))


def _can_run(cell: Cell) -> bool:
    return not trial.why_it_cannot_run(cell)


def _table(outcomes: list[Outcome]) -> str:
    """For each host, faults against moments: how many trials were carried out, and how many of them failed."""
    lines = [_HEAD.format(number=len(outcomes), failed=sum(bool(error) for _, error, _ in outcomes)).rstrip()]
    for host in dict.fromkeys(cell.host for cell, _, _ in outcomes):
        lines += ["", f"## {host}", "", f"| | {' | '.join(cells.MOMENTS)} |", f"|---|{'---|' * len(cells.MOMENTS)}"]
        for fault, fate in cells.FATES.items():
            texts = [_entry(outcomes, host, fault, moment) for moment in cells.MOMENTS]
            lines.append(f"| {fault}: {fate} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _entry(outcomes: list[Outcome], host: str, fault: str, moment: str) -> str:
    here = [bool(error) for cell, error, _ in outcomes if (cell.host, cell.fault, cell.moment) == (host, fault, moment)]
    if not here:
        return "–" if cells.why_not(host, fault, moment) else "not run"
    return str(len(here)) if not any(here) else f"**{sum(here)} of {len(here)} failed**"


_HEAD = """\
# The grid

Written by `make chaos`. {number} trials with real processes, {failed} failed.

Three workers train; one of them (the first, the middle or the last one) is struck by a fault at a moment. Each trial is
carried out twice, plainly and in the deterministic mode. What must be true of each:

* the others keep their processes and train on, and the audit of the run holds: samples exactly once, no update lost or
  doubled, equal weights;
* in the deterministic mode, the weights after each update are those of an undisturbed run, bit for bit;
* with the victim happens what stands behind the fault.

An exception of the user's is no fault of a machine: it ends the job, with status 1 everywhere. There is no trial (–) of
one where no code of the user's runs, nor where it cannot raise: in the graph of an optimizer, in data workers of Keras.
"""
