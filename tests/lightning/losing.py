"""The loss of a worker that there never was, in a training of one process."""

from __future__ import annotations

from typing import Any

from ef_common.core.view import Member, View


def after(pl: Any, batch: int) -> Any:
    """A callback that shares the step after so many batches with another worker, which is lost before the reduction."""

    class Losing(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, data: Any, batch_idx: int) -> None:
            if batch_idx + 1 == batch:
                loader, collectives = trainer.strategy._fit.train_loader, trainer.strategy.session.collectives
                alone, deal = collectives.completed_in, loader._deal
                other = Member("other", "node", "127.0.0.1")

                def deal_to_two() -> Any:
                    loader._deal = deal
                    collectives.completed_in = View(alone.generation, (*alone.members, other))
                    try:
                        return deal()
                    finally:
                        collectives.completed_in = alone

                loader._deal = deal_to_two

    return Losing()
