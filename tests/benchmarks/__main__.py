"""Run the benchmarks: `python -m tests.benchmarks [--quick] [names…]`.

Collects build/bench.json (name → ours, peer, ratio, target, unit) and prints a table. A missed target is
marked, and is no failure; a benchmark that cannot be measured is. Where a short run (`--quick`) is too noisy to
judge, the table says so in place of a mark.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.processes import ROOT

NAMES = (
    "step_time",
    "peak_memory",
    "coordinator_cpu",
    "scale",
    "loss_recovery",
    "coordinator_loss",
    "hang_pause",
    "departures",
    "join_pause",
    "newcomers",
    "horovod_step",
    "deterministic_step",
    "keras_step",
    "keras_elastic",
    "compensation_step",
    "forward_step",
    "checkpoint",
    "run_start",
    "import_time",
    "tls",
    "checkpoint_keras",
    "checkpoint_shares",
    "autoscale",
    "straggler",
    "streams",
    "launchers",
    "slurm_jobs",
    "cluster",
    "cluster_scale",
)
RESULTS = ROOT / "build" / "bench.json"
NOISE = dict.fromkeys(
    ("step_time", "horovod_step", "deterministic_step", "keras_step", "compensation_step", "forward_step"), 0.25
)
"""By so much the ratios of short runs of these differ from run to run, as a whole process may be quicker or slower."""


def main() -> int:
    """Run what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"unknown benchmark: {', '.join(sorted(unknown))}. Expected some of {', '.join(NAMES)}")
    figures: dict[str, Any] = {}
    failed = []
    for name in arguments.names or NAMES:
        print(f"==== {name}", flush=True)
        found = _run(name, ["--quick"] if arguments.quick else [])
        if found is None:
            failed.append(name)
        else:
            noise = NOISE.get(name, 0.0) if arguments.quick else 0.0
            figures |= {name: {**figure, "noise": noise} for name, figure in found.items()}
            _save(figures)  # after each, so that an interruption loses little
    Console(width=None if sys.stdout.isatty() else 120).print(_table(figures))
    for name in failed:
        print(f"{name} could not be measured")
    return 1 if failed else 0


def _run(name: str, options: list[str]) -> dict[str, Any] | None:
    """Run one script; its output is passed on, its last line is returned."""
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", *options]
    last = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line
    if process.returncode:
        return None
    figures: dict[str, Any] = json.loads(last)
    return figures


def _save(figures: dict[str, Any]) -> None:
    """Put the figures into the results, and keep those of benchmarks that are not run this time."""
    old = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(old | figures, indent=2) + "\n")


def holds(figure: dict[str, Any]) -> bool:
    """Whether a figure meets its target."""
    return bool(figure["ratio"] <= figure["target"])


def verdict(figure: dict[str, Any]) -> str:
    """A mark, or that the run was too short for one."""
    noise = 1.0 + figure["noise"]
    if noise > 1.0 and figure["target"] / noise < figure["ratio"] <= figure["target"] * noise:
        return "too noisy"
    return "[green]✓[/]" if holds(figure) else "[red]✗[/]"


def _table(figures: dict[str, Any]) -> Table:
    table = Table("benchmark", "ours", "peer", "unit", "ours/peer", "target", "")
    for column in table.columns[1:3] + table.columns[4:6]:
        column.justify = "right"
    for name, figure in figures.items():
        numbers = (f"{figure[key]:.3g}" for key in ("ours", "peer"))
        ratio, target = (f"{figure[key]:.3f}" for key in ("ratio", "target"))
        table.add_row(name, *numbers, figure["unit"], ratio, f"≤ {target}", verdict(figure))
    return table


if __name__ == "__main__":
    sys.exit(main())
