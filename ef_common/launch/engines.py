"""The data planes that can be chosen by name."""

from __future__ import annotations

from ef_common.core.view import View
from ef_common.errors import UsageError
from ef_common.session.ports import Bootstrap, Group, GroupFactory
from ef_common.tls import Tls

ENGINES = ("gloo", "nccl", "horovod", "horovod-tensorflow")
"""torch with Gloo; the same with NCCL for what is on GPUs, if each member has one of its own; torch with Horovod; and
TensorFlow with Horovod."""


def check_engine(engine: str) -> None:
    """Raise unless this engine exists.

    Raises:
        UsageError: The name is unknown.
    """
    if engine not in ENGINES:
        raise UsageError(f"unknown engine. Expected one of {ENGINES}. Received: engine={engine!r}")


def groups_of(engine: str, *, tls: Tls | None = None) -> GroupFactory:
    """The factory for an engine's groups. Only what the engine needs is imported.

    Args:
        engine: Name of the engine.
        tls: The identity of this worker, if our own connections between nodes are encrypted. The engine's are not.

    Raises:
        UsageError: There is no such engine, or it is not installed.
    """
    check_engine(engine)
    if engine in ("gloo", "nccl"):
        from ef_common.collectives.torch_group import TorchGroups

        return TorchGroups(nccl=engine == "nccl", tls=tls)
    from ef_common.horovod.group import HorovodBinding, HorovodGroups

    binding: HorovodBinding
    if engine == "horovod":
        from ef_common.horovod.torch_binding import TorchBinding

        binding = TorchBinding()
    else:
        import tensorflow  # noqa: F401  # Horovod's library is made of its symbols

        from ef_common.horovod.library import Library

        binding = Library("tensorflow")
    return HorovodGroups(binding, tls=tls)


class NoGroups:
    """A factory for a worker that is alone and stays so."""

    def build(self, view: View, *, rank: int, bootstrap: Bootstrap) -> Group:
        """A lone worker has no others to connect to."""
        raise UsageError(f"a worker that stays alone has no group. Received: view={view}")
