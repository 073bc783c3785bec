"""One worker's side of the protocol, the ports that it needs, and what others may read of its progress."""

from ef_common.core.room import Room
from ef_common.session.barrier import Barrier
from ef_common.session.lone import LoneGroup
from ef_common.session.session import Session

__all__ = ["Barrier", "LoneGroup", "Room", "Session"]
