"""Newcomers receive the state over slow links: the pause of the training with 16 at once, against that with one.

Each worker is on a node of its own, a network namespace, and no link carries more than 1 MB/s. Real sessions and
process groups, and a state of 4 MB. The pause is that of the one member, from the boundary until all have the state.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.benchmarks.figure import Figure, emit, is_quick
from tests.benchmarks.processes import Processes
from tests.faults.networks import address, inside, nodes, why_not
from tests.faults.switch import Way

MANY, QUICK_MANY = 16, 4
TARGET = 2.0
STATE_BYTES = 4_000_000
_BYTES_PER_S = 1e6
TOKEN = "not a secret"
_PORT = 29400
_GUARD_S = 600.0
_SETTLED_S = 2.0


def measure(num: int) -> float:
    """Seconds for which this many newcomers, which come together, hold up the only member."""
    with nodes(num + 1) as switch, Processes() as processes:
        switch.set_all(Way(bytes_per_s=_BYTES_PER_S))
        coordinator = f"{address(1)}:{_PORT}"
        serve = ("-m", "tests.benchmarks.newcomers_worker", "coordinator", *coordinator.split(":"))
        processes.start(serve, name="coordinator", environment={"ELASTICFLOW_TOKEN": TOKEN}, prefix=inside(1))
        for node in range(1, num + 2):
            _start(processes, node, coordinator)
            if node == 1:
                _wait_for([processes.directory / "begun-1"])
        _wait_for([processes.directory / f"ready-{node}" for node in range(2, num + 2)])
        time.sleep(_SETTLED_S)
        (processes.directory / "go").touch()
        _wait_for([processes.directory / "pause"])
        found = [float(word) for word in (processes.directory / "pause").read_text().split()]
    pause_s, world_size = found
    if world_size != num + 1:
        raise RuntimeError(f"expected {num} newcomers at once. Received: {world_size - 1}")
    print(
        f"{num} newcomers: {pause_s:.3f} s; the state once over a link: {STATE_BYTES / _BYTES_PER_S:.3f} s", flush=True
    )
    return pause_s


def _start(processes: Processes, node: int, coordinator: str) -> None:
    environment = {
        "ELASTICFLOW_COORDINATOR": coordinator,
        "ELASTICFLOW_TOKEN": TOKEN,
        "ELASTICFLOW_NODE": f"node{node:02}",
        "ELASTICFLOW_ADDRESS": address(node),
        "ELASTICFLOW_HEARTBEAT_TIMEOUT": "60",
    }
    command = ("-m", "tests.benchmarks.newcomers_worker", str(processes.directory), str(node), str(STATE_BYTES))
    processes.start(command, name=f"worker{node}", environment=environment, prefix=inside(node))


def _wait_for(paths: list[Path]) -> None:
    deadline = time.monotonic() + _GUARD_S
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not there: {[path.name for path in paths if not path.exists()]}")
        time.sleep(0.05)


def main() -> None:
    """Measure both."""
    if reason := why_not():
        print(reason)
        sys.exit(1)
    many = QUICK_MANY if is_quick(__doc__) else MANY
    one, all_of_them = measure(1), measure(many)
    emit({f"newcomers_{many}": Figure(all_of_them, one, TARGET, "s")})


if __name__ == "__main__":
    main()
