"""The gradient noise scale: up to which global batch a larger one still saves updates.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv 1812.06162), call it the simple noise scale

    φ = tr(Σ) / |G|²,

where G is the gradient of the loss and Σ the covariance of the gradients of single samples. An update with a batch well
below φ is dominated by noise, so twice the batch is worth nearly two updates; well above φ it is worth little more than
one. Data-parallel training has what it needs to estimate φ in each update: the mean |g_b|² of the squared norms of the
workers' gradients over b samples each, and the squared norm |g_B|² of their mean, over B = k·b samples (appendix A.1):

    |G|²  ≈  (B·|g_B|² − b·|g_b|²) / (B − b)          tr(Σ)  ≈  (|g_b|² − |g_B|²) / (1/b − 1/B)

Both are unbiased. Their ratio is not, and single updates are very noisy, so both are smoothed before they are divided.
It costs one number in an exchange that is made anyway, for |g_b|²; each worker has the mean gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_FADE = 0.995  # about the last two hundred updates count
_FEWEST = 50  # updates below which nothing is said


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The smoothed estimates of a run, as a value.

    Args:
        gradient: Fading sum of the estimates of |G|².
        noise: Fading sum of the estimates of tr(Σ).
        num_updates: How many estimates there were.

    >>> scale = NoiseScale()
    >>> for _ in range(50):  # |G|² = 4 and tr(Σ) = 800
    ...     scale = scale.with_update(4 + 800 / 32, 4 + 800 / 128, local_batch=32, num_workers=4)
    >>> round(scale.samples, 6)
    200.0
    """

    gradient: float = 0.0
    noise: float = 0.0
    num_updates: int = 0

    def with_update(
        self, local_squared: float, global_squared: float, *, local_batch: float, num_workers: int
    ) -> NoiseScale:
        """The estimates after one more update; the same if the update tells nothing.

        Args:
            local_squared: Mean over the workers of the squared norm of their mean gradient.
            global_squared: Squared norm of the mean gradient of all samples.
            local_batch: Samples of a worker in the update, on average.
            num_workers: How many workers took part; one of them alone tells nothing.
        """
        if num_workers < 2 or not (local_batch > 0 and math.isfinite(local_squared) and math.isfinite(global_squared)):
            return self
        global_batch = num_workers * local_batch
        gradient = (global_batch * global_squared - local_batch * local_squared) / (global_batch - local_batch)
        noise = (local_squared - global_squared) / (1 / local_batch - 1 / global_batch)
        if not (math.isfinite(gradient) and math.isfinite(noise)):
            return self
        return NoiseScale(_FADE * self.gradient + gradient, _FADE * self.noise + noise, self.num_updates + 1)

    @property
    def samples(self) -> float | None:
        """φ in samples; None while it is unknown: few updates, or no sign of a gradient beyond the noise."""
        if self.num_updates < _FEWEST or self.gradient <= 0:
            return None
        scale = max(0.0, self.noise) / self.gradient
        return scale if math.isfinite(scale) else None


def efficiency(noise_scale: float, batch_size: float, reference: float) -> float:
    """The progress of a sample in a batch, relative to one in a reference batch: (φ + M₀) / (φ + M).

    Qiao et al. 2021, "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", equation 3.

    >>> efficiency(1000.0, 3000, 1000), efficiency(1e9, 3000, 1000) > 0.999, efficiency(0.0, 3000, 1000)
    (0.5, True, 0.3333333333333333)
    """
    return (noise_scale + reference) / (noise_scale + batch_size)
