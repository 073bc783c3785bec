"""Lightning's view of the cluster: rank and world size as the session has them."""

from __future__ import annotations

import os
from typing import Any

from ef_common.session import Session
from ef_lightning.host import Host


class _EnvironmentMixin:
    """A cluster environment whose ranks follow the views of a session."""

    def __init__(self) -> None:
        super().__init__()
        self._session: Session | None = None
        self._local_rank = int(
            os.environ.get("LOCAL_RANK") or os.environ.get("HOROVOD_LOCAL_RANK", "0")
        )  # asked for with each batch

    def follow(self, session: Session) -> None:
        """Take ranks from this session from now on."""
        self._session = session

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        """Never chosen by itself."""
        return False

    def world_size(self) -> int:
        """Size of the world that counts for the next step."""
        return 1 if self._session is None else self._session.completed_in.world_size

    def set_world_size(self, size: int) -> None:
        """Membership decides."""

    def global_rank(self) -> int:
        """Rank in the current view."""
        return 0 if self._session is None else self._session.rank

    def set_global_rank(self, rank: int) -> None:
        """Membership decides."""

    def local_rank(self) -> int:
        """Index of the worker on its node."""
        return self._local_rank

    def node_rank(self) -> int:
        """Nodes have no fixed rank; the worker's own rank serves."""
        return self.global_rank()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """The numbers in the Trainer do not bind."""

    def teardown(self) -> None:
        """Nothing to tear down."""


def environment_for(host: Host) -> Any:
    """A cluster environment of the host's class tree."""
    base = host.get_fabric("plugins.environments", "ClusterEnvironment")
    return type("ElasticEnvironment", (_EnvironmentMixin, base), {})()
