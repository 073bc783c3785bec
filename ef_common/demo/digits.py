"""The demo's data, which need no download: digits of a dot-matrix display, moved, dimmed and noisy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

HEIGHT, WIDTH = 10, 8
_ROWS, _COLUMNS = 7, 5
_NOISE = 0.15
# Seven rows of a digit, from the top; the five low bits of a row are its dots.
_FONT = """
    0E11131519110E 040C040404040E 0E11010204081F 1F02040201110E 02060A121F0202
    1F101E0101110E 0608101E11110E 1F010204080808 0E11110E11110E 0E11110F01020C
"""


def digits(num_samples: int, *, seed: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Draw digits.

    Args:
        num_samples: How many.
        seed: Seed of the random numbers; the same seed gives the same digits.

    Returns:
        Images of shape (num_samples, HEIGHT, WIDTH), and labels of shape (num_samples,), from 0 to 9.
    """
    rng = np.random.default_rng(seed)
    font = np.array([list(bytes.fromhex(rows)) for rows in _FONT.split()], np.uint8)
    dots = np.unpackbits(font[..., None], axis=-1)[..., -_COLUMNS:]
    labels = rng.integers(10, size=num_samples)
    images = rng.normal(0.0, _NOISE, (num_samples, HEIGHT, WIDTH)).astype(np.float32)
    tops = rng.integers(HEIGHT - _ROWS + 1, size=num_samples)
    lefts = rng.integers(WIDTH - _COLUMNS + 1, size=num_samples)
    brightness = rng.uniform(0.5, 1.0, num_samples)
    for image, label, top, left, bright in zip(images, labels, tops, lefts, brightness, strict=True):
        image[top : top + _ROWS, left : left + _COLUMNS] += bright * dots[label]
    return images, labels
