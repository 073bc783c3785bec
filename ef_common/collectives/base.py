"""Moved to :mod:`ef_common.ports`."""

from ef_common.ports import Bootstrap, Group, GroupFactory, Pending

__all__ = ["Bootstrap", "Group", "GroupFactory", "Pending"]
