"""A training with a progress bar, and whose rank 0 may die."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from tests.lightning import training


def bar_as_documented(pl: Any) -> Any:
    """The example of Lightning's own documentation: `enable` is a flag, and hides the method."""

    class LitProgressBar(pl.callbacks.ProgressBar):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.enable = True

        def disable(self) -> None:
            self.enable = False

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            sys.stdout.flush()
            sys.stdout.write(f"{batch_idx / self.total_train_batches * 100:.01f} percent complete \r")

    return LitProgressBar()


def bar_of(pl: Any, kind: str) -> Any:
    match kind:
        case "tqdm":
            return pl.callbacks.TQDMProgressBar()
        case "rich":
            return pl.callbacks.RichProgressBar(console_kwargs={"force_terminal": True})
        case "documented":
            return bar_as_documented(pl)
    raise ValueError(kind)


def run(host: str, kind: str, where: str) -> dict[str, Any]:
    """Do what there is to do with a model; on the way, rank 0 kills itself."""
    pl = training.use(host)

    class Dying(training.regression(pl)):  # type: ignore[misc]
        def die(self, here: str, batch_idx: int) -> None:
            now = (here, batch_idx) == (where, 1) and self.current_epoch >= (here in ("training", "validation"))
            if now and self.trainer.is_global_zero and self.trainer.world_size > 1:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_start(self) -> None:
            self.trainer.strategy.barrier()
            self.die("start", 1)
            self.trainer.strategy.barrier()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.die("training", batch_idx)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.die("sanity" if self.trainer.sanity_checking else "validation", batch_idx)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.die("test", batch_idx)

        def predict_step(self, batch: Any, batch_idx: int) -> None:
            self.die("predict", batch_idx)

        def show(self, *_: Any) -> None:
            """Rich draws in a thread, from time to time; here, nothing may be missing."""
            if getattr(bar, "progress", None) is not None:
                bar.progress.refresh()

        on_train_batch_end = on_validation_batch_end = on_test_batch_end = on_predict_batch_end = show

    bar = bar_of(pl, kind)
    trainer = training.trainer(pl, callbacks=[bar], enable_progress_bar=True, max_epochs=3, num_sanity_val_steps=4)
    model = Dying()
    trainer.fit(model, training.loader(40), [training.loader(23), training.loader(23)])
    trainer.validate(model, training.loader(23), verbose=False)
    trainer.test(model, training.loader(40), verbose=False)
    trainer.predict(model, training.loader(40))
    return {"enabled": getattr(bar, "is_enabled", None)}
