"""A picture of a run for papers and messages, drawn with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ef_common.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {"warming": "#9a86c9", "training": "#0072b2", "slow": "#e69f00", "leaving": "#56b4e9"}
_MARKS = {"lost": "#c44a00", "joined": "#00795a", "left": "#6b7684", "rebuilt": "#6b7684", "ended": "#6b7684"}
_WIDTH_IN, _CHART_IN, _LANES_IN, _LANE_IN = 11.0, 1.15, 5.0, 0.24


def picture(snapshot: dict[str, Any]) -> bytes:
    """Draw workers, samples per second, loss, and the processes over time.

    Args:
        snapshot: `Timeline.snapshot`.

    Returns:
        A PNG.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("a picture needs matplotlib: pip install 'elasticflow-training[plots]'") from None

    lanes = snapshot["lanes"]
    heights = [_CHART_IN] * 3 + [min(max(len(lanes) * _LANE_IN, 0.6), _LANES_IN)]
    figure = Figure(figsize=(_WIDTH_IN, sum(heights) + 1.4), layout="constrained")
    workers, speed, loss, processes = figure.subplots(4, 1, sharex=True, height_ratios=heights)
    figure.suptitle(_title(snapshot), fontsize=10, x=0.01, ha="left")
    _draw_workers(workers, snapshot)
    _draw_series(speed, loss, snapshot["series"])
    _draw_lanes(processes, lanes)
    for axes in (workers, speed, loss, processes):
        for change in snapshot["changes"]:
            if change["before"]:
                axes.axvline(change["time"], color=_MARKS[change["tone"]], linewidth=0.8, linestyle="--", alpha=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    processes.set_xlim(0, max(snapshot["now"], 0.001))
    processes.set_xlabel("seconds since the first event", fontsize=8)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def _title(snapshot: dict[str, Any]) -> str:
    figures = snapshot["figures"]
    goodput = "" if figures["goodput"] is None else f", goodput {figures['goodput']:.1%}"
    changes = f"{figures['num_changes']} changes of workers, {figures['paused_s']:.3g} s of pauses"
    outcome = snapshot["verdict"] or ("" if snapshot["state"] == "unknown" else snapshot["state"])
    return _plain(f"{snapshot['run']}: {outcome or 'outcome unknown'}{goodput}; {changes}")


def _plain(text: str) -> str:
    """Escape dollars, which would be taken for formulas."""
    return text.replace("$", r"\$")


def _draw_workers(axes: Axes, snapshot: dict[str, Any]) -> None:
    times, sizes = snapshot["world_size"]
    if times:
        axes.step([*times, snapshot["now"]], [*sizes, sizes[-1]], where="post", color=_COLORS["training"])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("workers", fontsize=8)


def _draw_series(speed: Axes, loss: Axes, series: dict[str, Any]) -> None:
    def moments(values: Sequence[float | None]) -> list[float]:
        return [(index + 0.5) * series["bucket_s"] for index, value in enumerate(values) if value is not None]

    def known(name: str) -> list[float]:
        return [value for value in series[name] if value is not None]

    speed.plot(moments(series["samples_per_s"]), known("samples_per_s"), color=_COLORS["training"], linewidth=1)
    speed.set_ylim(bottom=0)
    speed.set_ylabel("samples/s", fontsize=8)
    times = moments(series["loss"])
    loss.fill_between(times, known("loss_min"), known("loss_max"), color=_COLORS["training"], alpha=0.2, linewidth=0)
    loss.plot(times, known("loss"), color=_COLORS["training"], linewidth=1)
    loss.set_ylabel("loss", fontsize=8)


def _draw_lanes(axes: Axes, lanes: Sequence[dict[str, Any]]) -> None:
    for row, lane in enumerate(lanes):
        for state, begin, end in lane["spans"]:
            height = 0.3 if state in ("warming", "leaving") else 0.75
            hatch = "///" if state == "slow" else None
            axes.barh(row, end - begin, left=begin, height=height, color=_COLORS[state], hatch=hatch, linewidth=0)
        if lane["how"] == "lost" and lane["spans"]:
            axes.plot(lane["spans"][-1][2], row, marker="x", color=_MARKS["lost"], markersize=6, markeredgewidth=2)
    few = len(lanes) <= 24
    names = [_plain(lane["worker"]) for lane in lanes] if few else []
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    if not few:
        axes.set_ylabel(f"{len(lanes)} processes", fontsize=8)
