"""A small CNN on scikit-learn's handwritten digits: plain Lightning, and one line that makes it elastic."""

import argparse
import time

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from ef_lightning import ElasticFlowStrategy


class DigitClassifier(LightningModule):
    def __init__(self, step_seconds: float = 0.0):
        super().__init__()
        self.step_seconds = step_seconds
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
            nn.Linear(32 * 4 * 4, 10),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch, batch_idx):
        time.sleep(self.step_seconds)  # a heavier model, so that there is time to kill and to join
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val_accuracy")

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test_accuracy")

    def evaluate(self, batch, name):
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log(name, self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.002)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per worker and step")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="artificial time that a step takes")
    args = parser.parse_args()

    digits = load_digits()  # 1,797 real images of 8×8 pixels, part of scikit-learn
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train, val, test = random_split(data, [1297, 200, 300], generator=torch.Generator().manual_seed(0))

    trainer = Trainer(
        strategy=ElasticFlowStrategy(),  # the one line
        max_epochs=args.epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
    )
    model = DigitClassifier(args.step_seconds)
    trainer.fit(model, DataLoader(train, args.batch_size, shuffle=True), DataLoader(val, 50))
    (result,) = trainer.test(model, DataLoader(test, 50), verbose=False)
    if trainer.is_global_zero:
        print(f"test accuracy: {result['test_accuracy']:.3f}")


if __name__ == "__main__":
    main()
