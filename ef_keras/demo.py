"""The program of `elasticflow demo`: a small network learns digits in plain Keras; the callbacks make it elastic.

It is a program like that of any user: `elasticflow run --nproc-per-node=2 -m ef_keras.demo`.
"""

from __future__ import annotations

import time

import keras

import ef_keras
from ef_common.demo import options
from ef_common.demo.digits import HEIGHT, WIDTH, digits


def main() -> None:
    """Train, test, and print the accuracy."""
    args = options.parse(__doc__)
    images, labels = digits(args.samples, seed=0)
    test_images, test_labels = digits(500, seed=1)
    model = keras.Sequential(
        [
            keras.layers.Input((HEIGHT, WIDTH, 1)),
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
    model.compile(keras.optimizers.Adam(0.005), loss, metrics=["accuracy"])
    slower = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: time.sleep(args.step_s))
    model.fit(
        images[..., None],
        labels,
        batch_size=args.batch_size,
        epochs=args.epochs,
        callbacks=[slower, *ef_keras.callbacks()],  # the one argument
        verbose=0,
    )
    results = model.evaluate(
        test_images[..., None], test_labels, callbacks=ef_keras.callbacks(), verbose=0, return_dict=True
    )
    if ef_keras.is_rank_zero():
        print(f"test accuracy: {results['accuracy']:.3f}")


if __name__ == "__main__":
    main()
