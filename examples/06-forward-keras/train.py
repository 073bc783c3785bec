"""A small CNN on scikit-learn's handwritten digits: a model, a `forward` that returns the cost, and nothing else."""

import argparse
import time

import keras
import numpy as np
from sklearn.datasets import load_digits

import elasticflow as ef


def model():
    net = keras.Sequential(
        [
            keras.layers.Conv2D(16, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    return {"net": net, "optimizer": keras.optimizers.Adam(0.002)}


def forward(images, labels, params):
    outputs = params["net"](images)
    losses = keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)
    hits = keras.metrics.sparse_categorical_accuracy(labels, outputs)
    return {"loss": keras.ops.mean(losses), "accuracy": keras.ops.mean(hits)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per worker and step")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="artificial time that a step takes")
    args = parser.parse_args()

    digits = load_digits()  # 1,797 real images of 8×8 pixels, part of scikit-learn
    order = np.random.default_rng(0).permutation(len(digits.images))
    images, labels = digits.images[order, :, :, None].astype("float32") / 16, digits.target[order]

    # A heavier model, so that there is time to kill and to join.
    slower = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: time.sleep(args.step_seconds))
    result = ef.train(
        model,
        forward,
        data=(images[:1297], labels[:1297]),
        validation=(images[1297:], labels[1297:]),
        epochs=args.epochs,
        batch_size=args.batch_size,
        callbacks=[slower],
        verbose=2,
    )
    print(f"test accuracy: {result.metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
