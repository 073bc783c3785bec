"""A CombinedLoader that shows users the loaders that they gave, while Lightning's loops read ElasticFlow's.

A loader of ElasticFlow's belongs to the loop that reads it: who takes a batch out of it takes it from the training, and
takes part in a collective. `trainer.train_dataloader`, `trainer.val_dataloaders` and their like are the `iterables` of
a CombinedLoader, and the loops read its `flattened`.
"""

from __future__ import annotations

import functools
from typing import Any

from ef_lightning.data_workers import WrappedLoader
from ef_lightning.host import Host


def combined(loaders: Any, mode: str, host: Host) -> Any:
    """What a loop takes for these loaders of a user's.

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


@functools.cache
def _showing_users_loaders(base: Any) -> Any:
    return type(base.__name__, (_ShowingUsersLoaders, base), {"__module__": __name__, "__doc__": base.__doc__})


class _ShowingUsersLoaders:
    """Everything but the base class, which is Lightning's CombinedLoader or a user's subclass of it."""

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
