"""What trials of the grid have come to, in a file with one line for each trial: so the grid may be done in parts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.chaos import cells
from tests.chaos.cells import Cell


@dataclass(frozen=True)
class Result:
    """One trial.

    Args:
        cell: What was tried.
        error: What went wrong, or "".
        seconds: How long it took.
        commit: Short hash of the commit, or "" if there is none.
    """

    cell: Cell
    error: str
    seconds: float
    commit: str = ""


def append(path: Path, result: Result) -> None:
    """Add a trial that has ended; it is in the file when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a") as file:
        file.write("\n" * torn + json.dumps(asdict(result)) + "\n")


def read(path: Path) -> dict[Cell, Result]:
    """The newest result of each cell. A line that is torn (by a kill) is left out, and a cell that is no more."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            fields = json.loads(line)
            cell = Cell(**fields.pop("cell"))
            result = Result(cell, **fields)
        except (ValueError, TypeError, AttributeError, KeyError):
            continue
        if cell.fault in cells.FATES and cell.moment in cells.MOMENTS:
            found[cell] = result
    return found


def commit() -> str:
    """Short hash of the commit that is checked out, with a mark if something was changed since; "" without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def table(results: Iterable[Result]) -> str:
    """As Markdown: for each host, faults against moments: how many trials were made, and how many of them failed."""
    results = list(results)
    commits = ", ".join(dict.fromkeys(result.commit for result in results if result.commit))
    seconds = sum(result.seconds for result in results) / max(1, len(results))
    num_failed = sum(bool(result.error) for result in results)
    head = _HEAD.format(number=len(results), failed=num_failed, seconds=seconds, commits=commits or "no commit")
    lines = [head.rstrip()]
    for host in sorted({result.cell.host for result in results}):
        lines += ["", f"## {host}", "", f"| | {' | '.join(cells.MOMENTS)} |", f"|---|{'---|' * len(cells.MOMENTS)}"]
        for fault, fate in cells.FATES.items():
            texts = [_entry(results, host, fault, moment) for moment in cells.MOMENTS]
            lines.append(f"| {fault}: {fate} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _entry(results: list[Result], host: str, fault: str, moment: str) -> str:
    place = (host, fault, moment)
    here = [bool(r.error) for r in results if (r.cell.host, r.cell.fault, r.cell.moment) == place]
    if not here:
        return "–" if cells.why_not(host, fault, moment) else "not run"
    return str(len(here)) if not any(here) else f"**{sum(here)} of {len(here)} failed**"


_HEAD = """\
# The grid

Written by `make chaos`. {number} trials with real processes, {failed} failed; {seconds:.1f} s each, on average.
Commits: {commits}.

Three workers train; one of them (the first, the middle or the last one) is struck by a fault at a moment. Each trial is
carried out twice, plainly and in the deterministic mode, which Keras on JAX does not have. What must be true of each:

* the others keep their processes and train on, and the audit of the run holds: samples exactly once, no update lost or
  doubled, equal weights;
* in the deterministic mode, the weights after each update are those of an undisturbed run, bit for bit;
* with the victim happens what stands behind the fault.

An exception of the user's is no fault of a machine: it ends the job, with status 1 everywhere. There is no trial (–) of
one where no code of the user's runs, nor where it cannot raise: in the graph of an optimizer, in data workers of Keras.
"""
