"""Schedules: a job and its faults as data, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from ef_common.protocol.auth import Token
from ef_common.testing.simulation.claim_store import ONE

PLACES = (
    "forward",
    "bucket0",
    "bucket1",
    "reduced",
    "boundary",
    "next_view",
    "build",
    "exchange",
    "send_state",
    "receive_state",
    "send_result",
    "receive_result",
    "warm_up",
    "join",
    "metrics",
    "evaluate",
    "save",
    "closing",
)
"""Where a fault may strike; a worker passes them by `mark`."""
USERS_PLACES = ("warm_up", "forward", "make_up", "reduced", "boundary", "metrics", "evaluate", "save")
"""Where the user's code runs."""

_IN_A_STEP = ("forward", "forward", "bucket0", "bucket1", "reduced", "metrics", "boundary", "evaluate")
_CLEAN = 0.1
"""So many schedules of a lost coordinator have an exact halving, and nothing else."""
_REJECTS = 0.3
"""So many have firewalls that refuse and reset connections where the network is cut."""
_TIES = 0.03
"""So many of these have a cut between two halves, whose coordinator has taken over from another one."""
_AWAY_S = (0.01, 0.2, 0.7, 1.5, 3.0, 6.0)
"""A node is back at its address after one of these times."""
_UPDATE_S = 0.2
"""About what an update takes beside the steps."""
_RECOVERY = ("next_view", "build", "exchange", "send_result", "receive_result", "send_state", "receive_state")


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, and the settings of the membership.

    Args:
        num_workers: Workers that start together.
        length: Positions in an epoch.
        batch_size: Positions per worker and window.
        epochs: Number of epochs.
        accumulate: Windows per gradient reduction.
        global_batch: Positions of a window, if they do not depend on the number of workers; else 0.
        piece: Positions of a piece of it.
        num_validation: Samples of an evaluation.
        overlap: Begin to reduce before the backward pass has ended.
        num_buckets: Buckets of gradients in a reduction.
        num_values: Buckets before them, for values that all take from rank 0.
        accumulates_twice: In some workers a gradient is added to after it was ready, in a backward pass that overlaps.
        lends: The buckets of a reduction are changed once all have the result; else two sets of them alternate.
        metrics_every: Windows between two extra collectives; 0 for none.
        step_s: Typical time of a forward and backward.
        min_nodes: As in the settings of the membership; every worker is a node here.
        max_nodes: Likewise.
        last_call_s: Likewise.
        heartbeat_timeout_s: A worker that is silent for so long is evicted.
        standbys: Each node keeps a coordinator ready.
        hang_timeout_s: A worker that keeps the others waiting for so long in a step is evicted; 0: nobody looks.
        store: Of claims: "" for none, "one" for all, or one "apart" for each worker.
        trainings: Each epoch is a training of its own; the program does something else before it.
        shards: Samples of each shard, if the data are a stream of shards; `length` of them together.
        num_lanes: Lanes that suit each worker: this number or fewer, another one in each worker.
        knows_lengths: The lengths of some shards are known before they are read.
        gathering_s: As in the settings of the membership.
        reloads: After some steps, all workers go on from the place in the stream that a checkpoint holds, with other
            numbers of lanes.
    """

    num_workers: int
    length: int
    batch_size: int
    epochs: int
    accumulate: int = 1
    global_batch: int = 0
    piece: int = 1
    num_validation: int = 0
    overlap: bool = False
    num_buckets: int = 2
    num_values: int = 0
    accumulates_twice: bool = False
    lends: bool = False
    metrics_every: int = 0
    step_s: float = 0.05
    min_nodes: int = 1
    max_nodes: int = 1_000_000
    last_call_s: float = 0.5
    heartbeat_timeout_s: float = 2.0
    standbys: bool = False
    hang_timeout_s: float = 0.0
    store: str = ""
    trainings: bool = False
    shards: tuple[int, ...] = ()
    num_lanes: int = 1
    knows_lengths: bool = False
    reloads: bool = False
    gathering_s: float = 0.0

    def store_of(self, worker: str) -> str:
        """What a worker reads in its store; "" if it has none."""
        if self.store == "one":
            return ONE
        return worker.encode().hex().ljust(32, "0") if self.store else ""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to the job.

    It strikes at a time (`at`), or when some worker passes `place` for the `nth` time, counted over all.

    Args:
        kind: "crash", "freeze", "slow" (its messages), "break" (its group, with everyone alive), "leave", "hang" (its
            main thread, where it passes the place), "raise" (the user's code raises an exception, at the next of
            `USERS_PLACES`), "drain" (it is told to go, wherever it is), "straggler" (it is found to be slow), "want"
            (whoever takes itself for rank 0 wants `count` nodes), "arrive" (new workers), "coordinator" (the leading
            one dies, with `count` above 1 after so many messages less one), "node" (and the worker of its node),
            "retire" (the leading one hands over and ends), "cut" (of the network, for `duration_s`: around some nodes,
            or with the victim "coordinator" around the leading one), "halve" (a cut through the members of the view,
            often in the middle, and maybe between some of them and the store), "suspend" (the node of the leading
            coordinator, or of "any" one: all that is on it stands still for `duration_s`), "stall" (it reads nothing of
            what it is sent for `duration_s`), "vanish" (its host is no more, and no connection ends), "reset" (one of
            its connections to a coordinator breaks), "return" (nodes at endpoints whose coordinators are dead come
            back), "stranger" (the `victim`, one of `STRANGERS`, connects to the
            leading coordinator).
        victim: "self" (who passes the place), "another" or "any" member, "first" (rank 0), "both" (self and another),
            "all" members, "others" (all but self), "waiting" (somebody who is not a member), "everybody" (members
            or not), or a worker's name.
        at: Virtual time in seconds.
        place: One of `PLACES`.
        nth: Which passage.
        delay_s: From the passage to the strike.
        duration_s: Until a frozen worker thaws, a hung one goes on, or messages are fast again; within which all
            victims are told to go.
        count: How many workers arrive; how many nodes are wanted, 0 for as many as come.
        direction: Of a cut: what is lost goes "in", "out", or both ways ("").
        rejects: Of a cut: a firewall makes it, which refuses and resets connections in place of those behind it.
    """

    kind: str
    victim: str = ""
    at: float | None = None
    place: str = ""
    nth: int = 0
    delay_s: float = 0.0
    duration_s: float = 0.0
    count: int = 1
    direction: str = ""
    rejects: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """A job and its faults.

    Args:
        seed: What it was drawn from.
        job: The job.
        faults: What happens to it.
        tokens: What the nodes know of the job token, one after the other, and again; () for none. In a rotation, some
            know other lines than others.
        buffer_bytes: What a system takes of what a worker does not read, and a third of what a coordinator keeps of
            it; 0: without limits.
        num_endpoints: The addresses of the first so many nodes are the endpoints at which the job is found; 0: there is
            no list, and nobody comes back.
    """

    seed: int
    job: Job
    faults: tuple[Fault, ...]
    tokens: tuple[str, ...] = ()
    buffer_bytes: int = 0
    num_endpoints: int = 0

    def token_of(self, node: int) -> Token | None:
        """What this node knows of the job token."""
        return Token(self.tokens[node % len(self.tokens)]) if self.tokens else None


