"""Command line: replay one schedule with its trace, or run many."""

from __future__ import annotations

import argparse
import sys

from ef_common.testing.simulation.campaign import run_campaign
from ef_common.testing.simulation.schedule import FAMILIES
from ef_common.testing.simulation.simulation import simulate


def replay(seed: int, *, family: str = "") -> int:
    """Run one schedule and print its trace."""
    schedule = FAMILIES[family](seed)
    print(schedule.job)
    print(f"tokens {schedule.tokens}, buffers of {schedule.buffer_bytes} bytes")
    for fault in schedule.faults:
        print(fault)
    outcome = simulate(schedule, trace=True)
    print("\n".join(outcome.trace))
    print(", ".join(f"{worker}: {end or 'frozen'}" for worker, end in outcome.ends.items()))
    print(f"seed {seed}: {outcome.violation or 'everything holds'}")
    return int(outcome.violation is not None)


def run_many(num_schedules: int, *, first_seed: int, jobs: int, family: str = "") -> int:
    """Run many schedules and print one line of summary, and the first failure."""
    summary = run_campaign(num_schedules, first_seed=first_seed, jobs=jobs, family=family)
    print("seen:", ", ".join(f"{what} {count}" for what, count in sorted(summary.seen.items())))
    print("workers:", ", ".join(f"{end} {count}" for end, count in sorted(summary.ends.items())))
    per_schedule_ms = 1000.0 * summary.cpu_s / max(1, summary.num_schedules)
    print(
        f"{summary.num_schedules} schedules, {summary.num_events} events, {len(summary.failures)} failures, "
        f"{per_schedule_ms:.1f} ms CPU each"
    )
    if summary.failures:
        seed = min(summary.failures)
        print(f"first failing seed: {seed}: {summary.failures[seed]}")
    return int(bool(summary.failures))


def main() -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m ef_common.testing.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this schedule, or begin with it")
    parser.add_argument("--schedules", type=int, help="run so many")
    parser.add_argument("--jobs", type=int, default=1, help="in so many processes")
    families = parser.add_mutually_exclusive_group()
    for name, what in (
        ("failover", "coordinators are lost"),
        ("handovers", "coordinators are told to go"),
        ("founding", "much fails about when the first view comes"),
        ("endpoints", "nodes at the endpoints of a list are lost, and come back"),
        ("hangs", "workers hang"),
        ("trainings", "programs train several times"),
        ("sizes", "the wanted number of nodes changes"),
        ("streams", "the data are a stream of shards"),
    ):
        families.add_argument(
            f"--{name}", dest="family", action="store_const", const=name, help=f"schedules in which {what}"
        )
    families.add_argument(
        "--workers", dest="family", type="workers={}".format, metavar="16|64|256", help="schedules of so many workers"
    )
    arguments = parser.parse_args()
    if arguments.family not in (None, *FAMILIES):
        parser.error(f"expected 16, 64 or 256 workers. Received: {arguments.family}")
    first, family = arguments.seed or 0, arguments.family or ""
    if arguments.schedules is None:
        return replay(first, family=family)
    return run_many(arguments.schedules, first_seed=first, jobs=arguments.jobs, family=family)


if __name__ == "__main__":
    sys.exit(main())
