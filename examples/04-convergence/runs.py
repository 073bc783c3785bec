"""One run: workers are started, let in and killed as the event log tells how far the training is."""

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from training import BATCH_SIZE, Options, train

from ef_common.events import expand
from ef_common.testing.harness import Job

PRELOAD = ["sklearn.datasets", "training"]
LIMIT_S = 240.0  # for what must happen next, mostly the end of the training


@dataclass(frozen=True)
class World:
    """How many workers there are: at the start, and from fractions of the samples on."""

    name: str
    start: int
    changes: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True)
class Setting:
    """What an update is made of, and by which rate."""

    name: str
    rule: str = "auto"
    ramp_steps: int = 8
    global_batch_size: int | None = None


FIXED_2 = World("fixed 2", 2)
FIXED_4 = World("fixed 4", 4)
ELASTIC = World("elastic 2→4→3→4→2", 2, ((0.2, 4), (0.4, 3), (0.6, 4), (0.8, 2)))
SHORT_ELASTIC = World("elastic 2→3→2", 2, ((0.3, 3), (0.6, 2)))

COMPENSATION = Setting("compensation")
NO_RAMP = Setting("compensation without a ramp", ramp_steps=0)
NOTHING = Setting("no compensation", rule="none")
GLOBAL_BATCH = Setting(f"global batch of {2 * BATCH_SIZE}", global_batch_size=2 * BATCH_SIZE)


@dataclass(frozen=True)
class Result:
    """A run as measured.

    Args:
        accuracy: After each epoch.
        num_samples: Of an epoch.
        world_sizes: Samples seen, and the world size from there on.
        num_updates: Of the whole run.
        seconds: What it took on a machine that did other things, too.
        audit: The promises that the audit found kept: all of them, or there is no result.
    """

    world: str
    setting: str
    seed: int
    learning_rate: float
    held_out: str
    accuracy: list[float]
    num_samples: int
    world_sizes: list[tuple[int, int]]
    num_updates: int
    seconds: float
    audit: list[str]


def run(
    world: World, setting: Setting, *, seed: int, epochs: int, learning_rate: float, held_out: str = "test"
) -> Result:
    """Train once.

    Raises:
        HarnessError: A worker failed, or the audit found a broken promise.
    """
    options = Options(
        epochs=epochs,
        seed=seed,
        learning_rate=learning_rate,
        rule=setting.rule,
        ramp_steps=setting.ramp_steps,
        global_batch_size=setting.global_batch_size,
        changes=[*world.changes],
        held_out=held_out,
    )
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="elasticflow-") as directory,
        Job(Path(directory), preload=PRELOAD, guard_s=LIMIT_S) as job,
    ):
        accuracy = play(job, world, options)
        steps = list(each_step(job))
        return Result(
            world=world.name,
            setting=setting.name,
            seed=seed,
            learning_rate=learning_rate,
            held_out=held_out,
            accuracy=accuracy,
            num_samples=options.num_samples // epochs,
            world_sizes=[step for before, step in zip([(0, 0), *steps], steps, strict=False) if step[1] != before[1]],
            num_updates=len(steps),
            seconds=round(time.monotonic() - began, 1),
            audit=[found.name for found in job.audit().properties],
        )


def play(job: Job, world: World, options: Options) -> list[float]:
    """Start the workers, change their number when it is due, and wait for the end."""
    workers = job.start_world(world.start, train, options)
    sizes = [world.start, *(size for _, size in world.changes)]
    num_joins = sum(max(0, after - before) for before, after in pairwise(sizes))
    gates = [job.directory / f"gate-{number}" for number in range(num_joins)]
    # Nodes that have everything ready, and start to take part when their gate opens.
    reserve = [(gate, job.start(train, replace(options, gate=str(gate)))) for gate in gates]
    for fraction, size in world.changes:
        due = fraction * options.num_samples
        job.wait_until(lambda _, due=due: num_seen(job) >= due, f"{due:.0f} samples")
        generation = job.generation
        while len(workers) < size:
            gate, worker = reserve.pop(0)
            gate.touch()
            workers.append(worker)
        for worker in workers[size:]:
            worker.kill()
        del workers[size:]
        job.view(size, after=generation)
    accuracy, *_ = [worker.result() for worker in workers]  # the first has been there from the start
    return [round(value, 4) for value in accuracy]


def each_step(job: Job) -> Iterator[tuple[int, int]]:
    """Samples seen before each update, and the world size in it."""
    steps = {event["step"]: event for event in job.events("step")}  # each worker has logged each of its steps
    seen = 0
    for _, event in sorted(steps.items()):
        yield seen, event["world_size"]
        seen += len(expand(event["committed"]))


def num_seen(job: Job) -> int:
    """Samples whose update is in the log."""
    committed = {event["step"]: event["committed"] for event in job.events("step")}
    return sum(stop - start for spans in committed.values() for start, stop in spans)


def save(results: list[Result], path: Path) -> None:
    """Write results, one to a line."""
    lines = ",\n".join(json.dumps(asdict(result), ensure_ascii=False) for result in results)
    path.write_text(f"[\n{lines}\n]\n")


def load(path: Path) -> list[Result]:
    """Read what `save` has written."""
    return [Result(**fields) for fields in json.loads(path.read_text())]