def schedule_of(seed: int) -> Schedule:
    """Draw the schedule of a seed: the same on every machine."""
    draw = random.Random(f"elasticflow/schedule/{seed}")
    job = _job(draw)
    themes = draw.choices(list(_THEMES), k=draw.choice((0, 1, 1, 2, 2, 3)))
    faults = [fault for theme in themes for fault in theme(draw, job)]
    return Schedule(seed, job, tuple(faults))


def failover_of(seed: int) -> Schedule:
    """Draw the schedule of a seed for a job whose nodes keep coordinators ready, and whose coordinators are lost."""
    draw = random.Random(f"elasticflow/failover/{seed}")
    job = replace(_job(draw), num_workers=draw.choice((1, 2, 2, 3, 3, 3, 4, 5)), min_nodes=1, standbys=True)
    job = replace(job, store=draw.choice(("", "one", "one", "apart")))
    job = replace(job, length=2 * job.length, step_s=draw.choice((0.02, 0.05)), max_nodes=1_000_000)
    if draw.random() < _CLEAN:
        job = replace(job, num_workers=draw.choice((2, 2, 3, 4, 5)), store="one")
        return Schedule(seed, job, (Fault("halve", at=_sometime(draw), duration_s=1000.0),))
    themes = draw.choices(_FAILOVERS, k=draw.choice((1, 1, 1, 2, 2)))
    themes += draw.choices(
        (
            _crash_anywhere,
            _crash_at_place,
            _lost_while_completing,
            _loss_in_recovery,
            _join,
            _leave,
            _boundary_interrupted,
            _slow,
            _broken_group,
            _silence,
        ),
        k=draw.choice((0, 0, 1, 1, 2)),
    )
    faults = [fault for theme in themes for fault in theme(draw, job)]
    walls = draw.random()
    if walls < _REJECTS:
        faults = [replace(fault, rejects=fault.kind in ("cut", "halve")) for fault in faults]
    if walls < _TIES:
        job = replace(job, num_workers=draw.choice((2, 4, 4)), store="", length=200 * job.batch_size, step_s=0.05)
        faults = _halved_after_a_takeover(draw)
    return Schedule(seed, job, tuple(faults))


def handovers_of(seed: int) -> Schedule:
    """Draw the schedule of a seed for a job whose nodes keep coordinators ready, and whose leading ones hand over."""
    draw = random.Random(f"elasticflow/handovers/{seed}")
    schedule = failover_of(seed)
    faults = [
        replace(fault, kind="retire", count=1)
        if fault.kind in ("coordinator", "node") and draw.random() < 0.5
        else fault
        for fault in schedule.faults
    ]
    when = _sometime(draw)
    faults += [Fault("retire", at=when + 0.3 * index * draw.random()) for index in range(draw.choice((1, 1, 2, 3)))]
    if draw.random() < 0.5:  # with the worker of its node, or others that go at that moment
        faults.append(Fault("leave", "any", at=when - 0.05 * draw.random()))
    if draw.random() < 0.3:
        faults.append(Fault("arrive", at=when + 0.1 * draw.uniform(-1, 1), count=draw.choice((1, 2))))
    return replace(schedule, faults=tuple(faults))


