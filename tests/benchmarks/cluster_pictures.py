"""Draw docs/images/cluster-two-jobs.svg and cluster-serving.svg from what `tests.benchmarks cluster` has seen.

Usage: python -m tests.benchmarks.cluster_pictures

Of several runs, the one with the median makespan, or idle time, is drawn. It needs the extra `plots`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.benchmarks.cluster import RESULTS, Found
from tests.benchmarks.cluster_lives import Steps, difference, held, value_at
from tests.benchmarks.processes import ROOT

IMAGES = ROOT / "docs" / "images"
STARTING = "a pod that starts or leaves"
COLORS = {"a": "#0072b2", "b": "#e69f00", "serving": "#00795a", STARTING: "#d5dbe3"}
MARK = "#6b7684"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "elasticflow", "font.family": "DejaVu Sans", "font.size": 9}


def main() -> None:
    """Draw those of which there is something."""
    kept = json.loads(RESULTS.read_text())
    with matplotlib.rc_context(STYLE):
        if kept["gang"] and kept["fair"]:
            both = _median(kept["gang"], "makespan"), _median(kept["fair"], "makespan")
            _save(_two_jobs(*both), "cluster-two-jobs.svg")
        if kept["serving"]:
            _save(_serving(_median(kept["serving"], "idle")), "cluster-serving.svg")


def _median(found: list[Found], what: str) -> Found:
    return sorted(found, key=lambda one: one[what])[len(found) // 2]


def _two_jobs(gang: Found, fair: Found) -> Figure:
    figure = Figure(figsize=(8.6, 4.8), layout="constrained")
    charts = figure.subplots(2, 1, sharex=True, sharey=True)
    end_s = max(gang["makespan"], fair["makespan"])
    for axes, found, title in ((charts[0], gang, "Gang scheduling"), (charts[1], fair, "ElasticFlow")):
        _stack(axes, [*_parts(found, "a", "first job"), *_parts(found, "b", "second job")], found["makespan"])
        text = f"{title}: {found['makespan']:.0f} s, workers train on {found['training']:.0%} of the slots"
        axes.set_title(text, loc="left", fontsize=10)
        came = found["jobs"]["b"]["created"]
        axes.axvline(came, color=MARK, linestyle="--", linewidth=1)
        axes.annotate("  the second job comes", (came, found["slots"] + 0.15), color=MARK, fontsize=8)
        axes.axvline(found["makespan"], color=MARK, linewidth=1)
        _frame(axes, found["slots"], end_s)
    charts[1].set_xlabel("seconds")
    figure.legend(*_once(charts[0]), loc="outside lower center", frameon=False, ncols=4)
    return figure


def _serving(found: Found) -> Figure:
    figure = Figure(figsize=(8.6, 2.8), layout="constrained")
    axes = figure.subplots()
    others = [{**row, "bound": row["running"]} for row in found["pods"] if not row["job"]]
    parts = [("serving", held(others), COLORS["serving"]), *_parts(found, "a", "training")]
    _stack(axes, parts, found["seconds"])
    _frame(axes, found["slots"], found["seconds"])
    axes.set_xlabel("seconds")
    figure.legend(*_once(axes), loc="outside lower center", frameon=False, ncols=3)
    return figure


def _parts(found: Found, job: str, label: str) -> list[tuple[str, Steps, str]]:
    """Slots on which a job trains, and those that it only has."""
    trains = found["jobs"][job]["training"]
    has = held([row for row in found["pods"] if row["job"] == job])
    return [(label, trains, COLORS[job]), (STARTING, difference(has, trains), COLORS[STARTING])]


def _once(axes: Axes) -> tuple[list[Any], list[str]]:
    """Each entry of the legend once."""
    found = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    return list(found.values()), list(found)


def _stack(axes: Axes, parts: list[tuple[str, Steps, str]], end_s: float) -> None:
    times = sorted({0.0, end_s, *(at for _, steps, _ in parts for at, _ in steps if 0.0 < at < end_s)})
    below = [0] * len(times)
    for label, steps, color in parts:
        above = [low + value_at(steps, at) for low, at in zip(below, times, strict=True)]
        axes.fill_between(times, below, above, step="post", color=color, linewidth=0, label=label)
        below = above


def _frame(axes: Axes, slots: int, end_s: float) -> None:
    axes.axhline(slots, color=MARK, linewidth=0.8)
    axes.set(xlim=(0, end_s * 1.01), ylim=(0, slots * 1.15), ylabel="slots")
    axes.set_yticks(range(0, slots + 1, 2))
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, name: str) -> None:
    path: Path = IMAGES / name
    options: dict[str, Any] = {"metadata": {"Date": None, "Creator": None}, "facecolor": "white"}
    figure.savefig(path, **options)
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
