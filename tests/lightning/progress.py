"""A training with a progress bar, and whose rank 0 may die."""

from __future__ import annotations

import os
import signal
from typing import Any

from tests.lightning import training


def run(host: str, kind: str, where: str) -> dict[str, Any]:
    """Train twice. In the second epoch of the first time, rank 0 kills itself."""
    pl = training.use(host)

    class Dying(training.regression(pl)):  # type: ignore[misc]
        def die(self, here: str, batch_idx: int) -> None:
            place = (here, batch_idx, self.current_epoch)
            if place == (where, 1, 1) and self.trainer.is_global_zero and self.trainer.world_size > 1:
                os.kill(os.getpid(), signal.SIGKILL)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.die("training", batch_idx)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.die("validation", batch_idx)

    bar = {
        "tqdm": lambda: pl.callbacks.TQDMProgressBar(),
        "rich": lambda: pl.callbacks.RichProgressBar(console_kwargs={"force_terminal": True}),
    }[kind]()
    trainer = training.trainer(pl, callbacks=[bar], enable_progress_bar=True, max_epochs=3)
    trainer.fit(Dying(), training.loader(40), training.loader(23))
    trainer.validate(Dying(), training.loader(23), verbose=False)
    return {"enabled": bar.is_enabled}
