"""What the controller of a cluster does: a pure rule, asked again whenever something has changed.

It looks at everything, and decides everything anew. Whatever was missed, or not done because the controller died, is
done the next time. It is safe for several controllers, and for one that acts on what it saw a while ago:

* **Never more than the maximum, and the spares.** A pod has one of as many names as the job may have pods, and the API
  server gives a name once. So no order of events, and no number of controllers, makes more of them.
* **Never below the minimum.** Pods that are to go are first put on record. The record is written only if nobody has
  written it since it was read, and if the pods that were read after it are those of which the decision knows
  (:func:`agrees`). Whoever decides next counts them as gone, and deletes those that are still there. Two controllers
  therefore agree on the pods that go, whichever of them deletes them.
* **Counted once.** A pod that was lost is put on record, in the same way, before it is deleted
  (:mod:`ef_common.core.cluster.losses`).
* **Over when it is over.** A pod that has ended with the status of a training that is over may only have been let go,
  by a launcher that has no status for that. So the job is not over as long as another pod is heard to train on.

A job may choose its size: then it has no more pods than its training asks for, and starts with its minimum. When the
training asks for fewer, it chooses itself which pods leave, as only it knows which are slow. The number is known here
only a while later, so a pod that has left by itself is not replaced before the training was heard once more. Pods that
stay beyond that number are deleted after a while: they have never become members.

A job is in one of these phases, and in the last two it stays::

    PENDING → RUNNING     the minimum of pods runs
    RUNNING → PENDING     no pod is left
    PENDING → SUSPENDED   the user wants no pods, and none is left
    RUNNING → SUSPENDED   likewise
    SUSPENDED → PENDING   the user wants pods again
    SUSPENDED → RUNNING   likewise, and another controller has started the minimum of pods meanwhile
    any → SUCCEEDED       a pod says that the training is over, and no other one is heard to train on
    any → FAILED          a pod says it has failed, losses in a row leave less than the minimum, or the job is wrong
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from ef_common.core.cluster.contacts import contacts_of, seekers_of
from ef_common.core.cluster.losses import STEADY_S, leaves_too_few, note_losses, pause_s, what_was_lost
from ef_common.core.cluster.placement import without
from ef_common.core.cluster.policy import SharePolicy
from ef_common.core.cluster.shares import Share, shares
from ef_common.core.cluster.state import (
    FAILED,
    FINISHED,
    LEFT,
    Cause,
    Decision,
    Doom,
    Job,
    JobPhase,
    Node,
    Pod,
    Record,
    Refusal,
)
from ef_common.core.doubling import doubled_s

TRY_S = 15.0
"""How long a pod may be unschedulable before it is taken back."""
START_S = 300.0
"""A pod that does not start in this time on its node is told of: a large image may take as long."""
RETRY_S = 120.0
"""After a refusal, no more pods are tried in this time; after the next one in a row in twice that time, and so on."""
MOST_RETRY_S = 1800.0
"""Nor longer than this. Each try may take room from other jobs, in vain."""
END_S = 60.0
"""How long the other pods of a job that has failed may take to end by themselves, and other containers of any job."""
WORKS_S = 86400.0
"""How long a pod of a training that has succeeded may work on, as one that evaluates or exports what was trained. One
that hangs holds its room so long."""
GOES_ON_S = 60.0
"""A training that was heard to go on within this time is not over: a step of a large model may take long."""
LISTEN_S = 10.0
"""How long after the last report another pod may still be heard to train on: the one that made it may have ended."""
RELEASE_S = 30.0
"""How long after it has asked for fewer pods the training may take to let some go."""
LOST_S = 30.0
"""So long after a pod should have gone, nobody is expected to end it."""


def decide(
    jobs: Sequence[Job], nodes: Sequence[Node], now: float, *, policy: SharePolicy = SharePolicy.FAIR
) -> dict[str, Decision]:
    """What is to be done for each job.

    Args:
        jobs: All jobs, with their pods.
        nodes: The nodes on which pods may be started.
        now: Time of the day, in seconds. Clocks of controllers that differ only make waits longer or shorter.
        policy: How pods are divided among the jobs.
    """
    told = map(policy.told_of, jobs)
    read = [replace(job, record=_advance(job, now)) for job in told]
    open_jobs = [job for job in read if not job.record.is_over and not job.suspended]
    stay = {pod.uid: pod for job in read if job.record.is_over for pod in job.alive if _works_on(pod, job.record, now)}
    taking = [pod for job in read for pod in job.pods if pod.takes_room and pod.uid not in stay]
    limits = {job.key: _limit(job, now) for job in open_jobs}
    spares = {job.key: _spares(job, limits[job.key], now) for job in open_jobs}
    rest = without(nodes, stay.values())
    found = shares(open_jobs, rest, taking=taking, limits=limits, spares=spares, policy=policy)
    dealt = {share.job.key: share for share in found}
    return {job.key: _decision(job, dealt.get(job.key), now) for job in read}


def refused(job: Job, decision: Decision, num_created: int, *, now: float, why: str) -> Refusal:
    """What is known after the API server has refused to create a pod, or what the pods of the job need.

    Args:
        job: The job, as it was decided upon.
        decision: What was decided.
        num_created: How many pods were created before that.
        now: Time in seconds.
        why: In words.
    """
    alive = sum(pod.alive and pod.uid not in decision.record.leaving for pod in job.pods)
    return _next_refusal(decision.record, alive + num_created, now, why)


def _next_refusal(record: Record, limit: int, now: float, why: str) -> Refusal:
    """A refusal, after that on record. One while nothing more is tried is no new one: a pod was to replace another."""
    before = record.refusal
    tries = 1 if before is None else before.tries + (now >= before.until)
    return Refusal(limit, now + doubled_s(RETRY_S, tries - 1, most_s=MOST_RETRY_S), why, tries)


def rests_on_pods(before: Record, after: Record) -> bool:
    """Whether what is put on record would be wrong if the pods were not as they were known: some are to go.

    Args:
        before: What is on record.
        after: What is to be.
    """
    gives_up = after.cap is not None and after.cap != before.cap
    return bool(after.leaving - before.leaving) or gives_up


def agrees(job: Job, pods: Sequence[Pod]) -> bool:
    """Whether pods that were read after the record of a job are those with which it was decided upon.

    What a controller knows by watching may be older than the record that it has. A pod that has left, and is on record
    no more, would be taken for one that is there, and one that is there, or has found a node, would be missing.
    """
    known, read = ({(pod.uid, pod.node, pod.running) for pod in some if pod.alive} for some in (job.pods, pods))
    return known == read


# ------------------------------------------------------------ what has happened


def _advance(job: Job, now: float) -> Record:
    """The record, with what has happened since."""
    there = {pod.uid for pod in job.pods}
    record = note_losses(job, now)
    known = there | job.record.counted if record.cap is not None else there  # a loss must not lower the cap twice
    record = replace(record, leaving=record.leaving & there, counted=record.counted & known)
    if record.is_over:
        return record
    if job.problem:
        return _fail(record, now, Cause.INVALID, why=job.problem)
    if _finished(job) and not _goes_on(job, now):
        over = replace(record, phase=JobPhase.SUCCEEDED, ended_at=now)
        return replace(over, cause=Cause.COMPLETED, why="the training is over")
    if failed := [pod.name for pod in job.pods if pod.ended and pod.status == FAILED]:
        return _fail(record, now, Cause.TRAINING_FAILED, why=f"the training has failed, as {', '.join(failed)} says")
    if leaves_too_few(job, record):
        return _fail(record, now, Cause.TOO_MANY_CRASHES, why=what_was_lost(job, record))
    record = replace(_begin(job, record), refusal=_refusal(job, record, now))
    return _hear(job, record, now) if job.autoscales else replace(record, asked=0, asked_at=0.0)


def _fail(record: Record, now: float, cause: Cause, *, why: str) -> Record:
    return replace(record, phase=JobPhase.FAILED, ended_at=now, cause=cause, why=why)


def _begin(job: Job, record: Record) -> Record:
    """Whether the training runs."""
    there = [pod for pod in job.pods if not pod.ended]
    if job.suspended and not there:
        return replace(record, phase=JobPhase.SUSPENDED, crashes=0, cap=None)
    if record.phase is JobPhase.RUNNING and there:
        return record
    if sum(pod.running for pod in there) >= job.minimum:
        return replace(record, phase=JobPhase.RUNNING, starts=record.starts + 1)
    return replace(record, phase=JobPhase.PENDING)


def _finished(job: Job) -> list[Pod]:
    """Pods that say that the training is over, and have not only been let go: others have not trained on since."""
    pods = [pod for pod in job.pods if pod.ended and pod.status == FINISHED]
    heard = job.report
    if heard is None or not heard.moves_s or heard.by not in _others(job):
        return pods
    return [pod for pod in pods if not pod.ended_at or heard.moved_at <= pod.ended_at + GOES_ON_S]


def _others(job: Job) -> set[str]:
    """Addresses of the pods that still run; "" for those that have none yet."""
    return {pod.address for pod in job.alive if pod.running}


def _goes_on(job: Job, now: float) -> bool:
    """Whether a pod that still runs was heard to train on lately; or might have been, had anybody listened."""
    others, heard = _others(job), job.report
    if heard is not None and heard.by in others - {""}:
        return now < heard.moved_at + max(GOES_ON_S, 2 * heard.moves_s)
    last = job.heard_since if heard is None else max(heard.at, job.heard_since)
    return bool(others) and now < last + LISTEN_S  # the pod that has said it last may be the one that has ended


def _refusal(job: Job, record: Record, now: float) -> Refusal | None:
    """Whether the scheduler finds no node for pods of this job, by rules that the shares do not know.

    A refusal is forgotten once more pods have found a node than were there, and if none has followed for long.
    """
    alive, before = [pod for pod in job.alive if pod.uid not in record.leaving], record.refusal
    placed = sum(bool(pod.node) for pod in alive)
    if any(pod.unschedulable_since is not None and now - pod.unschedulable_since > TRY_S for pod in alive):
        return _next_refusal(record, placed, now, "the scheduler finds no node for more pods")
    if before is None or now < before.until:
        return before
    return before if placed <= before.limit and now < before.until + MOST_RETRY_S else None


def _hear(job: Job, record: Record, now: float) -> Record:
    """How many pods the training asks for."""
    if record.phase is not JobPhase.RUNNING:
        return replace(record, asked=0, asked_at=0.0)
    left = {pod.uid for pod in job.pods if _has_left(pod) and pod.uid not in record.counted | record.leaving}
    if left:  # until it is heard again, it is taken to have let them go
        fewer = max(job.minimum, len(job.alive) - job.spares)
        asked = min(record.asked, fewer) if record.asked else fewer
        return replace(record, counted=record.counted | left, asked=asked, asked_at=now)
    heard = job.report
    if heard is None or heard.asked == record.asked or heard.at <= record.asked_at:
        return record
    return replace(record, asked=heard.asked, asked_at=heard.at)


def _has_left(pod: Pod) -> bool:
    """Whether it has left by itself: the training has let it go, or its machine was about to be taken away."""
    return pod.ended and pod.gone_by is None and pod.status == LEFT


def _limit(job: Job, now: float) -> int:
    record, limits = job.record, [job.maximum, *_caps(job, now)]
    if job.autoscales:
        has = len(job.alive)
        is_new = now < record.asked_at + RELEASE_S
        limits.append(max(job.minimum, record.asked or has, has if is_new else 0))
    return min(limits)


def _caps(job: Job, now: float) -> list[int]:
    """Up to how many pods it may grow, spares included. It keeps those that are on nodes: nobody has refused these."""
    record, has = job.record, sum(bool(pod.node) for pod in job.alive)
    refusal = _refusal_at(record, now)
    not_refused = None if refusal is None else refusal.limit
    return [max(limit, has) for limit in (not_refused, record.cap) if limit is not None]


def _refusal_at(record: Record, now: float) -> Refusal | None:
    """The refusal for which no more pods are tried now; None if they are."""
    return record.refusal if record.refusal is not None and now < record.refusal.until else None


def _spares(job: Job, limit: int, now: float) -> int:
    """How many pods it may have beyond the limit. If the training takes more than that, they would be no spares."""
    takes = job.takes or job.maximum
    if job.autoscales:
        if not job.record.asked:
            return 0
        takes = max(job.minimum, min(takes, job.record.asked))
    most = min([takes + job.spares, *_caps(job, now)])
    return max(0, most - limit) if limit >= takes else 0


# ------------------------------------------------------------ what is done about it


def _decision(job: Job, share: Share | None, now: float) -> Decision:
    if share is None:
        return _end(job, now)
    kept = {pod.uid for pod in share.kept}
    go = [pod for pod in job.alive if pod.uid not in kept]
    size, why = len(job.alive), _reason(job, share, now)
    leaving, lost = job.record.leaving | {pod.uid for pod in go}, _lost(job, share, now)
    cause, words = _why(job, share, now, lost)
    record = replace(job.record, leaving=leaving, lost=lost, cause=cause, why=words)
    delete = [*_dooms(job, go, why=f"shrinks from {size} to {len(kept)} pods"), *_leftovers(job, now)]
    waits = bool(_finished(job)) or now < job.record.crashed_at + pause_s(job.record)
    create = _free_indexes(job, 0 if waits else share.new)
    return Decision(
        record,
        tuple(delete),
        create,
        wanted=share.size,
        spares=share.spares,
        why=why,
        contacts=contacts_of(job),
        tell=seekers_of(replace(job, record=record)),
    )


def _end(job: Job, now: float) -> Decision:
    """A job that is over, or suspended, has no pods; those of one that is over may first end by themselves.

    Of a job that is over, pods that have ended and need no room stay, so that their logs can be read.
    """
    record = job.record
    cause, why = (record.cause, record.why) if record.is_over else (Cause.NONE, "its user wants no pods")
    over_s = _over_s(record, now)
    patient = record.is_over and over_s < END_S
    go = [pod for pod in job.alive if not _may_work_on(pod, record, now)]
    new = replace(record, leaving=record.leaving | {pod.uid for pod in go}, cause=cause, why=why)
    others = [doom for doom in _leftovers(job, now) if _is_in_the_way(doom, patient) or not record.is_over]
    works = any(pod.running for pod in job.alive)
    remove = record.is_over and job.ttl_s is not None and over_s >= job.ttl_s and not works
    return Decision(new, (*_dooms(job, go, why=why), *others), why=why, remove=remove)


def _over_s(record: Record, now: float) -> float:
    """How long ago a job has ended."""
    return now - (record.ended_at or 0.0)


def _may_work_on(pod: Pod, record: Record, now: float) -> bool:
    """Whether a pod may still run after the end of its job. One that looks for the job has never trained."""
    if not record.is_over or not pod.running:
        return False
    return _over_s(record, now) < (WORKS_S if record.phase is JobPhase.SUCCEEDED and not pod.seeks else END_S)


def _works_on(pod: Pod, record: Record, now: float) -> bool:
    """Whether a pod of a job that is over may stay for long. Nobody is promised its room, as with pods of others."""
    return _over_s(record, now) >= END_S and _may_work_on(pod, record, now)


def _is_in_the_way(doom: Doom, patient: bool) -> bool:
    return doom.force or (doom.pod.lingers and not patient)


def _dooms(job: Job, go: Sequence[Pod], *, why: str) -> list[Doom]:
    """These pods, and those on record that nobody has deleted yet."""
    again = [pod for pod in job.pods if pod.alive and pod.uid in job.record.leaving]
    return [Doom(pod, why) for pod in (*go, *again)]


def _leftovers(job: Job, now: float) -> list[Doom]:
    """Pods that have ended, and are in the way of new ones; and those that nobody ends.

    One that says that the training is over stays until it is known whether that is so.
    """
    stay = set() if job.record.is_over else {pod.uid for pod in _finished(job)}
    others = [pod for pod in job.pods if pod.uid not in stay]
    ended = [Doom(pod, f"{pod.name} has ended") for pod in others if pod.ended and pod.gone_by is None]
    stuck = [pod for pod in job.pods if pod.gone_by is not None and now > pod.gone_by + LOST_S]
    return [*ended, *(Doom(pod, f"the node of {pod.name} does not answer", force=True) for pod in stuck)]


def _free_indexes(job: Job, number: int) -> tuple[int, ...]:
    """So many numbers that no pod has. A job may allow billions of pods, so nothing is made of all of them."""
    taken = {pod.index for pod in job.pods}
    free = (index for index in range(job.maximum + job.spares) if index not in taken)
    return tuple(islice(free, number))


def _lost(job: Job, share: Share, now: float) -> str:
    """What has become of the pod that was lost last; "" once as many pods run as the job shall have."""
    is_made_up_for = sum(pod.running for pod in share.kept) == share.size > 0 and now > job.record.crashed_at
    return "" if is_made_up_for and job.record.cap is None else job.record.lost


def _why(job: Job, share: Share, now: float, lost: str = "") -> tuple[Cause, str]:
    """Why a job that is not over is in its phase, in one word and in a sentence."""
    record, refusal = job.record, _refusal_at(job.record, now)
    if share.waits and refusal is not None and refusal.limit < job.minimum:
        return Cause.REFUSED, refusal.why
    if share.waits and (record.cap is None or record.cap >= job.minimum):
        return Cause.NO_ROOM, f"there is no room for {job.minimum} pods, the minimum"
    first = min((pod for pod in share.kept if pod.problem), key=lambda pod: pod.index, default=None)
    if first is not None:
        return Cause.CANNOT_START, f"{first.name} cannot start: {first.problem}"
    late = next((pod for pod in share.kept if pod.waits and now > pod.waits_since + START_S), None)
    if late is not None:
        hint = f"kubectl describe pod {late.name} shows what it waits for"
        return Cause.CANNOT_START, f"{late.name} has not started in {START_S / 60:.0f} minutes ({late.waits}): {hint}"
    if record.cap is not None:
        return Cause.NOT_REPLACED, f"{what_was_lost(job, record)}; no pods replace them for {STEADY_S / 60:.0f} minutes"
    return (Cause.POD_LOST if lost else Cause.NONE), lost


def _reason(job: Job, share: Share, now: float) -> str:
    size = len(job.alive)
    if share.waits:
        return _why(job, share, now)[1]
    if share.size == size:
        return f"{size} pods, as it shall be"
    how = "grows" if share.size > size else "shrinks"
    later = f", {share.later} of them when there is room" if share.later else ""
    asks = ", for which the training asks" if job.autoscales and job.record.asked == share.size else ""
    return f"{how} from {size} to {share.size} pods{asks}{later}"
