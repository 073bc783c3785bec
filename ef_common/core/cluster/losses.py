"""Pods that are lost: how often in a row, and when they are replaced, if at all: a pure rule.

* **In a row.** Pods that were there together are one loss, however long it takes until each of them is seen: only the
  loss of a pod that was created after the last loss is another one in a row, and only in the next `STEADY_S`.
* **Pauses.** The first time, a pod is replaced at once, and then after growing pauses.
* **The cap.** When pods are lost more often in a row than the job allows, for example on a node that is broken, the
  job goes on with those that it has, if its minimum runs. It has no more than these for `STEADY_S` after the last loss
  in a row, and with each one that is lost meanwhile, one fewer. Those that only had to go for others come back. Then
  all are tried again, once: another loss in the `STEADY_S` after that is one more in the same row.
* **The end.** The job fails if such a loss leaves it fewer than its minimum.

All of that is in the record of the job (`crashes`, `crashed_at`, `cap`), so it does not matter who decides next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ef_common.core.cluster.state import FAILED, FINISHED, LEFT, Job, Pod, Record
from ef_common.core.doubling import doubled_s

STEADY_S = 600.0
"""A loss so long after the last one is the first in a row."""
MAX_PAUSE_S = 60.0


def note_losses(job: Job, now: float) -> Record:
    """The record of a job, with the losses since."""
    known = job.record.counted | job.record.leaving
    lost = [pod for pod in job.pods if _is_lost(pod) and pod.uid not in known]
    record = _counted(job, lost, now) if lost else job.record
    return replace(record, cap=_cap(job, record, num_lost=len(lost), now=now))


def leaves_too_few(job: Job, record: Record) -> bool:
    """Whether a loss has left a job fewer pods than its minimum, and none may replace them."""
    return record.cap is not None and record.cap != job.record.cap and record.cap < job.minimum


def pause_s(record: Record) -> float:
    """How long pods that were lost are not replaced: the first time not at all."""
    return 0.0 if record.crashes < 2 else doubled_s(1.0, record.crashes - 2, most_s=MAX_PAUSE_S)


def what_was_lost(job: Job, record: Record) -> str:
    """How often pods were lost in a row, and which one was last."""
    return f"pods were lost {record.crashes} times in a row, and backoffLimit is {job.backoff_limit}: {record.lost}"


def _is_lost(pod: Pod) -> bool:
    return pod.ended and pod.gone_by is None and pod.status not in (FINISHED, FAILED, LEFT)


def _counted(job: Job, lost: Sequence[Pod], now: float) -> Record:
    record, last = job.record, lost[-1]
    ended = f"ended with status {last.status}" if last.status is not None else "was lost"
    record = replace(record, counted=record.counted | {pod.uid for pod in lost}, lost=f"{last.name} {ended}")
    tries_again = record.crashes > job.backoff_limit  # after `STEADY_S`
    before = 0 if now - record.crashed_at > STEADY_S * (1 + tries_again) else record.crashes
    # API servers round times down to seconds: a pod that replaces a lost one at once may seem to be older.
    if before and all(pod.created < record.crashed_at for pod in lost):
        return record
    return replace(record, crashes=before + 1, crashed_at=now)


def _cap(job: Job, record: Record, *, num_lost: int, now: float) -> int | None:
    if record.crashes <= job.backoff_limit or now >= record.crashed_at + STEADY_S:
        return None
    num_alive = len(job.alive)
    if job.record.cap is not None and now < job.record.crashed_at + STEADY_S:
        # What it has is never too many: a pod that was lost may be one that was not counted when the cap was set.
        return max(job.record.cap - num_lost, min(job.record.cap, num_alive))
    num_running = sum(pod.running for pod in job.alive)
    return num_running if num_running < job.minimum else num_alive
