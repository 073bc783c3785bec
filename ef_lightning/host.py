"""Finds out which of the two Lightning packages the user works with.

`lightning.pytorch` and `pytorch_lightning` are the same code as two class trees: a strategy of one is no strategy
for the other's Trainer. What ElasticFlow needs of either is named here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

from ef_common.errors import MixedImportsError, UsageError
from ef_lightning import announcements

NAMES = ("lightning.pytorch", "pytorch_lightning")


@dataclass(frozen=True, slots=True)
class LightningHost:
    """One of the two class trees.

    Args:
        name: Import name of the package.
        fabric: Import name of the Fabric that it builds on.
    """

    name: str
    fabric: str

    def get(self, module: str, name: str) -> Any:
        """An object of a module of the package, given relative to it ("strategies.parallel")."""
        return getattr(importlib.import_module(f"{self.name}.{module}"), name)

    def get_fabric(self, module: str, name: str) -> Any:
        """An object of a module of Fabric, in the same way."""
        return getattr(importlib.import_module(f"{self.fabric}.{module}"), name)

    def callbacks(self, trainer: Any, name: str) -> list[Any]:
        """A Trainer's callbacks of one of Lightning's classes."""
        return [callback for callback in trainer.callbacks if isinstance(callback, self.get("callbacks", name))]

    def set_rank(self, rank: int) -> None:
        """Set this process's rank for the three `rank_zero_only` functions and for announcements."""
        for rank_zero_only in (
            self.get("utilities.rank_zero", "rank_zero_only"),
            self.get_fabric("utilities.rank_zero", "rank_zero_only"),
            importlib.import_module("lightning_utilities.core.rank_zero").rank_zero_only,
        ):
            rank_zero_only.rank = rank
        announcements.settle(self.name, rank)


HOSTS = {
    "lightning.pytorch": LightningHost("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": LightningHost("pytorch_lightning", "lightning_fabric"),
}


def detect() -> LightningHost | None:
    """The tree that the program has imported, otherwise the one that is installed.

    Returns:
        None if it has imported neither yet, and both are installed.

    Raises:
        MixedImportsError: The program has imported both.
        UsageError: Neither is installed.
    """
    imported = [name for name in NAMES if f"{name}.trainer.trainer" in sys.modules]
    if len(imported) > 1:
        raise MixedImportsError(
            "both `lightning.pytorch` and `pytorch_lightning` are imported, and a strategy of one does not work "
            "in a Trainer of the other. Import only one of them, or name the one that your Trainer comes from: "
            "`ef_lightning.strategy_for('lightning.pytorch')()` or `ef_lightning.strategy_for('pytorch_lightning')()`"
        )
    candidates = imported or [name for name in NAMES if importlib.util.find_spec(name.split(".")[0]) is not None]
    if not candidates:
        raise UsageError("no Lightning is installed: pip install 'elasticflow-training[lightning]'")
    return HOSTS[candidates[0]] if len(candidates) == 1 else None


def of(obj: object) -> LightningHost | None:
    """The tree that an object's class, or a base of it, comes from."""
    trees = (_tree(cls) for cls in type(obj).__mro__)
    return next((tree for tree in trees if tree is not None), None)


def is_of_lightning(cls: type) -> bool:
    """Whether Lightning itself, and not the user, has defined a class."""
    return _tree(cls) is not None


def _tree(cls: type) -> LightningHost | None:
    for name, host in HOSTS.items():
        if cls.__module__ == name or cls.__module__.startswith(f"{name}."):
            return host
    return None
