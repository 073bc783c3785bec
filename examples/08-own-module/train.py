"""A LightningModule as you have it already, with the callbacks and loggers that people hang on a Trainer."""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, callbacks, loggers, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from ef_lightning import ElasticFlowStrategy


class Digits(LightningDataModule):
    def __init__(self, batch_size: int):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
        data = TensorDataset(images, torch.tensor(digits.target))
        self.parts = random_split(data, [1296, 201, 300], generator=torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.parts[0], self.batch_size, shuffle=True, num_workers=1, persistent_workers=True)

    def val_dataloader(self):
        return DataLoader(self.parts[1], self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.parts[2], self.batch_size)


class Classifier(LightningModule):
    def __init__(self, width: int = 128, learning_rate: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            *(nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)),
            nn.Linear(width, 10),
        )
        metrics = {"accuracy": MulticlassAccuracy(10, average="micro"), "f1": MulticlassF1Score(10)}
        self.val_metrics = MetricCollection(metrics, prefix="val_")
        self.test_metrics = MetricCollection(metrics, prefix="test_")

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), prog_bar=True)
        self.val_metrics(self(batch[0]), batch[1])
        self.log_dict(self.val_metrics)

    def test_step(self, batch, batch_idx):
        self.test_metrics(self(batch[0]), batch[1])
        self.log_dict(self.test_metrics)

    def loss(self, batch):
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.learning_rate, momentum=0.9, weight_decay=1e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
        return [optimizer], [scheduler]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per worker and step")
    parser.add_argument("--directory", type=Path, default=Path("build/own-module"), help="for logs and checkpoints")
    args = parser.parse_args()

    seed_everything(1, workers=True)
    best = callbacks.ModelCheckpoint(args.directory / "best", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = Trainer(
        strategy=ElasticFlowStrategy(),  # the one line
        accelerator="cpu",
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        default_root_dir=args.directory,
        callbacks=[
            best,
            callbacks.EarlyStopping("val_loss", patience=5),
            callbacks.LearningRateMonitor("step"),
            callbacks.EMAWeightAveraging(decay=0.9),
            callbacks.GradientAccumulationScheduler({0: 1, 4: 2}),
            callbacks.Timer(),
            callbacks.RichModelSummary(),
            callbacks.RichProgressBar(),
        ],
        logger=[loggers.CSVLogger(args.directory, "csv"), loggers.TensorBoardLogger(args.directory, "tensorboard")],
    )
    data = Digits(args.batch_size)
    trainer.fit(Classifier(), data)
    (result,) = trainer.test(Classifier.load_from_checkpoint(best.best_model_path), data, verbose=False)
    if trainer.is_global_zero:
        print(f"best checkpoint: {best.best_model_path}")
        print(f"test accuracy: {result['test_accuracy']:.3f}, f1: {result['test_f1']:.3f}")


if __name__ == "__main__":
    main()
