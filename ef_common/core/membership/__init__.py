"""Membership: who is in the view, decided from events alone.

The coordinator runs :func:`decide` on every event. It is in one of five states, whose fields are in :mod:`model`, and
:mod:`machine` names the events that each state heeds:

    Idle → Gathering     a member of another coordinator comes to this standby
    Idle → Serving       likewise, and it is the only one
    Gathering → Serving  all of its members are here, or there was time enough
    Gathering → Forming  likewise, and none of them is left
    Forming → Serving    enough workers wait: the first view, or one after all members have gone
    Serving → Forming    no member is left
    Forming → Idle       another coordinator leads
    Serving → Idle       another coordinator leads, or there was no quorum for too long
    any → Ended          an exception ends the job

Rules:

1. Before the first view, workers are *early*: they wait in their setup. The first view is issued when every node seen
   so far is complete, at least ``min_nodes`` are there, and either the expected number is there (``start_nodes``, else
   ``max_nodes``) or nobody has arrived for ``last_call_s``.
2. After it, a worker that arrives *warms up* (imports, model, data workers) and then reports that it is ready. Ready
   workers wait. The members learn that a change is pending, agree on a step boundary among themselves, and report it.
   When all have, the next view consists of the members that stay and the workers that are ready.
   A program may train several times. Members report the training that they have reached, and ready workers the one
   that they are ready for. Only workers that are ready for the members' training join. Workers that are behind are told
   to skip what is over; workers that are ahead (because the members have begun again) wait.
3. When a member is gone, the remaining members get a new view at once, without newcomers: they may be anywhere in a
   step, and newcomers can only be received at a boundary. If that view has not come about when further members are
   gone, these are gathered for some milliseconds, and left out together. Silent ones are gathered already. A member
   that comes as a newcomer has not heard of the first view, and is not where the others are: what it was is gone.
4. If no member is left, the state is lost. The ready workers form a new view as in rule 1: those of the earliest
   training for which there are enough. If there are enough only together, all go to the latest training.
5. Below ``min_nodes`` a view holds: its members finish the step in flight and wait at the boundary.
6. A member may suspect its group (a broken connection that the coordinator does not see). The same members get a new
   view when everyone suspects it, or when the time has passed in which a loss would have been noticed. Once ten views
   in a row have not come about, only the time counts.
7. A member that says goodbye has nothing more to do, and usually the others are about to end, too. If all have settled
   in the view (their groups are built), they keep it, and a member that needs another one (its group breaks, or it
   waits at a boundary) gets it at once. Otherwise a member may be waiting for the one that has gone, so rule 3 applies.
8. Once the job is closed, because a member's program ends, all workers that are not members are told that it has
   finished, and no view holds any more.
9. A member that wants to leave goes at a boundary that all have agreed on, in the way in which newcomers come. A worker
   that is not a member goes at once, and is told so. If all members want to leave while newcomers are ready, the
   newcomers join first and get the state; the others go at the next boundary. If all go, one of them may be saving the
   state: nothing begins again (rule 4) before their connections have ended. A member that is a *straggler* is replaced
   in the same way: the spare joins first, and then the member is asked to leave.
10. No view is issued without the quorum of :mod:`ef_common.core.quorum`. Without it, the view is *held* back: it is
    issued as soon as enough members come back or are known to be gone. After a while the coordinator steps down, so
    that its workers look for another one, where more may have gathered.
11. A coordinator may be a standby. The first member that comes to it from another coordinator makes it *gather*: it
    waits until each member of the newest view is there, seems to be dead, or is silent for too long. If all are there,
    have settled and suspect nothing, the view continues; otherwise they get a new one.
12. An exception of the user's code, in a member or before the first view, ends the job: all connected workers are told
    (the one that raised it last), and later arrivals, too. That worker looks for another coordinator until it has been
    told itself, and then it may end. In a newcomer, an exception ends only this newcomer.
13. If a quorum needs claims, the coordinator lets some members acquire them. The members that a claim names never
    change. Without an answer, the coordinator waits. If the other members may be more, they come first: it asks only
    after the time after which it would step down, and waits as long again.
14. The members may want fewer nodes than `max_nodes`, or more than before. Rank 0 tells how many, and its newest demand
    counts (:class:`~ef_common.core.room.Demand`). The members know it and report it to a standby, so it outlives a
    coordinator. Workers of further nodes are spares. If the view has more nodes, and all members hold the state, whole
    nodes are asked to leave (rule 9), all at one boundary: those of stragglers first, then the newest. If others are
    lost or more are wanted before that, as many of them are told to stay. A member that has said to one coordinator
    that it leaves, and then turns to another one, leaves in any case: the first one may go on without it. A demand
    never leaves fewer than `min_nodes`, and never admits more than `max_nodes`.

The machine forgets what no rule needs any more (:func:`claims.forget`, and :func:`rules.settled` for the chain). The
size of the state depends on the workers that are connected and on the views since the newest one that has come about,
and not on how many workers and views there have been. If K members are lost one after the other, there are some log K
such views.
"""

from ef_common.core.membership.actions import (
    Abort,
    Accept,
    Action,
    Agree,
    Announce,
    Claim,
    Dismiss,
    Finish,
    Install,
    Republish,
    Resign,
    Resume,
    SendAway,
    Skip,
    Stay,
    StepDown,
)
from ef_common.core.membership.events import (
    Arrived,
    AtBoundary,
    Begun,
    Challenged,
    Claimed,
    Closed,
    Event,
    Failed,
    FailedElsewhere,
    Gone,
    Leaving,
    Outranked,
    Ready,
    Refused,
    Returned,
    Settled,
    Silent,
    Slow,
    Stored,
    Straggler,
    Suspected,
    Tick,
    Wanted,
)
from ef_common.core.membership.machine import decide, next_deadline
from ef_common.core.membership.model import (
    Active,
    Ended,
    Forming,
    Gathering,
    Idle,
    Membership,
    Replacement,
    Serving,
    Settings,
    Shortage,
)
from ef_common.core.membership.phase import Phase
from ef_common.core.membership.roster import phase_of
from ef_common.core.membership.rules import is_at_work
from ef_common.core.membership.takeover import is_news, missing, step_down

__all__ = ["decide", "next_deadline", "phase_of", "is_at_work", "is_news", "missing", "step_down"]
__all__ += ["Active", "Ended", "Forming", "Gathering", "Idle", "Membership", "Replacement", "Serving", "Settings"]
__all__ += ["Shortage", "Phase"]
__all__ += ["Arrived", "AtBoundary", "Begun", "Challenged", "Claimed", "Closed", "Event", "Failed", "FailedElsewhere"]
__all__ += ["Gone", "Leaving", "Outranked", "Ready", "Refused", "Returned", "Settled", "Silent", "Slow", "Stored"]
__all__ += ["Straggler", "Suspected", "Tick", "Wanted"]
__all__ += ["Abort", "Accept", "Action", "Agree", "Announce", "Claim", "Dismiss", "Finish", "Install", "Republish"]
__all__ += ["Resign", "Resume", "SendAway", "Skip", "Stay", "StepDown"]
