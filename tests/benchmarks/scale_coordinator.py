"""A coordinator of `scale`, in a process of its own: says what it has used and decided whenever it is asked."""

from __future__ import annotations

import json
import sys
import time

from ef_common.control.coordinator import Coordinator
from ef_common.core.membership import Gathering, Idle, Serving, Settings
from tests.benchmarks.scale import TOKEN

TIMEOUT_S = 1200.0


def main() -> None:
    """Serve; the first line of output is the port, and each line of input is answered."""
    num_workers, role = int(sys.argv[1]), sys.argv[2]
    settings = Settings(start_nodes=num_workers, last_call_s=TIMEOUT_S)
    coordinator = Coordinator(
        ("0.0.0.0" if role == "others" else "127.0.0.1", 0),
        token=TOKEN,
        settings=settings,
        heartbeat_timeout_s=TIMEOUT_S,
        standby=role != "leader",
    )
    coordinator.start()
    announcer = coordinator._announcer._announcer  # type: ignore[union-attr]
    print(coordinator.address[1], flush=True)
    for _ in sys.stdin:
        state = coordinator._server.state  # type: ignore[union-attr]
        answer = {
            "cpu_s": time.process_time(),
            "generation": state.generation,
            "size": 0 if state.view is None else state.view.world_size,
            "settled": len(state.settled) if isinstance(state, Serving) else 0,
            "leads": not isinstance(state, (Idle, Gathering)),
            "told": len(announcer._heard),
        }
        print(json.dumps(answer), flush=True)
    coordinator.stop()


if __name__ == "__main__":
    main()
