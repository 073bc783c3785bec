"""A CombinedLoader that shows users their own loaders, while Lightning's loops read ElasticFlow's.

A loader of ElasticFlow's belongs to the loop that reads it: who takes a batch out of it takes it from the training, and
takes part in a collective. `trainer.train_dataloader`, `trainer.val_dataloaders` and their like are the `iterables` of
a CombinedLoader, and the loops read its `flattened`.
"""

from __future__ import annotations

import functools
from typing import Any

from ef_common.errors import UnsupportedError, UsageError
from ef_lightning import hooks
from ef_lightning.data_workers import WrappedLoader
from ef_lightning.host import LightningHost
from ef_lightning.joint_reading import LENGTHS, JointLoader


def combined(loaders: Any, mode: str, host: LightningHost) -> Any:
    """The loaders of a user's, in the form that a loop takes.

    Args:
        loaders: A loader, a collection of some, or a CombinedLoader, which is left as it is.
        mode: How they are combined, if not by a CombinedLoader.
        host: The class tree.
    """
    base = host.get("utilities.combined_loader", "CombinedLoader")
    given = loaders if isinstance(loaders, base) else base(loaders, mode)
    kind: Any = type(given)
    cls = _showing_users_loaders(kind)
    shown = cls.__new__(cls)
    vars(shown).update(vars(given))
    return shown


def joined(several: Any, host: LightningHost) -> Any:
    """A CombinedLoader for a loop, with one loader that represents several.

    Args:
        several: The CombinedLoader of the user's loaders.
        host: The class tree.
    """
    mode, unflatten = hooks.combination(several)
    joint = JointLoader(several, mode=mode, unflatten=unflatten)
    return combined(joint, mode, host)


def check_joint(joint: JointLoader, host: LightningHost) -> None:
    """Refuse loaders that are combined in a way that cannot be dealt.

    Raises:
        UnsupportedError: A class of the user's combines them in its own way.
        UsageError: Lightning does not train with them.
    """
    kind, base = type(joint.several), host.get("utilities.combined_loader", "CombinedLoader")
    if any(getattr(kind, name) is not getattr(base, name) for name in ("__iter__", "__next__", "__len__")):
        raise UnsupportedError(
            "a CombinedLoader that overrides `__iter__`, `__next__` or `__len__` cannot be dealt to a changing "
            f"number of workers. Use one of its modes. Received: {kind.__name__}"
        )
    if joint.mode not in LENGTHS:
        raise UsageError(
            "training loaders cannot be read one after the other: Lightning does not support it. "
            f"Expected one of {tuple(LENGTHS)}. Received: mode={joint.mode!r}"
        )


@functools.cache
def _showing_users_loaders(base: Any) -> Any:
    return type(base.__name__, (_ShowingUsersLoaders, base), {"__module__": __name__, "__doc__": base.__doc__})


class _ShowingUsersLoaders:
    """Everything except the base class, which is Lightning's CombinedLoader or a user's subclass of it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a CombinedLoader of the user's loaders: what ElasticFlow has put in their place is not copied."""
        base = type(self).__mro__[2]
        return _empty, (base,), vars(self)

    @property
    def flattened(self) -> list[Any]:
        """The loaders that the loop reads."""
        loaders: list[Any] = super().flattened  # type: ignore[misc]
        return loaders

    @flattened.setter
    def flattened(self, loaders: list[Any]) -> None:
        shown = [loader.user_loader if isinstance(loader, WrappedLoader) else loader for loader in loaders]
        super(_ShowingUsersLoaders, type(self)).flattened.fset(self, shown)  # type: ignore[misc]
        self._flattened = loaders


def _empty(kind: Any) -> Any:
    return kind.__new__(kind)
