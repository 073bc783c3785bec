"""ElasticFlow for PyTorch Lightning.

>>> from lightning.pytorch import Trainer                      # doctest: +SKIP
>>> from ef_lightning import ElasticFlowStrategy               # doctest: +SKIP
>>> Trainer(strategy=ElasticFlowStrategy()).fit(model, loader)  # doctest: +SKIP

`ElasticFlowStrategy` is the strategy for whichever of `lightning.pytorch` and `pytorch_lightning` the program
has imported; importing this package also registers `Trainer(strategy="elasticflow")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ef_lightning import host as _host
from ef_lightning.strategy import register, strategy_for

if TYPE_CHECKING:
    from ef_lightning.strategy import ElasticFlowStrategy

__all__ = ["ElasticFlowStrategy", "strategy_for"]

register()


def __getattr__(name: str) -> Any:
    if name == "ElasticFlowStrategy":
        return strategy_for(_host.detect().name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
