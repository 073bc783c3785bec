"""Which jobs of a cluster have how many worker pods, and what is done about it: pure rules for its controller."""

from ef_common.core.cluster.contacts import doors_of
from ef_common.core.cluster.decide import agrees, decide, refused, rests_on_pods
from ef_common.core.cluster.policy import SharePolicy
from ef_common.core.cluster.report import WorkerReport, on_record
from ef_common.core.cluster.state import Cause, Decision, Doom, Job, JobPhase, Node, Pod, Record, Refusal, Resources

__all__ = [
    "decide",
    "agrees",
    "refused",
    "rests_on_pods",
    "doors_of",
    "on_record",
    "Cause",
    "Decision",
    "Doom",
    "Job",
    "Node",
    "JobPhase",
    "Pod",
    "SharePolicy",
    "Record",
    "Refusal",
    "WorkerReport",
    "Resources",
]
