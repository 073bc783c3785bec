"""A program that launches a function of its own: `python launching.py RUN_DIR CHECKPOINT NAME ARGUMENT`.

The functions are those of `__main__`, as in a notebook. What is launched with them prints JSON at its end.
"""

import json
import os
import signal
import sys

import elasticflow as ef
from ef_common.errors import JobFailed


def train(stop):
    """Until a file of this name is in the run directory. The worker of rank 1 dies in its tenth step."""
    from tests.faults.training import train

    fault = {"where": "forward", "step": 10, "signal": signal.SIGKILL, "rank": 1, "generation": 1}
    train({"epochs": 1000, "length": 403, "step_sleep_s": 0.03, "stop": stop}, fault)
    return {"pid": os.getpid(), "numbers": numbers()}


def numbers():
    import numpy as np

    return np.arange(3)


def wait(step_s):
    """Train with steps that take so many seconds, without an end."""
    from tests.faults.training import train

    train({"epochs": 1000, "length": 403, "step_sleep_s": float(step_s), "checkpoint_steps": 100_000})


def fail(rank):
    """The worker of this rank raises an exception in the fourth step."""
    from tests.faults.raising_worker import Options, main

    main(Options("forward", int(rank)))


def fail_at_once(what):
    raise ValueError(what)  # in all workers


def main():
    # A shell that runs tests in the background has them ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_dir, checkpoint, name, argument = sys.argv[1:]
    try:
        launched = ef.launch(globals()[name], argument, workers=2, run_dir=run_dir, checkpoint=checkpoint or None)
    except JobFailed as failure:
        return {"failed": str(failure)}
    except KeyboardInterrupt:
        return {"interrupted": True}
    return {"run_dir": str(launched.run_dir), "outcome": launched.outcome, "value": launched.value}


if __name__ == "__main__":
    sys.stdout.write(f"RESULT {json.dumps(main())}\n")
