"""Train with three nodes, lose one in the middle of an epoch, add another, and prove that nothing went wrong.

    python examples/03-kill-and-join/demo.py [--framework keras]

Each node is a torchrun agent with one worker that runs the train.py of examples/01-lightning-digits, or of
examples/02-keras-digits. Exits with 0 if the training came through with a good test accuracy and the audit found
every promise kept.
"""

import argparse
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from nodes import Nodes
from timeline import Display, Timeline

from ef_common.audit import audit
from ef_common.events import EventLogError

EXAMPLES = Path(__file__).parents[1]
TRAIN = {
    "lightning": EXAMPLES / "01-lightning-digits" / "train.py",
    "keras": EXAMPLES / "02-keras-digits" / "train.py",
}
NUM_NODES = 3
VICTIM = 2  # counted from 0; node 0 hosts the coordinator
PATIENT = 1
MIN_ACCURACY = 0.9
POLL_S = 0.2


def main() -> int:
    args = parse_arguments()
    run_dir = args.run_dir or Path(tempfile.mkdtemp(prefix="elasticflow-demo-"))
    run_dir.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    command = [str(TRAIN[args.framework]), f"--epochs={args.epochs}", f"--step-seconds={args.step_seconds}"]
    nodes = Nodes(run_dir, NUM_NODES, command)
    timeline = Timeline(run_dir, name_of=nodes.name_of)
    with nodes, Display(timeline) as display:
        problems = play(nodes, timeline, display, limit_s=args.limit_seconds)
        outputs = nodes.outputs()
        for number in nodes.failures():
            problems.append(f"node {number + 1} failed; the end of what it printed:\n{tail(nodes.output(number))}")
    problems += judge(run_dir, timeline, outputs)
    print(f"event log: {run_dir}")
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if problems else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--framework", choices=sorted(TRAIN), default="lightning", help="whose training it is")
    parser.add_argument("--run-dir", type=Path, help="where the event log goes (default: a new temporary directory)")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--step-seconds", type=float, default=0.1, help="artificial time that a step takes")
    parser.add_argument("--limit-seconds", type=float, default=180.0, help="give up after this time")
    args = parser.parse_args()
    if args.run_dir is not None and (args.run_dir / "events").exists():
        parser.error(f"{args.run_dir} holds the event log of another run")
    return args


def play(nodes: Nodes, timeline: Timeline, display: Display, *, limit_s: float) -> list[str]:
    """Start, kill and add nodes as the event log tells how far the training is; return what went wrong."""
    deadline = time.monotonic() + limit_s
    killed = False
    timeline.note(f"starting nodes 1 to {NUM_NODES}")
    for _ in range(NUM_NODES):
        nodes.start()
    while nodes.running():
        timeline.update()
        if timeline.world_size and len(nodes) == NUM_NODES:
            timeline.note(f"starting node {NUM_NODES + 1}")
            nodes.start()  # it imports and builds its model while the others train
        if timeline.epoch >= 1 and timeline.step >= timeline.first_step + 5 and not killed:
            killed = True
            timeline.note(f"SIGKILL to node {VICTIM + 1}")
            nodes.kill(VICTIM)
        if timeline.epoch >= 2 and timeline.num_joined == 0:
            # On a busy machine a node takes long to start: let there be something left of the training to join.
            nodes.slow_down(PATIENT)
        display.update()
        if nodes.failures():
            return []
        if time.monotonic() > deadline:
            return [f"not all processes ended within {limit_s:g} s"]
        time.sleep(POLL_S)
    timeline.update()
    timeline.note("finished")
    return []


def judge(run_dir: Path, timeline: Timeline, outputs: str) -> list[str]:
    """Print how it went; return what is not as promised."""
    problems = []
    accuracies = re.findall(r"^test accuracy: ([\d.]+)", outputs, re.MULTILINE)
    accuracy = float(accuracies[-1]) if accuracies else 0.0
    if accuracy <= MIN_ACCURACY:
        problems.append(f"the test accuracy is {accuracy}, expected more than {MIN_ACCURACY}")
    if not (timeline.num_lost == 1 and timeline.num_joined == 1):
        problems.append(f"expected one loss and one join, saw {timeline.num_lost} and {timeline.num_joined}")
    print(f"\ntest accuracy: {accuracy:.3f}")
    try:
        report = audit(run_dir)
    except EventLogError as error:
        return [*problems, str(error)]
    if not report.ok:
        problems.append("the audit found a broken promise")
    for found in report.properties:
        print(f"audit: {'holds ' if found.ok else 'BROKEN'} {found.name}: {found.detail}")
    print(f"longest pause of a worker that went on: {1000 * timeline.longest_pause:.0f} ms")
    return problems


def tail(path: Path, num_lines: int = 30) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
