"""Validation, test and prediction in workers: what they log can be computed by hand from the data."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from tests.lightning import training

VAL_LENGTHS = (53, 2)  # the second one is smaller than the world
TEST_LENGTH = 31
PREDICT_LENGTH = 23


def run(host: str) -> dict[str, Any]:
    """Fit with validation, then validate, test and predict, with the same Trainer and with another one."""
    pl = training.use(host)
    module = _module(pl)
    validation = [training.loader(n) for n in VAL_LENGTHS]
    first = training.trainer(pl, callbacks=[_writer(pl)("epoch")])
    first.fit(module, training.loader(29, shuffle=True), validation)
    fitted = _numbers(first.callback_metrics)
    lengths = list(first.num_val_batches)
    second = training.trainer(pl, callbacks=[_writer(pl)("batch")])
    writer = second.callbacks[0]
    module.by_hand = []
    tested = [_numbers(m) for m in first.test(module, _test_loader(), verbose=False)]
    results = {
        "collected": list(module.collected),
        "after_batches": module.after_batches,
        "test": tested,
        "rank": first.global_rank,
        "fit": fitted,
        "lengths": lengths,
        "validate": [_numbers(m) for m in first.validate(module, validation, verbose=False)],
        "test_by_another": [_numbers(m) for m in second.test(module, _test_loader(), verbose=False)],
        "by_hand": module.by_hand,
        "predicted": _indices(first.predict(module, training.loader(PREDICT_LENGTH))),
        "predicted_by_another": _indices(
            second.predict(module, training.loader(PREDICT_LENGTH), return_predictions=True)
        ),
        "nothing_returned": second.predict(module, training.loader(PREDICT_LENGTH), return_predictions=False),
        "written": writer.written,
        "written_at_the_end": first.callbacks[0].written,
        "one_batch_each": _numbers(_limited(pl, module, 1)),
        "half": _numbers(_limited(pl, module, 0.5)),
    }
    return results


def _limited(pl: Any, module: Any, limit: float) -> Any:
    trainer = training.trainer(pl, limit_test_batches=limit)
    return trainer.test(module, training.loader(TEST_LENGTH, 1), verbose=False)[0]


def _test_loader() -> Any:
    return training.loader(TEST_LENGTH, batch_size=1)


def _module(pl: Any) -> Any:
    from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, SumMetric

    class Evaluated(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()
            self.several = MetricCollection({"sum": SumMetric(), "max": MaxMetric()})
            self.all = CatMetric()
            self.afterwards = SumMetric()
            self.by_hand: list[Any] = []
            self.collected: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train_index", batch[0].double().mean(), on_step=True, on_epoch=True, sync_dist=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            index = batch[0].double()
            assert not self.training
            self.log("on_step", index.mean(), on_step=True, on_epoch=True, sync_dist=True)
            self.log("total", index.sum(), reduce_fx="sum", sync_dist=True)
            self.log("least", index.min(), reduce_fx="min", sync_dist=True)
            self.log("largest", index.max(), reduce_fx="max", sync_dist=True)
            self.log("given", index.mean(), batch_size=len(index), sync_dist=True)
            if batch_idx % 2 == 1:
                self.log("sometimes", index.mean(), sync_dist=True)

        def on_test_epoch_start(self) -> None:
            self.all.reset()
            self.afterwards.reset()
            self.collected.clear()

        def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.afterwards.update(batch[0].double())

        def test_step(self, batch: Any, batch_idx: int) -> None:
            index = batch[0].double()
            if not self.trainer.strategy.padding:
                self.collected += batch[0].tolist()
            self.mean(index)
            self.log("mean", self.mean)
            self.several(index)
            self.log_dict(self.several)
            self.all.update(index)
            self.log("count", float(len(index)), reduce_fx="sum", sync_dist=True)
            self.log("step", index.mean(), on_step=True, on_epoch=False, sync_dist=True)

        def on_test_epoch_end(self) -> None:
            self.by_hand.append(sorted(self.all.compute().flatten().tolist()))
            self.after_batches = float(self.afterwards.compute())

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return batch[0]

    return Evaluated()


def _writer(pl: Any) -> Any:
    base = importlib.import_module(f"{pl.__name__}.callbacks").BasePredictionWriter

    class Writer(base):  # type: ignore[misc, valid-type]
        def __init__(self, interval: str) -> None:
            super().__init__(interval)
            self.written: list[Any] = []

        def write_on_batch_end(
            self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *rest: Any
        ) -> None:
            self.written.append([prediction.tolist(), list(batch_indices)])

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
            flat = [index for loader in batch_indices for index in loader]
            self.written += [[p.tolist(), list(i)] for p, i in zip(predictions, flat, strict=True)]

    return Writer


def _indices(batches: Any) -> list[int]:
    return torch.cat(batches).tolist() if batches else []


def _numbers(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
