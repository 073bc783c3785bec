"""`ElasticFlowStrategy()` in Lightning's own tests.

A Trainer is given the strategy if its caller says nothing of one ("auto" counts as nothing), and asks for one device of
one node, on the CPU. All else is left alone.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any


def put_in(note_use: Callable[[], None]) -> None:
    """Give it to each Trainer from now on."""
    from lightning.pytorch import Trainer

    from ef_lightning import strategy_for

    original: Callable[..., None] = Trainer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not args and _says_nothing(kwargs):
            note_use()
            kwargs["strategy"] = strategy_for("lightning.pytorch")(log_workers=False)  # they compare the logs exactly
        original(self, *args, **kwargs)

    Trainer.__init__ = init  # type: ignore[method-assign]


def _says_nothing(kwargs: dict[str, Any]) -> bool:
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    names = ("STRATEGY", "ACCELERATOR", "DEVICES", "NUM_NODES")
    if kwargs.get("strategy", "auto") != "auto" or any(f"PL_TRAINER_{name}" in os.environ for name in names):
        return False
    accelerator = kwargs.get("accelerator", "auto")
    if accelerator == "auto":
        accelerator = _AcceleratorConnector._choose_auto_accelerator()
    return (
        accelerator == "cpu" and kwargs.get("devices", "auto") in ("auto", 1, "1") and kwargs.get("num_nodes", 1) == 1
    )
