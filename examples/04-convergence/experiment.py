"""Does the accuracy notice that workers come and go?

    python examples/04-convergence/experiment.py            # everything: 150 runs
    python examples/04-convergence/experiment.py --short    # one seed, 3 runs
    python examples/04-convergence/experiment.py --report   # tables and plot again, from results.json
    python examples/04-convergence/experiment.py --sweep    # how the learning rates were chosen

Prints two tables, and writes results.json and accuracy.png. Exits with an error if a worker
failed or an audit found a broken promise.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

import report
from runs import (
    COMPENSATION,
    ELASTIC,
    FIXED_2,
    FIXED_4,
    GLOBAL_BATCH,
    NO_RAMP,
    NOTHING,
    SHORT_ELASTIC,
    Result,
    Setting,
    World,
    load,
    run,
    save,
)

from ef_common.testing.harness import HarnessError

HERE = Path(__file__).parent
EPOCHS = 16
SHORT_EPOCHS = 5
SEEDS = range(5)

# Chosen from fixed runs of two workers alone (`--sweep`). 0.0125 and 0.1: the smallest and the largest rate whose
# accuracy on the validation data is within half a point of the best. 0.003: a smaller one loses more than a point.
LEARNING_RATES = (0.003, 0.0125, 0.1)
SWEEP = (0.0008, 0.0016, 0.003, 0.006, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.4)
SWEEP_SEEDS = range(100, 103)

# The first ratio of a run is taken at once, so without changes the ramp means nothing.
FIXED = [(world, setting) for world in (FIXED_2, FIXED_4) for setting in (COMPENSATION, NOTHING, GLOBAL_BATCH)]
ALL = [*FIXED, *((ELASTIC, setting) for setting in (COMPENSATION, NO_RAMP, NOTHING, GLOBAL_BATCH))]
Row = tuple[float, World, Setting]
SHORT = [(FIXED_2, COMPENSATION), (SHORT_ELASTIC, COMPENSATION), (SHORT_ELASTIC, NOTHING)]


def main() -> int:
    args = parse_arguments()
    out = args.out or (Path(tempfile.mkdtemp(prefix="elasticflow-convergence-")) if args.short else HERE)
    out.mkdir(parents=True, exist_ok=True)
    kept = load(out / "results.json") if args.resume else []
    try:
        if args.sweep:
            return sweep(out / "sweep.json")
        if args.short:
            rows = [(LEARNING_RATES[-1], *row) for row in SHORT]
            experiment(rows, range(1), SHORT_EPOCHS, out / "results.json", kept=kept)
        elif not args.report:
            rows = [(rate, *row) for rate in LEARNING_RATES for row in ALL]
            experiment(rows, SEEDS, EPOCHS, out / "results.json", kept=kept)
    except HarnessError as error:
        print(f"PROBLEM: {error}", file=sys.stderr)
        return 1
    show(load(out / "results.json"), out)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--short", action="store_true", help="one seed, few epochs, three runs")
    what.add_argument("--report", action="store_true", help="do not train; show what is in results.json")
    what.add_argument("--sweep", action="store_true", help="compare learning rates instead")
    parser.add_argument("--resume", action="store_true", help="keep the runs that are in results.json")
    parser.add_argument(
        "--out", type=Path, help="where results and plot go (default: here; with --short, a new temporary directory)"
    )
    return parser.parse_args()


def experiment(rows: Sequence[Row], seeds: Iterable[int], epochs: int, path: Path, *, kept: list[Result]) -> None:
    """Make all runs that have not been kept, seed by seed, and write each result as soon as it is there."""
    results = {(r.learning_rate, r.world, r.setting, r.seed): r for r in kept}
    order = [(rate, world.name, setting.name, seed) for rate, world, setting in rows for seed in seeds]
    for seed in seeds:
        for rate, world, setting in rows:
            key = (rate, world.name, setting.name, seed)
            if key in results:
                continue
            results[key] = run(world, setting, seed=seed, epochs=epochs, learning_rate=rate)
            save([results[known] for known in order if known in results], path)
            tell(results[key])


def sweep(path: Path) -> int:
    """Compare learning rates on the validation data, with two workers that stay."""
    results: list[Result] = []
    for rate in SWEEP:
        for seed in SWEEP_SEEDS:
            results.append(
                run(FIXED_2, COMPENSATION, seed=seed, epochs=EPOCHS, learning_rate=rate, held_out="validation")
            )
            save(results, path)
            tell(results[-1])
    for rate in SWEEP:
        accuracy = mean(result.accuracy[-1] for result in results if result.learning_rate == rate)
        print(f"learning rate {rate:<7} validation accuracy {100 * accuracy:.2f} %")
    return 0


def tell(result: Result) -> None:
    sizes = " ".join(f"{size}@{seen}" for seen, size in result.world_sizes)
    print(
        f"{result.world}, {result.setting}, seed {result.seed}, rate {result.learning_rate}: "
        f"{result.held_out} accuracy {result.accuracy[-1]:.3f}, {result.num_updates} updates, "
        f"workers@samples {sizes}, audit holds, {result.seconds:.1f} s",
        flush=True,
    )


def show(results: list[Result], out: Path) -> None:
    print(f"\ntest accuracy at the end (difference from the fixed runs)\n\n{report.final_accuracies(results)}\n")
    print(f"mean over all epochs\n\n{report.mean_accuracies(results)}\n")
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: it needs matplotlib, which the extra `plots` installs")
    else:
        report.plot(results, out / "accuracy.png")
    print(f"written to {out}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
