"""`elasticflow.launch` runs a function in all workers of an elastic job, from a script or a notebook.

The job is that of `elasticflow run`, whose workers are new interpreters, so what this process has initialized (torch,
TensorFlow, CUDA) does not matter to them. The function goes to them, and what it returns or raises comes back, in a
directory inside that of the run, which nobody else may read (:mod:`ef_common.launch.called`).
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ef_common.errors import JobFailed, UsageError
from ef_common.launch import called, environment, run_directory
from ef_common.launch.child import Child
from ef_common.launch.signals import handled
from ef_common.terminal import say

_LOOK_S = 0.1
_TAIL_CHARS = 2000
_FINISHED, _STOPPED = "finished", "stopped"
_WORDS = {"killed": "the workers were killed by `elasticflow stop --kill`", "failed": "workers have failed"}


@dataclass(frozen=True, slots=True)
class Launched:
    """The outcome of a job.

    Args:
        run_dir: Directory of the run, for `elasticflow audit` and `elasticflow logs`.
        outcome: In words: "finished", "finished, but some workers failed" or, after `elasticflow stop`, "stopped".
        value: What the function returned in the worker of rank 0, as JSON has it: numbers, text, None, lists and
            dicts of them; arrays and tensors as lists. None for anything else, and if the job did not finish.
    """

    run_dir: Path
    outcome: str
    value: Any = None


def launch(
    fn: Callable[..., Any],
    *args: Any,
    workers: int = 2,
    max_workers: int = 8,
    max_restarts: int = 3,
    checkpoint: str | Path | None = None,
    run_dir: str | Path | None = None,
) -> Launched:
    """Run a function in all workers of an elastic job on this machine, and wait for its end.

    The workers are processes of their own: those that are killed are replaced, and `elasticflow status`, `scale` and
    `stop` in a terminal work as for `elasticflow run`. What they print appears here. The first Ctrl-C, or the stop
    button of a notebook, lets them save a checkpoint and leave; the second one ends them.

    >>> import elasticflow as ef
    >>> def train(epochs):                               # doctest: +SKIP
    ...     trainer = Trainer(strategy=ElasticFlowStrategy(), max_epochs=epochs)
    ...     trainer.fit(Model(), loader())
    ...     return trainer.callback_metrics
    >>> ef.launch(train, 10, workers=2).value            # doctest: +SKIP
    {'train_loss': 0.012}

    Args:
        fn: The function; it may be defined in a cell. It imports or makes all that it needs, as each worker calls it.
        *args: Its arguments.
        workers: How many workers start.
        max_workers: How many there may be, for `elasticflow scale`.
        max_restarts: How often a worker that was killed is replaced.
        checkpoint: A URL for checkpoints; the same call resumes from the newest one.
        run_dir: Directory of the run. The default is a new one in ./elasticflow-runs.

    Returns:
        The directory of the run, the outcome, and what `fn` returned in the worker of rank 0.

    Raises:
        UsageError: An argument is wrong, `fn` cannot be serialized, or this process is a worker itself.
        JobFailed: `fn` has raised an exception in a worker, whose traceback is in the message; or the job has failed
            otherwise.
        KeyboardInterrupt: The job was interrupted, and has ended.
    """
    _check(workers, max_workers)
    call = called.pack(fn, args)
    name = getattr(fn, "__name__", type(fn).__name__)
    place = run_directory.create(name, None if run_dir is None else Path(run_dir))
    with tempfile.TemporaryDirectory(prefix="function-", dir=place, ignore_cleanup_errors=True) as folder:
        exchange = called.CallFolder(Path(folder))
        command = [f"--nproc-per-node={workers}", f"--nnodes=1:{max(workers, max_workers)}"]
        command += [f"--max-restarts={max_restarts}", f"--run-dir={place}"]
        command += [] if checkpoint is None else [f"--checkpoint={checkpoint}"]
        end = _run([*command, "-m", called.__name__, name, *exchange.put(call)])
        if end.interrupted:
            raise KeyboardInterrupt
        return _result(place, exchange, end)


def _check(workers: int, max_workers: int) -> None:
    given: dict[str, object] = {"workers": workers, "max_workers": max_workers}
    for name, number in given.items():
        if not isinstance(number, int) or number < 1:
            raise UsageError(f"{name} must be an integer of at least 1. Received: {name}={number!r}")
    if environment.COORDINATOR in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError(
            "this process is a worker of a job already, so it cannot launch another one. Call the function itself"
        )
    if find_spec("torch") is None:
        raise UsageError("elasticflow.launch needs torch, whose launcher it uses. Install it: pip install torch")


# ---------------------------------------------------------------------------------------------------- the job's life


@dataclass(frozen=True, slots=True)
class _End:
    """How the launcher ended: process id, exit status, whether we interrupted it, its last words."""

    pid: int
    status: int
    interrupted: bool
    tail: str


def _run(command: list[str]) -> _End:
    """Run the job to its end."""
    with _interrupts() as interrupts, Child(command, output=subprocess.PIPE) as child:
        tail = _hand_on(child, interrupts)
        return _End(child.process.pid, child.process.wait(), bool(interrupts), tail)


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Record Ctrl-C meanwhile instead of raising KeyboardInterrupt, which only reaches the main thread."""
    numbers: list[int] = []
    cannot_be_put_back = signal.getsignal(signal.SIGINT) is None
    if threading.current_thread() is not threading.main_thread() or cannot_be_put_back:
        yield numbers
        return
    with handled([signal.SIGINT], lambda number, frame: numbers.append(number)):
        yield numbers


