"""Goodput: the share of the workers' time that went into training which was kept."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from typing import Any

MAX_MARKS = 1024
_WORK = frozenset({"step", "evaluation", "epoch_end"})

DEFINITION = (
    "Goodput is the share of the workers' time that went into training which was kept. The time of a worker "
    "counts from its first event, which comes after its imports, or from the first view of the job if that was "
    "later, to its end; that of a process which has not joined, to its last event. Not counted as training are: "
    "warming up before its first view, pauses for changes of the workers, steps that were repeated or undone by a "
    "return to a checkpoint, what the program does between two trainings, and the time after its last step. "
    "Validation between steps counts as training."
)


@dataclass(frozen=True, slots=True)
class Mark:
    """The work that had been done at the time of an update.

    Args:
        update: Number of the training in its program, and of the update.
        samples: Trained so far.
        useful_s: Time of all workers that went into that.
    """

    update: tuple[int, int]
    samples: float
    useful_s: float


@dataclass
class Ledger:
    """The part of a run's work that was kept.

    Training that goes back to an earlier update makes void what came after it. At most `MAX_MARKS` updates are
    remembered for that; between two of them the work is taken to be even.

    Attributes:
        samples: Trained, and not undone.
        useful_s: Time of all workers that went into them.
        undone_samples: Trained, and undone.
        num_repeated: Steps that workers have made again because another one was lost in them.
    """

    samples: float = 0.0
    useful_s: float = 0.0
    undone_samples: float = 0.0
    num_repeated: int = 0
    _since: dict[str, float] = field(default_factory=dict)
    _marks: list[Mark] = field(default_factory=lambda: [Mark((0, 0), 0.0, 0.0)])
    _newest: Mark = Mark((0, 0), 0.0, 0.0)
    _stride: int = 1

    def take(self, record: dict[str, Any]) -> None:
        """Process an event of a worker."""
        worker, moment = record["worker"], record["time"]
        since = self._since.get(worker)
        match record["kind"]:
            case "start":
                self._since.pop(worker, None)
            case "view":
                pause_s = record["pause_s"] or 0.0
                self._since[worker] = moment if since is None else min(since + pause_s, moment)
            case "training" if since is not None:  # what the program did since the one before is no training
                self._since[worker] = moment
            case "repeated" if since is not None:
                self.num_repeated += 1
                self._since[worker] = moment
            case kind if kind in _WORK and since is not None:
                self.useful_s += max(moment - since, 0.0)
                self._since[worker] = moment

    def forget(self, workers: set[str]) -> None:
        """Forget workers that are gone."""
        for worker in workers:
            self._since.pop(worker, None)

    def update(self, update: tuple[int, int], samples: float) -> None:
        """Record an update of this many samples; call this before `take` of the first event that mentions it."""
        if update <= self._newest.update:
            self._go_back((update[0], update[1] - 1))
        self._settle()
        if update[0] != self._newest.update[0]:  # the first of its training that this log has
            self._keep(self._newest)
            self._keep(Mark((update[0], update[1] - 1), self.samples, self.useful_s))
        self.samples += samples
        self._newest = Mark(update, self.samples, self.useful_s)

    def _settle(self) -> None:
        """The work of all workers for the newest update is known."""
        self._newest = replace(self._newest, useful_s=self.useful_s)
        if self._newest.update[1] - self._marks[-1].update[1] >= self._stride:
            self._keep(self._newest)

    def _keep(self, mark: Mark) -> None:
        if mark.update > self._marks[-1].update:
            self._marks.append(mark)
        if len(self._marks) > MAX_MARKS:
            del self._marks[1:-1:2]
            self._stride *= 2

    def _go_back(self, update: tuple[int, int]) -> None:
        marks = [*self._marks, replace(self._newest, useful_s=self.useful_s)]
        index = bisect_right(marks, update, key=lambda mark: mark.update)
        before, after = marks[index - 1], marks[min(index, len(marks) - 1)]
        part = 0.0
        if before.update[0] == update[0] == after.update[0] and after.update > before.update:
            part = (update[1] - before.update[1]) / (after.update[1] - before.update[1])
        samples = before.samples + part * (after.samples - before.samples)
        self.undone_samples += self.samples - samples
        self.samples = samples
        self.useful_s = before.useful_s + part * (after.useful_s - before.useful_s)
        self._marks = self._marks[:index]
        self._newest = Mark(update, self.samples, self.useful_s)
