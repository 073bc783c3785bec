"""Tables and a plot, from results alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev

from runs import COMPENSATION, FIXED_2, FIXED_4, GLOBAL_BATCH, NO_RAMP, NOTHING, Result

FIXED = (FIXED_2.name, FIXED_4.name)
COLOURS = {COMPENSATION.name: "C0", NO_RAMP.name: "C1", NOTHING.name: "C3", GLOBAL_BATCH.name: "C2"}
DASHES = {FIXED_2.name: ":", FIXED_4.name: "--"}
ERRORS = [1, 2, 5, 10, 20, 50]  # in percent: an accuracy is drawn by what is missing, on a logarithmic scale


def by_rate(results: Sequence[Result]) -> dict[float, list[Result]]:
    """Results of each learning rate; they have nothing to do with each other."""
    rates = dict.fromkeys(result.learning_rate for result in results)
    return {rate: [result for result in results if result.learning_rate == rate] for rate in rates}


def by_row(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    """Results of each world and setting, one for each seed, in the order of the runs."""
    rows = dict.fromkeys((result.world, result.setting) for result in results)
    return {row: [result for result in results if (result.world, result.setting) == row] for row in rows}


def final_accuracies(results: Sequence[Result]) -> str:
    """Table of the test accuracies after the last epoch.

    Each is a mean over the seeds ± their standard deviation. In brackets: the difference from the fixed runs with
    compensation, taken seed by seed, in points, ± the standard error of its mean.
    """

    def cell(chosen: Sequence[Result], others: Sequence[Result]) -> str:
        final = [100 * result.accuracy[-1] for result in chosen]
        gaps = [100 * (result.accuracy[-1] - baseline(others, result.seed)) for result in chosen]
        return f"{mean(final):.2f}{spread(final)} % ({mean(gaps):+.2f}{spread(gaps, of_mean=True)})"

    return table(results, cell)


def mean_accuracies(results: Sequence[Result]) -> str:
    """Table of the means of the test accuracies after all epochs, which tell how fast they have grown."""
    return table(results, lambda chosen, _: f"{mean(100 * mean(result.accuracy) for result in chosen):.1f} %")


def table(results: Sequence[Result], cell: Callable[[Sequence[Result], Sequence[Result]], str]) -> str:
    """A table in Markdown: a row for each world and setting, a column for each learning rate.

    Args:
        results: All of them.
        cell: Text about some of the results of a learning rate, and all of those.
    """
    columns = by_rate(results)
    lines = [
        "".join(["| Workers | Setting |", *(f" Learning rate {rate:g} |" for rate in columns)]),
        "|---" * (2 + len(columns)) + "|",
    ]
    for row in by_row(results):
        cells = [cell(by_row(others)[row], others) for others in columns.values()]
        lines.append(f"| {' | '.join([*row, *cells])} |")
    return "\n".join(lines)


def baseline(results: Sequence[Result], seed: int) -> float:
    """Accuracy of the fixed runs with compensation."""
    chosen = [r for r in results if r.seed == seed and r.setting == COMPENSATION.name and r.world in FIXED]
    return mean(result.accuracy[-1] for result in chosen)


def spread(values: Sequence[float], *, of_mean: bool = False) -> str:
    """The standard deviation, or the standard error of the mean; a single value has none."""
    if len(values) == 1:
        return ""
    return f" ± {stdev(values) / (len(values) ** 0.5 if of_mean else 1):.2f}"


def plot(results: Sequence[Result], path: Path) -> None:
    """Test accuracy over the samples seen, with the world size below; a column for each learning rate.

    Of the fixed runs, those with compensation.
    """
    from matplotlib import pyplot, use

    use("Agg")
    columns = by_rate(results)
    figure, axes = pyplot.subplots(
        nrows=2,
        ncols=len(columns),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
        figsize=(1 + 6 * len(columns), 6.5),
        height_ratios=[4, 1],
    )
    for above, below, (rate, chosen) in zip(*axes, columns.items(), strict=True):
        above.set(title=f"learning rate {rate:g}", yscale="log")
        _plot_accuracies(above, chosen)
        _plot_world_sizes((above, below), next(result for result in chosen if result.world not in FIXED))
    above, below = axes[:, 0]
    above.invert_yaxis()
    above.set_yticks(ERRORS, [str(100 - error) for error in ERRORS])
    above.set(ylabel=f"test accuracy in %, mean over {len({result.seed for result in results})} seeds")
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    below.set(ylabel="workers", ylim=(0, 5))
    figure.savefig(path, dpi=80, metadata={"Software": None})
    pyplot.close(figure)


def _plot_accuracies(axes, results: Sequence[Result]) -> None:
    for (world, setting), chosen in by_row(results).items():
        is_fixed = world in FIXED
        if is_fixed and setting != COMPENSATION.name:
            continue
        samples = [(epoch + 1) * chosen[0].num_samples for epoch in range(len(chosen[0].accuracy))]
        errors = [100 * (1 - mean(values)) for values in zip(*(result.accuracy for result in chosen), strict=True)]
        colour = "black" if is_fixed else COLOURS[setting]
        axes.plot(samples, errors, DASHES.get(world, "-"), color=colour, label=f"{world}, {setting}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _plot_world_sizes(axes, result: Result) -> None:
    above, below = axes
    starts, sizes = zip(*result.world_sizes, strict=True)
    below.stairs(sizes, [*starts, len(result.accuracy) * result.num_samples], color="black", baseline=None)
    below.set(xlabel="samples seen")
    for start in starts[1:]:
        above.axvline(start, color="grey", lw=0.5)
        below.axvline(start, color="grey", lw=0.5)
