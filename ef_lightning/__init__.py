"""ElasticFlow for PyTorch Lightning.

>>> from lightning.pytorch import Trainer                      # doctest: +SKIP
>>> from ef_lightning import ElasticFlowStrategy               # doctest: +SKIP
>>> Trainer(strategy=ElasticFlowStrategy()).fit(model, loader)  # doctest: +SKIP

`ElasticFlowStrategy` is the strategy for whichever of `lightning.pytorch` and `pytorch_lightning` the program
imports; importing this package also registers `Trainer(strategy="elasticflow")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ef_common import __version__ as __version__
from ef_common.imports import without_collections

with without_collections():
    from ef_common.core.autoscale import Autoscale
    from ef_common.core.compensation import Compensation
    from ef_common.core.retention import Retention
    from ef_common.data.checkpointer import Checkpointing
    from ef_common.data.workers import WorkersChange
    from ef_lightning.program import module
    from ef_lightning.registry import register, strategy_class, strategy_for

    register()

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _OfLightning
    from pytorch_lightning.strategies import ParallelStrategy as _OfPytorchLightning

    from ef_lightning.strategy import ElasticMixin as _ElasticMixin

    class ElasticFlowStrategy(_ElasticMixin, _OfLightning, _OfPytorchLightning):  # type: ignore[misc]
        """The strategy as type checkers see it, for the Trainers of both packages."""


__all__ = [
    "ElasticFlowStrategy",
    "module",
    "Compensation",
    "Autoscale",
    "Checkpointing",
    "Retention",
    "WorkersChange",
    "strategy_for",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "ElasticFlowStrategy":
        return strategy_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
