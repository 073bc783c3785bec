"""What each worker does: a small ResNet on scikit-learn's handwritten digits, in plain Lightning."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from ef_lightning import Compensation, ElasticFlowStrategy

BATCH_SIZE = 16  # of one worker; the learning rate is meant for it
NUM_SAMPLES = (997, 300, 500)  # training, validation, test
PACE_S = 0.3
GATE_POLL_S = 0.02


@dataclass(frozen=True)
class Options:
    """A training, as all its workers know it.

    Args:
        learning_rate: For a batch of `BATCH_SIZE`.
        rule: Of the compensation.
        ramp_steps: The same.
        global_batch_size: Samples of an update, or None for `BATCH_SIZE` from each worker.
        changes: Fractions of the samples, and the world size from there on.
        held_out: What the accuracy is measured on after each epoch, "validation" or "test".
        gate: The worker waits until this file is there; none if empty.
    """

    epochs: int
    seed: int
    learning_rate: float
    rule: str
    ramp_steps: int
    global_batch_size: int | None
    changes: list[tuple[float, int]]
    held_out: str = "test"
    gate: str = ""

    @property
    def compensation(self) -> Compensation:
        return Compensation(self.rule, reference_batch_size=BATCH_SIZE, ramp_steps=self.ramp_steps)

    @property
    def num_samples(self) -> int:
        return self.epochs * NUM_SAMPLES[0]


class Block(nn.Module):
    def __init__(self, before: int, channels: int):
        super().__init__()
        stride = channels // before
        self.body = nn.Sequential(
            *(nn.Conv2d(before, channels, 3, stride, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()),
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)),
        )
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(before, channels, 1, stride, bias=False)

    def forward(self, images):
        return torch.relu(self.body(images) + self.shortcut(images))


class ResNet(LightningModule):
    """24,000 parameters."""

    def __init__(self, options: Options):
        super().__init__()
        self.options = options
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(Block(16, 16), Block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.options.learning_rate, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.options.epochs)]


class Curve(Callback):
    """Keeps the accuracy after each epoch."""

    def __init__(self):
        self.accuracy: list[float] = []

    def on_validation_end(self, trainer, module):
        self.accuracy.append(float(trainer.callback_metrics["accuracy"]))


class Pace(Callback):
    """Has everybody wait before each step while a change of the world is due that has not come yet.

    The training is so fast that it would be over before a newcomer is there. So changes come where they are meant
    to, a few steps later at most, however busy the machine is.
    """

    def __init__(self, options: Options):
        self.options = options
        self.num_seen = 0

    def state_dict(self):  # a newcomer goes on from there
        return {"num_seen": self.num_seen}

    def load_state_dict(self, state):
        self.num_seen = state["num_seen"]

    def on_train_epoch_start(self, trainer, module):
        self.num_seen = trainer.current_epoch * NUM_SAMPLES[0]

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        due = [size for fraction, size in self.options.changes if self.num_seen >= fraction * self.options.num_samples]
        if due and trainer.world_size != due[-1]:
            time.sleep(PACE_S)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.num_seen += self.options.global_batch_size or BATCH_SIZE * trainer.world_size


def load_data() -> dict[str, Dataset]:
    """1,797 real images of 8×8 pixels, part of scikit-learn; the split is the same in all runs."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    parts = random_split(data, NUM_SAMPLES, generator=torch.Generator().manual_seed(0))
    return dict(zip(("training", "validation", "test"), parts, strict=True))


def train(options: Options) -> list[float]:
    """Train as one worker; returns the accuracy after each epoch that it has taken part in."""
    seed_everything(options.seed, verbose=False)
    data, curve, model = load_data(), Curve(), ResNet(options)
    while options.gate and not Path(options.gate).exists():
        time.sleep(GATE_POLL_S)
    trainer = Trainer(
        strategy=ElasticFlowStrategy(compensation=options.compensation, global_batch_size=options.global_batch_size),
        max_epochs=options.epochs,
        accelerator="cpu",
        callbacks=[curve, Pace(options)],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        model,
        DataLoader(data["training"], BATCH_SIZE, shuffle=True),
        DataLoader(data[options.held_out], 100),
    )
    return curve.accuracy