def _hand_on(child: Child, interrupts: list[int]) -> str:
    """Copy the output to stdout and pass interrupts on until the job has ended; returns the end of the output.

    A process that the user's code has left behind may keep the pipe open, so its end is not waited for.
    """
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    output = child.process.stdout
    poll = select.poll()
    if output is not None:
        poll.register(output, select.POLLIN)
    tail, num_passed_on = "", 0
    while True:
        ended = child.process.poll() is not None
        ready = poll.poll(0 if ended else 1000 * _LOOK_S)
        for descriptor, _ in ready:
            if not (data := os.read(descriptor, 65536)):
                poll.unregister(descriptor)
            text = decode(data)
            _write(text)
            tail = (tail + text)[-_TAIL_CHARS:]
        if ended and not ready:
            return tail
        if num_passed_on < len(interrupts):  # one at a time: signals that come at once are one
            num_passed_on += 1
            child.interrupt()


def _write(text: str) -> None:
    """Write to stdout, with question marks for characters that its encoding does not have."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # what stands in for stdout may have none
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


# --------------------------------------------------------------------------------------------------------- its result


def _result(place: Path, exchange: called.CallFolder, end: _End) -> Launched:
    launcher = run_directory.read_launcher(place)
    outcome = "" if launcher is None or launcher.pid != end.pid else launcher.outcome  # not that of an earlier run
    if not outcome and end.status == 0:  # the launcher could not write it: a job outlives the directory of its run
        outcome = _FINISHED
    raised = exchange.exceptions()
    if not outcome.startswith((_FINISHED, _STOPPED)):
        why = outcome.partition("failed: ")[2] or _WORDS.get(outcome, f"the launcher ended with status {end.status}")
        details = raised[0] if raised else "" if outcome else end.tail
        raise JobFailed(f"{why}\n\n{details}".rstrip())
    for text in raised:
        say(f"a worker failed, and the others went on without it:\n{text}", color="yellow")
    if outcome.startswith(_STOPPED):
        return Launched(place, outcome)
    value, refused = exchange.value()
    if refused:
        say(
            f"the value that the function returned ({refused}) is not passed on: only numbers, text, lists and dicts "
            "are. Save it to a file instead",
            color="yellow",
        )
    return Launched(place, outcome, value)