def founding_of(seed: int) -> Schedule:
    """Draw the schedule of a seed for a job whose network or coordinator fails about when its first view comes."""
    draw = random.Random(f"elasticflow/founding/{seed}")
    job = failover_of(seed).job
    job = replace(job, num_workers=draw.choice((1, 2, 2, 3, 4, 5)), length=max(job.length, 40 * job.batch_size))
    faults = []
    for _ in range(draw.choice((1, 2, 2, 3))):
        harm = _harm_of_founding(draw, job.last_call_s + 0.2)
        faults += harm
        if draw.random() < 0.7:  # somebody arrives at that moment
            at = (harm[0].at or 0.0) - 0.03 * draw.random()
            faults.append(Fault("arrive", at=max(0.0, round(at, 4))))
    for theme in draw.choices(
        (_crash_anywhere, _join, _leave, _exception, _coordinator_lost), k=draw.choice((0, 1, 2))
    ):
        faults += theme(draw, job)
    return Schedule(seed, job, tuple(faults))


def _harm_of_founding(draw: random.Random, typical_s: float) -> list[Fault]:
    """Workers that have said who they are may not hear the answer, and say it again, here or elsewhere."""
    at, duration_s = round(draw.random() ** 2 * 1.5 * typical_s, 3), draw.choice((0.3, 0.8, 1.1, 1.5, 3.0, 6.0))
    kind = draw.choice(("suspend", "cut", "cut", "halve", "coordinator", "retire", "reset", "freeze"))
    match kind:
        case "suspend":
            return [Fault(kind, draw.choice(("", "any")), at=at, duration_s=duration_s)]
        case "cut":
            victim, direction = draw.choice(("", "coordinator", "coordinator")), draw.choice(("", "in", "out", "out"))
            return [Fault(kind, victim, at=at, duration_s=duration_s, direction=direction, rejects=draw.random() < 0.2)]
        case "halve":
            return [Fault(kind, at=at, duration_s=duration_s)]
        case "coordinator":
            return [Fault(kind, at=at, count=draw.choice((1, 1, 2, 3, 4)))]
        case "retire":
            return [Fault(kind, at=at, count=1)]
        case "reset":
            return [Fault(kind, "any", at=at) for _ in range(draw.choice((1, 2, 3)))]
    return [Fault(kind, "any", at=at, duration_s=duration_s)]


