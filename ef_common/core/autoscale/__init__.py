"""Autoscaling: how many nodes a job asks for, decided by pure functions from what it has measured."""

from ef_common.core.autoscale.policy import Policy, Situation, Target
from ef_common.core.autoscale.settings import Autoscale, autoscale_of

__all__ = ["Autoscale", "Policy", "Situation", "Target", "autoscale_of"]
