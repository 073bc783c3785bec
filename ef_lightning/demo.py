"""The program of `elasticflow demo`: a small network learns digits in plain Lightning; the strategy makes it elastic.

It is a program like that of any user: `elasticflow run --nproc-per-node=2 -m ef_lightning.demo`.
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ef_common.demo import options
from ef_common.demo.digits import digits
from ef_lightning import ElasticFlowStrategy

try:
    from lightning.pytorch import LightningModule, Trainer
except ModuleNotFoundError:
    from pytorch_lightning import LightningModule, Trainer  # type: ignore[assignment]

Batch = tuple[torch.Tensor, torch.Tensor]


class Classifier(LightningModule):
    """Two convolutions and a linear layer.

    Args:
        step_s: Seconds that a step takes longer, as that of a heavier model does.
    """

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()),
            nn.Linear(32 * 5 * 4, 10),
        )

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        time.sleep(self.step_s)
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        right = self.net(images).argmax(dim=1) == labels
        self.log("test_accuracy", right.float().mean(), batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.005)


def data(num_samples: int, *, seed: int) -> TensorDataset:
    """Digits as tensors, images of shape (num_samples, 1, height, width)."""
    images, labels = digits(num_samples, seed=seed)
    return TensorDataset(torch.tensor(images).unsqueeze(1), torch.tensor(labels))


def main() -> None:
    """Train, test, and print the accuracy."""
    args = options.parse(__doc__)
    trainer = Trainer(
        strategy=ElasticFlowStrategy(),  # the one line
        max_epochs=args.epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier(args.step_s)
    trainer.fit(model, DataLoader(data(args.samples, seed=0), args.batch_size, shuffle=True))
    (result,) = trainer.test(model, DataLoader(data(500, seed=1), 50), verbose=False)
    if trainer.is_global_zero:
        print(f"test accuracy: {result['test_accuracy']:.3f}")


if __name__ == "__main__":
    main()