def endpoints_of(seed: int) -> Schedule:
    """Draw the schedule of a seed for a job with a list of endpoints, where lost nodes come back at their addresses."""
    draw = random.Random(f"elasticflow/endpoints/{seed}")
    schedule = draw.choice((failover_of, handovers_of, founding_of))(seed)
    job, faults = schedule.job, list(schedule.faults)
    if draw.random() < 0.5:  # only what follows
        job, faults = replace(job, num_workers=draw.choice((3, 3, 4, 5))), []
    num_updates = draw.choice((3.0, 15.0)) / (_UPDATE_S + job.step_s) / job.epochs
    most = round(num_updates * job.accumulate * job.batch_size * job.num_workers)
    job = replace(job, length=max(min(job.length, most), most // 2))
    for fault in list(faults):
        if fault.kind in ("coordinator", "node", "retire") and draw.random() < 0.8:
            faults.append(Fault("return", at=round((fault.at or _sometime(draw)) + draw.choice(_AWAY_S), 4)))
    when = job.last_call_s + 2.0 * draw.random()
    for _ in range(draw.choice((0, 1, 2, 3, 4))):  # one after the other
        faults.append(Fault(draw.choice(("node", "node", "retire", "coordinator")), at=round(when, 4)))
        when += draw.choice(_AWAY_S)
        faults.append(Fault("return", at=round(when, 4)))
        when += draw.choice((0.1, 1.0, 3.0, 6.0)) * draw.random()
    return replace(schedule, job=job, faults=tuple(faults), num_endpoints=draw.choice((1, 2, 2, 3, 3, 5)))


def trainings_of(seed: int) -> Schedule:
    """Draw the schedule of a seed for a program of several trainings, which newcomers come into."""
    draw = random.Random(f"elasticflow/trainings/{seed}")
    standbys = draw.random() < 0.3
    job = replace(_job(draw), epochs=draw.choice((2, 3, 4)), trainings=True, standbys=standbys)
    if standbys:
        job = replace(job, min_nodes=1, max_nodes=1_000_000)
    job = replace(job, length=draw.choice((3, 7, 17, 29)), step_s=draw.choice((0.005, 0.02, 0.05)))
    themes = [
        _join,
        *draw.choices((_crash_anywhere, _crash_at_place, _join, _leave, _slow), k=draw.choice((0, 1, 1, 2))),
    ]
    if standbys:
        themes.append(draw.choice((_coordinator_lost, _coordinator_lost_at_place)))
    faults = [fault for theme in themes for fault in theme(draw, job)]
    return Schedule(seed, job, tuple(faults))


def hang_of(seed: int) -> Schedule:
    """Draw the schedule of a seed for a job in which workers hang, or are slow without hanging."""
    draw = random.Random(f"elasticflow/hang/{seed}")
    job = replace(_job(draw), num_workers=draw.choice((2, 2, 3, 3, 4, 5)), min_nodes=1, max_nodes=1_000_000)
    job = replace(job, step_s=draw.choice((0.005, 0.02)), hang_timeout_s=3.0, standbys=draw.random() < 0.3)
    job = replace(job, length=4 * job.length)
    faults = []
    for _ in range(draw.choice((1, 1, 1, 2))):
        duration_s = draw.choice((1.0, 2.0, 1000.0, 1000.0))
        nth = draw.randint(1, 12 * job.num_workers)
        faults.append(Fault("hang", "self", place=draw.choice(_IN_A_STEP), nth=nth, duration_s=duration_s))
    themes = [_crash_anywhere, _crash_at_place, _join, _leave, _slow, _broken_group]
    if job.standbys:
        themes += [_coordinator_lost]
    if draw.random() < 0.4:
        job = replace(job, max_nodes=job.num_workers)
        faults += [*_arrivals(draw), Fault("straggler", "any", at=_sometime(draw))]
    for theme in draw.choices(themes, k=draw.choice((0, 0, 1, 1, 2))):
        faults += theme(draw, job)
    return Schedule(seed, job, tuple(faults))


def sizes_of(seed: int) -> Schedule:
    """Draw the schedule of a seed for a job whose members want now fewer nodes, now more."""
    draw = random.Random(f"elasticflow/sizes/{seed}")
    standbys = draw.random() < 0.6
    num_workers = draw.choice((1, 2, 3, 3, 4, 4, 5, 6))
    job = replace(_job(draw), num_workers=num_workers, epochs=draw.choice((1, 1, 1, 2)), standbys=standbys)
    job = replace(job, length=draw.choice((10, 25, 50)) * job.batch_size * max(3, num_workers), step_s=0.05)
    job = replace(job, min_nodes=1 if standbys else draw.choice((1, 1, 2, 3)), store=_store(draw) if standbys else "")
    job = replace(job, max_nodes=draw.choice((1_000_000, 1_000_000, max(3, num_workers), max(3, num_workers - 1))))
    faults = [_want(draw, _sometime(draw)) for _ in range(draw.choice((1, 1, 2, 3, 4)))]
    if draw.random() < 0.8:
        faults += _arrivals(draw)
    themes = [_join_storm, _leave, _drain, _slow, _crash_anywhere, _crash_at_place, _want_and_loss, _want_and_loss]
    themes += [_straggler, _straggler]
    if standbys:
        themes += [_coordinator_lost, _coordinator_lost_at_place, _want_and_coordinator_lost] * 2
        themes += [_retire, _cut_network, _halve, _suspend]
    for theme in draw.choices(themes, k=draw.choice((0, 1, 1, 2, 2, 3))):
        faults += theme(draw, job)
    return Schedule(seed, job, tuple(faults))


def streams_of(seed: int) -> Schedule:
    """Draw the schedule of a seed for a job that trains on a stream of shards."""
    draw = random.Random(f"elasticflow/streams/{seed}")
    standbys = draw.random() < 0.2
    job = replace(_job(draw), global_batch=0, standbys=standbys)
    if standbys:
        job = replace(job, min_nodes=1, max_nodes=1_000_000)
    mean, spread = draw.choice((1, 3, 8, 30)), draw.choice((0, 1, 2))
    num_shards = min(draw.choice((1, 2, 5, 9, 20)), 120 // mean)
    shards = tuple(draw.randint(max(0, mean - spread * mean // 2), mean + spread * mean) for _ in range(num_shards))
    job = replace(job, shards=shards, length=sum(shards), num_lanes=draw.choice((1, 1, 2, 3)))
    job = replace(job, knows_lengths=draw.random() < 0.4, batch_size=draw.choice((1, 2, 3, 4, 8)))
    themes = [_crash_anywhere, _crash_at_place, _lost_while_completing, _loss_in_recovery, _join, _join_storm, _leave]
    themes += [_drain, _boundary_interrupted, _slow, _broken_group, _silence]
    if standbys:
        themes += [_coordinator_lost, _coordinator_lost_at_place]
    faults = [fault for theme in draw.choices(themes, k=draw.choice((1, 1, 2, 2, 3))) for fault in theme(draw, job)]
    job = replace(job, reloads=draw.random() < 0.4)
    return Schedule(seed, job, tuple(faults))


def _store(draw: random.Random) -> str:
    return draw.choice(("", "one", "one", "apart"))


def _want(draw: random.Random, when: float) -> Fault:
    return Fault("want", at=when, count=draw.choice((0, 1, 1, 2, 2, 3, 3, 4, 6)))


def _want_and_loss(draw: random.Random, job: Job) -> list[Fault]:
    """Rank 0 is lost just after it has told what it wants, or others are while some are asked to leave."""
    when = _sometime(draw)
    kind, victim = draw.choice(("crash", "crash", "freeze", "leave", "slow")), draw.choice(("first", "first", "any"))
    strike = Fault(kind, victim, at=when + draw.random() * 0.5, duration_s=draw.choice((0.5, 1.0, 4.0)))
    again = [_want(draw, when + draw.random() * 0.3)] if draw.random() < 0.3 else []
    return [Fault("want", at=when, count=draw.choice((1, 1, 2, 3))), strike, *again]


def _want_and_coordinator_lost(draw: random.Random, job: Job) -> list[Fault]:
    """The coordinator dies while it hears what is wanted, or tells whom it asks to leave; or rank 0 dies with it."""
    when, kind = _sometime(draw), draw.choice(("coordinator", "coordinator", "node"))
    strike = Fault(kind, at=when + draw.random() * 0.05, count=draw.choice((1, 1, 2, 3, 4)))
    also = draw.choice((None, None, Fault("crash", "first", at=when + draw.random() * 1.5), _want(draw, when + 0.02)))
    return [_want(draw, when), strike, *([] if also is None else [also])]


def _straggler(draw: random.Random, job: Job) -> list[Fault]:
    return [Fault("straggler", "any", at=_sometime(draw)), *_arrivals(draw)]


def _retire(draw: random.Random, job: Job) -> list[Fault]:
    return [Fault("retire", at=_sometime(draw))]


def many_of(num_workers: int, seed: int) -> Schedule:
    """Draw the schedule of a seed for a job of many workers, of which some are lost, leave and come at once."""
    draw = random.Random(f"elasticflow/many/{num_workers}/{seed}")
    standbys = draw.random() < 0.7
    job = replace(_job(draw), num_workers=num_workers, min_nodes=1, max_nodes=1_000_000, standbys=standbys, epochs=1)
    job = replace(job, store=draw.choice(("", "one")) if standbys else "", step_s=0.05, global_batch=0)
    job = replace(job, length=draw.choice((3, 6)) * num_workers * job.batch_size * job.accumulate)
    themes = [_crash_anywhere, _crash_at_place, _loss_in_recovery, _join_storm, _drain, _slow, _silence]
    faults = [fault for theme in draw.choices(themes, k=draw.choice((1, 2, 3))) for fault in theme(draw, job)]
    if standbys:
        faults += draw.choice((_coordinator_lost, _coordinator_lost_at_place, _halve, _suspend))(draw, job)
    return Schedule(seed, job, tuple(faults))


def _coordinator_lost(draw: random.Random, job: Job) -> list[Fault]:
    kind = draw.choice(("coordinator", "coordinator", "node"))
    count = draw.choice((1, 1, 2, 3, 4, 6))
    return [Fault(kind, at=_sometime(draw), count=count) for _ in range(draw.choice((1, 1, 2)))]


def _coordinator_lost_at_place(draw: random.Random, job: Job) -> list[Fault]:
    """Also while a newcomer is admitted, or a loss is being recovered."""
    kind = draw.choice(("coordinator", "coordinator", "node"))
    place, nth = draw.choice(PLACES), draw.randint(1, 4 * job.num_workers)
    strike = Fault(kind, place=place, nth=nth, delay_s=draw.random() * 0.02, count=draw.choice((1, 1, 2, 3, 4)))
    return [strike, *draw.choice((_arrivals, _leave_now, lambda draw: _crash_anywhere(draw, job)))(draw)]


def _cut_network(draw: random.Random, job: Job) -> list[Fault]:
    faults = []
    for _ in range(draw.choice((1, 1, 2))):
        victim = draw.choice(("", "", "coordinator"))
        direction = draw.choice(("", "", "in", "out"))
        duration_s = draw.choice((0.5, 2.5, 4.0, 12.0))
        faults.append(Fault("cut", victim, at=_sometime(draw), duration_s=duration_s, direction=direction))
    return faults


def _cut_at_place(draw: random.Random, job: Job) -> list[Fault]:
    place, nth = draw.choice(_RECOVERY), draw.randint(1, 3 * job.num_workers)
    strike = Fault("cut", place=place, nth=nth, delay_s=draw.random() * 0.02, duration_s=draw.choice((2.5, 5.0, 12.0)))
    return [*draw.choice((_coordinator_lost, _crash_anywhere))(draw, job), strike]


def _leave_and_cut(draw: random.Random, job: Job) -> list[Fault]:
    """Who is let go does not hear of it."""
    when = _sometime(draw)
    leavers = [Fault("leave", "any", at=when + 0.05 * draw.random()) for _ in range(draw.choice((1, 1, 2, 3)))]
    place, nth = draw.choice(("boundary", "next_view", "next_view")), draw.randint(job.num_workers, 2 * job.num_workers)
    duration_s, delay_s = draw.choice((5.0, 12.0, 1000.0)), draw.random() * 0.01
    kind = draw.choice(("cut", "halve"))
    strike = Fault(
        kind, place=place, nth=nth, delay_s=delay_s, duration_s=duration_s, direction=draw.choice(("", "out"))
    )
    return [*leavers, strike]


def _halve(draw: random.Random, job: Job) -> list[Fault]:
    direction, duration_s = draw.choice(("", "", "in", "out")), draw.choice((4.0, 12.0, 1000.0))
    return [Fault("halve", at=_sometime(draw), duration_s=duration_s, direction=direction)]


def _halved_after_a_takeover(draw: random.Random) -> list[Fault]:
    """The issuer of the view has ended, as all know, and each half has a coordinator."""
    begin = _sometime(draw)
    at, duration_s = begin + draw.choice((0.01, 0.5, 1.0)), draw.choice((12.0, 1000.0))
    return [Fault("coordinator", at=begin), Fault("halve", at=at, duration_s=duration_s, rejects=True)]


def _halve_and_lose(draw: random.Random, job: Job) -> list[Fault]:
    """A coordinator or a worker is lost, or stopped, while claims are under way."""
    duration_s = draw.choice((6.0, 12.0, 1000.0))
    begin = _sometime(draw)
    at = begin + draw.random() * 8.0
    harm = draw.choice(
        (
            Fault("coordinator", at=at, count=draw.choice((1, 2, 3))),
            Fault("node", at=at),
            Fault("crash", "any", at=at),
            Fault("freeze", "any", at=at, duration_s=draw.choice((1.0, 4.0))),
            Fault("suspend", at=at, duration_s=draw.choice((1.0, 4.0, 12.0))),
        )
    )
    return [Fault("halve", at=begin, duration_s=duration_s), harm]


def _suspend(draw: random.Random, job: Job) -> list[Fault]:
    """To a node that is suspended, all other clocks have jumped when it goes on."""
    faults = [
        Fault("suspend", draw.choice(("", "any")), at=_sometime(draw), duration_s=draw.choice((1.0, 2.6, 4.0, 12.0)))
        for _ in range(draw.choice((1, 1, 2)))
    ]
    return [*faults, *draw.choice((lambda draw: [], _arrivals, lambda draw: _crash_anywhere(draw, job)))(draw)]


def _job(draw: random.Random) -> Job:
    num_workers = draw.choice((1, 2, 2, 3, 3, 3, 4, 4, 5))
    spares = draw.random() < 0.1
    global_batch = draw.choice((0, 0, 0, draw.randint(2, 12)))
    job = Job(
        num_workers=num_workers,
        length=draw.choice((1, 2, 3, 5, 7, 11, 17, 23, 29, 37, 53)),
        batch_size=draw.randint(1, 4),
        epochs=draw.choice((1, 1, 2, 2, 3)),
        accumulate=draw.choice((1, 1, 1, 2, 3)) if not global_batch else 1,
        global_batch=global_batch,
        piece=draw.choice((1, 1, 2, 3)),
        num_validation=draw.choice((0, 0, 1, 5, 8)),
        overlap=draw.random() < 0.5,
        lends=draw.random() < 0.5,
        metrics_every=draw.choice((0, 0, 1, 2, 3)),
        step_s=draw.choice((0.005, 0.05, 0.2)),
        min_nodes=draw.choice((1, 1, 1, 2, 3)),
        max_nodes=max(3, num_workers - draw.randint(0, 2)) if spares else 1_000_000,
        last_call_s=draw.choice((0.1, 0.5)),
    )
    draw = random.Random(repr(job))  # apart from all else of the schedule
    num_buckets, num_values = draw.choice((1, 2, 2, 3, 4)), draw.choice((0, 0, 1))
    return replace(job, num_buckets=num_buckets, num_values=num_values, accumulates_twice=draw.random() < 0.3)


def _sometime(draw: random.Random) -> float:
    return round(0.3 + draw.random() * draw.choice((0.5, 2.0)), 3)


def _crash_anywhere(draw: random.Random, job: Job) -> list[Fault]:
    return [Fault("crash", "any", at=_sometime(draw)) for _ in range(draw.randint(1, 2))]


def _crash_at_place(draw: random.Random, job: Job) -> list[Fault]:
    victim = draw.choice(("self", "another", "both"))
    delay = draw.choice((0.0, 0.001, 0.005))
    return [Fault("crash", victim, place=draw.choice(PLACES), nth=draw.randint(1, 12), delay_s=delay)]


def _lost_while_completing(draw: random.Random, job: Job) -> list[Fault]:
    """When some have the result and others don't."""
    place = draw.choice(("bucket1", "reduced", "metrics", "forward"))
    nth = draw.randint(1, 5 * job.num_workers)
    victim = draw.choice(("self", "another", "another"))
    return [Fault("crash", victim, place=place, nth=nth, delay_s=draw.random() * 0.003)]


def _two_losses_in_one_collective(draw: random.Random, job: Job) -> list[Fault]:
    """One in the collective, one in the recovery from it."""
    first = Fault(
        "crash",
        draw.choice(("self", "another")),
        place=draw.choice(("bucket0", "bucket1", "reduced")),
        nth=draw.randint(1, 12),
        delay_s=draw.choice((0.0, 0.001, 0.003)),
    )
    place = draw.choice(_RECOVERY[:5])
    nth = job.num_workers + draw.randint(0, 2) if place in _RECOVERY[:3] else 1
    second = Fault("crash", draw.choice(("self", "another")), place=place, nth=nth, delay_s=0.001)
    return [first, second, *_arrivals(draw)]


def _loss_in_recovery(draw: random.Random, job: Job) -> list[Fault]:
    place = draw.choice(_RECOVERY)
    kind = draw.choice(("crash", "crash", "freeze", "break"))
    strike = Fault(
        kind,
        draw.choice(("self", "another")),
        place=place,
        nth=draw.randint(1, 8),
        duration_s=draw.choice((1, 4)),
    )
    return [*_crash_anywhere(draw, job), strike, *_arrivals(draw)]


def _arrivals(draw: random.Random) -> list[Fault]:
    return [Fault("arrive", at=_sometime(draw), count=draw.choice((1, 1, 1, 2))) for _ in range(draw.randint(1, 2))]


def _join(draw: random.Random, job: Job) -> list[Fault]:
    return _arrivals(draw)


def _join_storm(draw: random.Random, job: Job) -> list[Fault]:
    return [Fault("arrive", at=_sometime(draw), count=draw.randint(2, 5))]


def _joiner_lost(draw: random.Random, job: Job) -> list[Fault]:
    place = draw.choice(("warm_up", "join", "receive_state", "receive_state", "send_state"))
    kind = draw.choice(("crash", "crash", "freeze"))
    strike = Fault(
        kind,
        draw.choice(("self", "self", "both", "another")),
        place=place,
        nth=draw.randint(1, 2),
        delay_s=draw.choice((0.0, 0.01, 0.05)),
        duration_s=draw.choice((1, 4)),
    )
    return [*_arrivals(draw), strike]


def _boundary_interrupted(draw: random.Random, job: Job) -> list[Fault]:
    """A change is agreed; a member is lost in it, or just after it while others are still in it."""
    place = draw.choice(("next_view", "exchange", "build", "forward"))
    nth = job.num_workers + draw.randint(1, job.num_workers + 2)
    strike = Fault("crash", draw.choice(("self", "another")), place=place, nth=nth, delay_s=draw.random() * 0.02)
    change = draw.choice((_arrivals, _leave_now))
    return [*change(draw), strike]


def _leave_now(draw: random.Random) -> list[Fault]:
    return [Fault("leave", "any", at=_sometime(draw)) for _ in range(draw.randint(1, 2))]


def _leave(draw: random.Random, job: Job) -> list[Fault]:
    return _leave_now(draw)


def _drain(draw: random.Random, job: Job) -> list[Fault]:
    """One after the other, members or not, while others come."""
    victims = [draw.choice(("any", "any", "waiting")) for _ in range(draw.randint(1, 4))]
    arrivals = _arrivals(draw) if draw.random() < 0.6 else []
    return [*(Fault("drain", victim, at=_sometime(draw)) for victim in victims), *arrivals]


def _drain_at_place(draw: random.Random, job: Job) -> list[Fault]:
    victim = draw.choice(("self", "self", "another", "all"))
    strike = Fault("drain", victim, place=draw.choice(PLACES), nth=draw.randint(1, 12))
    return [strike, *(_arrivals(draw) if draw.random() < 0.5 else [])]


def _drain_all(draw: random.Random, job: Job) -> list[Fault]:
    """The whole job is told to go, more or less at once; some may come, or be lost, at this moment."""
    spread_s = draw.choice((0.0, 0.005, 0.1, 0.5))
    told = Fault("drain", draw.choice(("all", "everybody")), at=_sometime(draw), duration_s=spread_s)
    return [told, *(_arrivals(draw) if draw.random() < 0.5 else [])]


def _drain_and_loss(draw: random.Random, job: Job) -> list[Fault]:
    """Somebody is lost on the way out, also the one that saves the state."""
    place = draw.choice(("next_view", "boundary", "exchange", "build", "bucket1", "save"))
    nth = 1 if place == "save" else draw.randint(1, 4 * job.num_workers)
    kind = draw.choice(("crash", "crash", "freeze"))
    strike = Fault(kind, draw.choice(("self", "another")), place=place, nth=nth, duration_s=draw.choice((1, 4)))
    return [*draw.choice((_drain, _drain_all))(draw, job), strike]


def _silence(draw: random.Random, job: Job) -> list[Fault]:
    duration = draw.choice((0.1, 1.0, 3.0, 1000.0))
    victim = draw.choice(("any", "any", "waiting"))
    return [Fault("freeze", victim, at=_sometime(draw), duration_s=duration)]


def _silence_at_place(draw: random.Random, job: Job) -> list[Fault]:
    duration = draw.choice((0.1, 3.0, 1000.0))
    return [Fault("freeze", "self", place=draw.choice(PLACES), nth=draw.randint(1, 10), duration_s=duration)]


def _slow(draw: random.Random, job: Job) -> list[Fault]:
    return [Fault("slow", "any", at=_sometime(draw), duration_s=0.5) for _ in range(draw.randint(1, 3))]


def _broken_group(draw: random.Random, job: Job) -> list[Fault]:
    if draw.random() < 0.5:
        return [Fault("break", "any", at=_sometime(draw))]
    return [Fault("break", "self", place=draw.choice(PLACES), nth=draw.randint(1, 10))]


def _all_lost(draw: random.Random, job: Job) -> list[Fault]:
    """All members at once, or all but those that are just being admitted."""
    if draw.random() < 0.4:
        nth = draw.choice((1, 1, 2))
        strike = Fault("crash", "others", place=draw.choice(("receive_state", "exchange")), nth=nth)
    else:
        strike = Fault(draw.choice(("crash", "crash", "freeze")), "all", at=_sometime(draw), duration_s=5.0)
    return [*_arrivals(draw), strike, *_arrivals(draw)]


def _exception(draw: random.Random, job: Job) -> list[Fault]:
    """The user's code raises one; somebody may be lost, or come, or raise another one, at about this time."""
    if draw.random() < 0.5:
        strike = Fault("raise", draw.choice(("any", "any", "waiting")), at=_sometime(draw))
    else:
        strike = Fault("raise", "self", place=draw.choice(USERS_PLACES), nth=draw.randint(1, 12))
    others = draw.choice((None, _crash_anywhere, _join, _drain, _silence, _loss_in_recovery, _late))
    again = [replace(strike, victim="any", place="", at=_sometime(draw))] if draw.random() < 0.2 else []
    return [strike, *again, *(others(draw, job) if others is not None else [])]


def _exception_and_coordinator_lost(draw: random.Random, job: Job) -> list[Fault]:
    """The coordinator dies while it is told, or tells the others."""
    place, nth = draw.choice(("forward", "boundary", "evaluate")), draw.randint(1, 4 * job.num_workers)
    delay_s = draw.random() * 0.02
    count = draw.choice((1, 2, 2, 3, 4))
    strike = Fault("coordinator", place=place, nth=nth, delay_s=0.0 if count > 1 else delay_s, count=count)
    return [Fault("raise", "self", place=place, nth=nth), strike]


def _late(draw: random.Random, job: Job) -> list[Fault]:
    return [Fault("arrive", place="closing", nth=draw.randint(1, job.num_workers), delay_s=draw.random() * 0.1)]


_THEMES = (
    _crash_anywhere,
    _crash_at_place,
    _lost_while_completing,
    _lost_while_completing,
    _two_losses_in_one_collective,
    _loss_in_recovery,
    _join,
    _join_storm,
    _joiner_lost,
    _boundary_interrupted,
    _boundary_interrupted,
    _leave,
    _drain,
    _drain_at_place,
    _drain_all,
    _drain_and_loss,
    _silence,
    _silence_at_place,
    _slow,
    _broken_group,
    _all_lost,
    _late,
    _exception,
)

_FAILOVERS = (
    _coordinator_lost,
    _coordinator_lost_at_place,
    _cut_network,
    _cut_at_place,
    _leave_and_cut,
    _halve,
    _halve_and_lose,
    _suspend,
    _exception_and_coordinator_lost,
)

STRANGERS = ("silent", "replay", "wrong", "thief")
"""Says nothing; repeats the greeting of a worker; knows another token, or none; has the token, and a worker's name."""
_ROTATION = (("old",), ("old", "old\nnew"), ("old\nnew", "new\nold"), ("new\nold", "new"))
"""What nodes know of a token before it is replaced, and while one after the other is restarted."""
_BESIDE = 5
"""One of so many schedules has strangers, or a host that vanishes or does not read; another one, broken connections."""
_FAMILIES_OF_LOSSES = ("", "failover", "handovers", "founding", "endpoints")

_GATHERING_S = (0.0, 2e-5, 1e-3, 1e-2)
"""Of these, each seed has one: none, that of a real job, and far more, so that much comes while losses are gathered."""


def _complete(family: str, draw: Callable[[int], Schedule], seed: int) -> Schedule:
    schedule = draw(seed)
    schedule = replace(schedule, job=replace(schedule.job, gathering_s=_GATHERING_S[seed % len(_GATHERING_S)]))
    draw_beside = random.Random(f"elasticflow/beside/{family}/{seed}")  # apart from all else of the schedule
    known = draw_beside.choice(((), *_ROTATION))
    tokens = tuple(draw_beside.choice(known) for _ in range(5)) if known else ()
    schedule = replace(schedule, tokens=tokens)
    harms = family in _FAMILIES_OF_LOSSES
    if seed % _BESIDE == 2:
        return _beside(schedule, draw_beside, harms=harms)
    return _with_resets(schedule, draw_beside) if harms and seed % _BESIDE == 4 else schedule


def _with_resets(schedule: Schedule, draw: random.Random) -> Schedule:
    """Connections to coordinators break, often about when something else happens."""
    others = [fault.at for fault in schedule.faults if fault.at is not None]
    times = [draw.choice(others) + draw.uniform(-0.6, 1.5) for _ in range(2)] if others else []
    times = [when for when in (*times, _sometime(draw)) if when > 0]
    faults = [Fault("reset", "any", at=round(draw.choice(times), 4)) for _ in range(draw.choice((1, 1, 2, 3)))]
    return replace(schedule, faults=(*schedule.faults, *faults))


def _beside(schedule: Schedule, draw: random.Random, *, harms: bool) -> Schedule:
    what = draw.choice(("strangers", "strangers", "stall", "stall", "vanish")) if harms else "strangers"
    faults, buffer_bytes = list(schedule.faults), 0
    if what == "strangers":
        kinds = draw.choices(STRANGERS, k=draw.randint(1, 3))
        faults += [Fault("stranger", kind, at=round(2.5 * draw.random(), 3)) for kind in kinds]
        buffer_bytes = draw.choice((0, 0, 100)) if harms else 0
    elif what == "stall":
        when = _sometime(draw)
        news = Fault(draw.choice(("arrive", "crash", "leave")), "any", at=when + 0.3 * draw.random())
        faults += [Fault("stall", "any", at=when, duration_s=draw.choice((0.5, 1.5, 4.0, 12.0))), news]
        buffer_bytes = draw.choice((10, 10, 100, 400))
    else:
        faults.append(Fault("vanish", "any", at=_sometime(draw)))
    return replace(schedule, faults=tuple(faults), buffer_bytes=buffer_bytes)


_DRAWS: Mapping[str, Callable[[int], Schedule]] = {
    "": schedule_of,
    "failover": failover_of,
    "handovers": handovers_of,
    "founding": founding_of,
    "endpoints": endpoints_of,
    "hangs": hang_of,
    "trainings": trainings_of,
    "sizes": sizes_of,
    "streams": streams_of,
    **{f"workers={number}": partial(many_of, number) for number in (16, 64, 256)},
}
FAMILIES: Mapping[str, Callable[[int], Schedule]] = {
    family: partial(_complete, family, draw) for family, draw in _DRAWS.items()
}
"""By the name of a family: draws the schedule of a seed."""
