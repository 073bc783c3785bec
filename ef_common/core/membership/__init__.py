"""Membership: who is in the view, decided from events alone.

The coordinator runs :func:`decide` on every event. Rules:

1. Before the first view, workers are *early*: they wait in their set-up. The first view is issued when every
   node seen is complete, at least ``min_nodes`` are there, and either as many as are expected (``start_nodes``,
   else ``max_nodes``) or nobody has arrived for ``last_call_s``.
2. After it, a worker that arrives *warms up* (imports, model, data workers) and then says that it is ready.
   Ready workers wait; the members learn that a change is pending, agree on a step boundary among themselves,
   and report it. When all have, the next view holds the members that stay and the workers that are ready.
   A program may train several times. Members tell to which training they have come, and whoever is ready tells for
   which one it is. Only those of the members' training come in. Who is behind is told to pass over what is over; who
   is ahead (the members have begun anew) waits.
3. A member that is gone makes a new view of the remaining members at once, without newcomers: they may be
   anywhere in a step, and only a boundary is a place to receive a newcomer.
4. If no member is left, the state is lost. The ready workers form a new view as in rule 1: those of the earliest
   training for which enough are ready. If enough are there only together, all go to the latest one.
5. Below ``min_nodes`` a view holds: its members finish the step in flight and wait at the boundary.
6. A member that suspects its group (a broken connection that the coordinator does not see) gets a new view
   with the same members when everyone suspects it, or when the time in which a loss would have been noticed
   has passed; only in that time once ten views in a row have not come about.
7. A member that says goodbye has nothing more to do, and mostly the others have not either. If all have settled
   in the view (their group is built), they keep it, and whoever does need another one (its group breaks, it
   stands at a boundary) gets it at once. Else somebody may be waiting for the one that has gone: as in rule 3.
8. Once the job is closed, as a member's program ends, whoever is not a member is told that it has finished, and no
   view holds any more.
9. A member that wants to leave goes at a boundary that all have agreed on, as newcomers come. Whoever is no member
   goes at once, and is told so. If all members want to go while newcomers are ready, these come in first, and get the
   state; the others go at the next boundary. If all go, one of them may be saving the state: nothing begins anew
   (rule 4) before their connections have ended.
   Likewise a member that is *outpaced*: the spare that is to replace it comes in first, and then it is asked to leave.
10. No view is issued without the quorum of :mod:`ef_common.core.quorum`. Where it is lacking, the view is *held*
    back: it is issued as soon as enough come back or are known to be gone. After a while the coordinator steps down, so
    that its workers look for another one: more may have come together there.
11. A coordinator may be a standby. The first member that comes to it from another coordinator makes it *gather*: it
    waits for the members of the newest view, until all are there, known to be dead, or silent for too long. If all are
    there, and have settled, and nobody suspects its group, the view simply goes on; else they get a new one.
12. An exception of the user's own code, in a member or before the first view, ends the job: all that are connected are
    told, the one that raised it last, and whoever comes later. It looks for another coordinator until it has heard so
    itself, and then it can end. In a newcomer it ends this newcomer alone.
13. If a quorum needs claims, the coordinator has some members get them. Whom a claim names never changes. Without an
    answer, it waits. If the others may be more, they come first: it asks only after the time after which it would step
    down, and waits as long again.

What no rule asks for any more is forgotten with the event that makes it so (:func:`claims.forget`, and
:func:`rules.settled` for the chain): the state depends on who is here and on the views since the newest one that has
come about, and not on how many workers and views there ever were.
"""

from ef_common.core.membership.machine import decide, next_deadline
from ef_common.core.membership.model import (
    Abort,
    Action,
    Agree,
    Announce,
    Arrived,
    AtBoundary,
    Begun,
    Challenged,
    Claim,
    Claimed,
    Closed,
    Decision,
    Dismiss,
    Event,
    Failed,
    FailedElsewhere,
    Finish,
    Gone,
    Install,
    Leaving,
    Membership,
    Outpaced,
    Outranked,
    Phase,
    Proved,
    Ready,
    Redirect,
    Resign,
    Resume,
    Returned,
    Settings,
    Settled,
    Silent,
    Skip,
    StepDown,
    Stored,
    Suspected,
    Tick,
    Welcome,
)
from ef_common.core.membership.rules import is_at_work, phase_of
from ef_common.core.membership.takeover import is_news, missing, step_down

__all__ = [
    "Abort",
    "Action",
    "Agree",
    "Announce",
    "Arrived",
    "AtBoundary",
    "Begun",
    "Challenged",
    "Claim",
    "Claimed",
    "Closed",
    "Decision",
    "Dismiss",
    "Event",
    "Failed",
    "FailedElsewhere",
    "Finish",
    "Gone",
    "Install",
    "Leaving",
    "Membership",
    "Outpaced",
    "Outranked",
    "Phase",
    "Proved",
    "Ready",
    "Redirect",
    "Resign",
    "Resume",
    "Returned",
    "Settings",
    "Settled",
    "Silent",
    "Skip",
    "StepDown",
    "Stored",
    "Suspected",
    "Tick",
    "Welcome",
    "decide",
    "is_at_work",
    "is_news",
    "missing",
    "next_deadline",
    "phase_of",
    "step_down",
]
