"""A small CNN on scikit-learn's handwritten digits: plain Keras, and one argument that makes it elastic."""

import argparse
import time

import keras
import numpy as np
from sklearn.datasets import load_digits

import ef_keras


class Slower(keras.callbacks.Callback):
    """A heavier model, so that there is time to kill and to join."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(self.seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per worker and step")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="artificial time that a step takes")
    args = parser.parse_args()

    digits = load_digits()  # 1,797 real images of 8×8 pixels, part of scikit-learn
    order = np.random.default_rng(0).permutation(len(digits.images))
    images, labels = digits.images[order, :, :, None].astype("float32") / 16, digits.target[order]

    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.002), loss, metrics=["accuracy"])
    model.fit(
        images[:1297],
        labels[:1297],
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=(images[1297:1497], labels[1297:1497]),
        callbacks=[Slower(args.step_seconds), *ef_keras.callbacks()],  # the one argument
        verbose=2,
    )
    results = model.evaluate(images[1497:], labels[1497:], callbacks=ef_keras.callbacks(), verbose=0, return_dict=True)
    print(f"test accuracy: {results['accuracy']:.3f}")


if __name__ == "__main__":
    main()
