"""CPU time of the coordinator for one membership change among 1,000 workers: a loss, then a planned join.

The change is carried through `decide` event by event: the loss of a member, the arrival of a newcomer, its
readiness, and every member's arrival at the boundary. The peer is the budget.
"""

from __future__ import annotations

import sys
import time

from ef_common.core import membership
from ef_common.core.membership import Arrived, AtBoundary, Forming, Gone, Membership, Ready, Settings, Tick
from ef_common.core.view import Member
from tests.benchmarks.figure import emit, is_quick, of_samples

NUM_WORKERS = 1_000
WORKERS_PER_NODE = 8
BUDGET_MS = 100.0
SETTINGS = Settings()


def member(index: int) -> Member:
    """One of eight workers of a node."""
    node = index // WORKERS_PER_NODE
    return Member(
        f"worker-{index}",
        node=f"node-{node}",
        address=f"10.0.0.{node}",
        local_rank=index % WORKERS_PER_NODE,
        local_world_size=WORKERS_PER_NODE,
    )


def established() -> Membership:
    """A job of so many workers, in its first view."""
    state: Membership = Forming()
    for index in range(NUM_WORKERS):
        state, _, _ = membership.decide(state, Arrived(member(index)), 0.0, SETTINGS)
    state, _, _ = membership.decide(state, Tick(), 10.0, SETTINGS)
    return state


def change(state: Membership) -> Membership:
    """A member is lost, and a worker joins in its place."""
    newcomer = member(NUM_WORKERS)
    for event in (Gone("worker-500", "the connection has ended"), Arrived(newcomer), Ready(newcomer.id)):
        state, _, _ = membership.decide(state, event, 11.0, SETTINGS)
    view = state.view
    for worker in view.ids if view is not None else ():
        state, _, _ = membership.decide(state, AtBoundary(worker, state.generation), 12.0, SETTINGS)
    return state


def main() -> int:
    """Measure; the last line of output is JSON."""
    quick = is_quick(__doc__)
    before = established()
    samples = []
    for _ in range(5 if quick else 30):
        begin = time.process_time()
        after = change(before)
        samples.append(1000.0 * (time.process_time() - begin))
    if after.view is None or after.view.world_size != NUM_WORKERS or after.generation != 3:
        print(f"the change did not come about: {after.view}")
        return 1
    emit({"coordinator_1000_workers": of_samples(samples, [BUDGET_MS], target=1.0, unit="ms CPU")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
