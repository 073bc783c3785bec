"""The lineage of a job: which checkpoints a start may take, and which writers are fenced off.

A checkpoint is named by (run, generation, step), in that order:

* *run* is the number of the start of the job. A start exclusively claims the next number, and its claim names the
  checkpoint that it resumes from: its *parent*.
* *generation* is that of the view whose member wrote it, and *step* is the update after which it was taken.

These names form a chain: the checkpoints of the newest run, then those of the run that it resumed from, up to its
parent, and so on. A checkpoint off the chain was *rolled back*: training has continued elsewhere, from before it.

The order is what fences. A name is never used twice, because only one start has claimed its run and only one member
writes in its generation. Whatever a writer that was cut off may still publish sorts before what the others have
published meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

_NAME = re.compile(r"run-([0-9]{6,})-generation-([0-9]{6,})-step-([0-9]{9,})")


class CheckpointId(NamedTuple):
    """Identity of a checkpoint; newer ones compare greater.

    Args:
        run: Number of the start of the job, from 1.
        generation: Generation of the view in which it was taken.
        step: Updates made since the beginning of training.

    >>> CheckpointId(2, 5, 123).name
    'run-000002-generation-000005-step-000000123'
    """

    run: int
    generation: int
    step: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"run-{self.run:06d}-generation-{self.generation:06d}-step-{self.step:09d}"

    @classmethod
    def parse(cls, name: str) -> CheckpointId | None:
        """The identity with this name; None if the name is not one of ours."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        found = cls(*map(int, match.groups()))
        return found if found.name == name else None


@dataclass(frozen=True, slots=True)
class RunClaim:
    """What is known about the beginning of a run.

    Args:
        parent: The checkpoint that it resumed from; None if it started from nothing.
        readable: False if the claim is there, but damaged: then the parent is not known.
    """

    parent: CheckpointId | None
    readable: bool = True


@dataclass(frozen=True, slots=True)
class Fence:
    """Why a writer must not publish.

    Args:
        reason: One line.
        final: A newer start of the job has taken over, so nothing of this run will be published any more. Otherwise
            a newer generation of this run has gone on, and only what older ones wrote is refused.
    """

    reason: str
    final: bool


def lineage(checkpoints: Collection[CheckpointId], claims: Mapping[int, RunClaim]) -> list[CheckpointId]:
    """Checkpoints that a start may take, newest first.

    A run whose claim is missing or damaged is taken to have resumed from the newest of all older ones: the chain does
    not break because of one small file. So is a run that has published nothing and whose parent is gone: the job before
    it has removed that one while it began, and has published newer ones instead.

    Args:
        checkpoints: Checkpoints with a manifest.
        claims: How the runs began, by their numbers.

    >>> first, second, third = CheckpointId(1, 1, 10), CheckpointId(1, 1, 20), CheckpointId(2, 1, 12)
    >>> lineage([first, second, third], {1: RunClaim(None), 2: RunClaim(parent=first)}) == [third, first]
    True
    """
    runs = sorted({one.run for one in checkpoints} | set(claims))
    chain: list[CheckpointId] = []
    limit: CheckpointId | None = None
    while runs:
        run = runs.pop()
        chain += sorted((one for one in checkpoints if one.run == run and (not limit or one <= limit)), reverse=True)
        claim, limit = claims.get(run, RunClaim(None, readable=False)), None
        was_removed = claim.parent is not None and claim.parent not in checkpoints
        if claim.readable and not (was_removed and all(one.run != run for one in checkpoints)):
            limit = claim.parent
            if limit is None:
                break
            while runs and runs[-1] > limit.run:
                runs.pop()
    return chain


def next_run(checkpoints: Collection[CheckpointId], claims: Mapping[int, RunClaim]) -> int:
    """The number of the next start, above every number that has left a trace."""
    return 1 + max({one.run for one in checkpoints} | set(claims), default=0)


def fence(writer: CheckpointId, checkpoints: Collection[CheckpointId], claims: Mapping[int, RunClaim]) -> Fence | None:
    """Why this checkpoint must not be published; None if it may be.

    Args:
        writer: Identity of the checkpoint to be published.
        checkpoints: Checkpoints with a manifest.
        claims: How the runs began.
    """
    newest_run = next_run(checkpoints, claims) - 1
    if newest_run > writer.run:
        return Fence(f"run {newest_run} has begun, and this one is run {writer.run}", final=True)
    newest = max((one for one in checkpoints if one.run == writer.run), default=None)
    if newest is not None and newest.generation > writer.generation:
        reason = f"generation {newest.generation} has published {newest.name} already"
        return Fence(f"{reason}, and this is of generation {writer.generation}", final=False)
    return None
