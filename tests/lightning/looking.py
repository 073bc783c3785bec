"""A training in which a callback looks into the Trainer's loaders: in rank 0 alone, as one that logs images does."""

from __future__ import annotations

from typing import Any

from tests.lightning import training

LENGTH, EPOCHS = 64, 2


def run(host: str) -> dict[str, Any]:
    """Train in rank 0 and rank 1, where rank 0 looks."""
    pl = training.use(host)
    trained: list[list[int]] = [[] for _ in range(EPOCHS)]
    validated: list[list[int]] = []
    looked: list[int] = []

    class Seen(training.regression(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            trained[self.current_epoch] += batch[0].tolist()
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if not self.trainer.sanity_checking:
                validated[-1].extend(batch[0].tolist())

        def on_validation_epoch_start(self) -> None:
            validated.append([])

    class Looking(pl.Callback):  # type: ignore[misc, name-defined]
        def look(self, trainer: Any) -> None:
            if trainer.is_global_zero and not trainer.sanity_checking:
                looked.append(len(next(iter(trainer.train_dataloader))[0]))
                looked.append(sum(len(batch[0]) for batch in trainer.val_dataloaders))

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.look(trainer)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                self.look(trainer)

        def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.look(trainer)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.look(trainer)

    trainer = training.trainer(pl, callbacks=[Looking()], max_epochs=EPOCHS)
    trainer.fit(Seen(), training.loader(LENGTH, shuffle=True, num_workers=1), training.loader(LENGTH))
    return {"trained": trained, "validated": validated[1:], "looked": looked, "steps": trainer.global_step}
