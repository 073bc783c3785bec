"""A small CNN on scikit-learn's handwritten digits: a model, a `forward` that returns the cost, and nothing else."""

import argparse
import time
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn

import elasticflow as ef


def model():
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
        nn.Linear(32 * 4 * 4, 10),
    )
    return {"net": net, "optimizer": partial(torch.optim.Adam, lr=0.002)}


def forward(images, labels, params, step_seconds=0.0):
    time.sleep(step_seconds)  # a heavier model, so that there is time to kill and to join
    outputs = params["net"](images)
    accuracy = (outputs.argmax(1) == labels).float().mean()
    return {"loss": nn.functional.cross_entropy(outputs, labels), "accuracy": accuracy}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per worker and step")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="artificial time that a step takes")
    args = parser.parse_args()

    digits = load_digits()  # 1,797 real images of 8×8 pixels, part of scikit-learn
    order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    labels = torch.tensor(digits.target)[order]

    result = ef.train(
        model,
        partial(forward, step_seconds=args.step_seconds),
        data=(images[:1297], labels[:1297]),
        validation=(images[1297:], labels[1297:]),
        epochs=args.epochs,
        batch_size=args.batch_size,
        accelerator="cpu",
    )
    print(f"test accuracy: {result.metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
