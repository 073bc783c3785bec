from __future__ import annotations

import numpy as np

from ef_common.demo.digits import HEIGHT, WIDTH, digits


def test_digits_are_the_same_for_a_seed_and_differ_by_their_label() -> None:
    images, labels = digits(2000, seed=3)
    again, _ = digits(2000, seed=3)
    assert images.shape == (2000, HEIGHT, WIDTH)
    assert np.array_equal(images, again)
    assert set(labels) == set(range(10))
    means = np.stack([images[labels == digit].mean(axis=0).ravel() for digit in range(10)])
    distances = np.linalg.norm(means[:, None] - means[None], axis=-1) + np.eye(10)
    assert distances.min() > 0.3  # of the noise alone it would be about 0.15 · √(2 · 80 / 200)
