"""The whole grid, or a part of it, as a table: ``python -m tests.chaos grid``."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import tempfile
from collections.abc import Collection
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track

from tests.chaos import cells, results, trial
from tests.chaos.cells import Cell
from tests.chaos.results import Result
from tests.chaos.trial import Weights
from tests.faults.hosts import HOSTS, is_there

_references: dict[str, Weights] = {}  # of this process


def _carry_out(cell: Cell, commit: str) -> Result:
    with tempfile.TemporaryDirectory(prefix="elasticflow-chaos-", ignore_cleanup_errors=True) as directory:
        if cell.deterministic and cell.host not in _references:
            _references.clear()
            _references[cell.host] = trial.undisturbed(cell.host, Path(directory) / "undisturbed")
        expected = _references.get(cell.host) if cell.deterministic else None
        return Result(cell, *trial.timed(cell, Path(directory), expected), commit)


@click.command()
@click.option("--host", "hosts", multiple=True, type=click.Choice(list(HOSTS)), help="Only these; default: all.")
@click.option("--fault", "faults", multiple=True, type=click.Choice(list(cells.FATES)), help="Only these.")
@click.option("--moment", "moments", multiple=True, type=click.Choice(list(cells.MOMENTS)), help="Only these.")
@click.option("--jobs", default=2, show_default=True, help="Cells at a time.")
@click.option(
    "--results",
    "path",
    default=Path("build/grid.jsonl"),
    show_default=True,
    type=click.Path(path_type=Path),
    help="Each trial is added there when it ends.",
)
@click.option("--resume", is_flag=True, help="Leave out what is there already, and has not failed.")
@click.option("--table", type=click.Path(path_type=Path), help="Write all results there, as Markdown.")
@click.option("--failures", default=Path("build/chaos"), type=click.Path(path_type=Path), help="Evidence of failures.")
def grid(
    hosts: tuple[str, ...],
    faults: tuple[str, ...],
    moments: tuple[str, ...],
    jobs: int,
    path: Path,
    resume: bool,
    table: Path | None,
    failures: Path,
) -> None:
    """Carry out the grid: each fault, in each worker, at each moment, plain and bit for bit.

    It can be done in parts, and gone on with after an interrupt (--resume). Of each cell the newest result counts.
    """
    console = Console(highlight=False, soft_wrap=True)
    chosen = [host for host in hosts or HOSTS if is_there(host)]
    for host in set(hosts or HOSTS) - set(chosen):
        console.print(f"{host} is left out: it needs a GPU, or a Horovod that is built")
    known = results.read(path)
    done = {cell for cell, result in known.items() if not result.error} if resume else set()
    wanted = chosen_cells(chosen, faults or cells.FATES, moments or cells.MOMENTS, without=done)
    failures.mkdir(parents=True, exist_ok=True)
    commit = results.commit()
    num_failed = 0
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        trials = concurrent.futures.as_completed([pool.submit(_carry_out, cell, commit) for cell in wanted])
        for future in track(trials, f"{len(wanted)} cells", total=len(wanted), console=console):
            result = future.result()
            results.append(path, result)
            evidence = failures / f"{result.cell}.txt"
            evidence.unlink(missing_ok=True)
            if result.error:
                num_failed += 1
                evidence.write_text(result.error)
                console.print(f"{result.cell}: {result.error.splitlines()[0]}")
    if table is not None:
        table.write_text(results.table(results.read(path).values()))
    console.print(f"{len(wanted)} cells, {num_failed} failed; results in {path}, evidence in {failures}")
    raise SystemExit(bool(num_failed))


def chosen_cells(
    hosts: list[str], faults: Collection[str], moments: Collection[str], *, without: Collection[Cell] = ()
) -> list[Cell]:
    """The cells of these hosts, faults and moments that can be carried out here, host by host."""
    wanted = [
        cell
        for deterministic in (False, True)
        for cell in cells.cells(hosts, deterministic=deterministic)
        if cell.fault in faults and cell.moment in moments and cell not in without and not trial.why_it_cannot_run(cell)
    ]
    return sorted(wanted, key=lambda cell: cell.host)  # a forkserver has the modules of one host
