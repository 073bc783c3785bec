"""What compensated training must give, written down in NumPy: without the packages, and without a framework.

The model is a linear regression with the mean squared error: y = X·w[:-1] + w[-1]. A training is a sequence of
updates, each with the samples in it, and with the ratio of its global batch and the reference batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Vector = np.ndarray


@dataclass(frozen=True)
class Regression:
    """A problem.

    Args:
        features: Shape (samples, features).
        targets: Shape (samples,).
        start: Weights, and the bias behind them; shape (features + 1,).
    """

    features: np.ndarray
    targets: np.ndarray
    start: Vector

    def gradient(self, weights: Vector, samples: Sequence[int]) -> Vector:
        """Of the mean over these samples; of none, if those who had them are lost."""
        if not len(samples):
            return np.zeros_like(weights)
        inputs = np.column_stack([self.features[samples], np.ones(len(samples))]).astype(np.float64)
        errors = inputs @ weights - self.targets[samples].astype(np.float64)
        return 2 * inputs.T @ errors / len(samples)


def ramped(goals: Sequence[float], ramp_steps: int) -> list[float]:
    """Ratio of each update: γ_old + (γ_new − γ_old) · min(1, (t − t₀)/T), where t₀ is the last update before."""
    found = [float(goals[0])]
    old, since = found[0], 0
    for t in range(1, len(goals)):
        if goals[t] != goals[t - 1]:
            old, since = found[-1], t - 1
        part = 1.0 if ramp_steps == 0 else min(1.0, (t - since) / ramp_steps)
        found.append(old + (goals[t] - old) * part)
    return found


def sgd(
    problem: Regression,
    batches: Sequence[Sequence[int]],
    ratios: Sequence[float],
    rates: Sequence[float | Vector],
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    rate_in_momentum: bool = False,
) -> Vector:
    """SGD with the linear rule.

    Args:
        problem: The problem.
        batches: Samples of each update.
        ratios: Of each update.
        rates: Of each update, as a schedule says. One may be a vector: a rate for each weight.
        momentum: Of the gradients.
        nesterov: Look ahead.
        weight_decay: As a part of the gradient.
        rate_in_momentum: The momentum keeps the rates that its gradients came with, as Keras's does; it makes a
            difference only if a schedule changes them.
    """
    weights, buffer = problem.start.astype(np.float64), np.zeros(len(problem.start))
    for samples, ratio, rate in zip(batches, ratios, rates, strict=True):
        gradient = problem.gradient(weights, samples) + weight_decay * weights
        if rate_in_momentum:
            gradient, rate = rate * gradient, 1.0
        buffer = momentum * buffer + gradient
        step = gradient + momentum * buffer if nesterov else buffer
        weights = weights - ratio * rate * step
    return weights


def adamw(
    problem: Regression,
    batches: Sequence[Sequence[int]],
    ratios: Sequence[float],
    rates: Sequence[float | Vector],
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Vector:
    """AdamW with the square-root rule."""
    weights = problem.start.astype(np.float64)
    first, second = np.zeros(len(weights)), np.zeros(len(weights))
    for t, (samples, k, rate) in enumerate(zip(batches, ratios, rates, strict=True), start=1):
        gradient = problem.gradient(weights, samples)
        beta1, beta2 = (
            max(min(beta, least), 1 - k * (1 - beta)) for beta, least in zip(betas, (0.5, 0.9), strict=True)
        )
        eta, epsilon, decay = np.sqrt(k) * rate, eps / np.sqrt(k), np.sqrt(k) * weight_decay
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        corrected = first / (1 - beta1**t), second / (1 - beta2**t)
        weights = weights - eta * decay * weights - eta * corrected[0] / (np.sqrt(corrected[1]) + epsilon)
    return weights


def rmsprop(
    problem: Regression,
    batches: Sequence[Sequence[int]],
    ratios: Sequence[float],
    rates: Sequence[float | Vector],
    *,
    rho: float = 0.9,
    eps: float = 1e-7,
    momentum: float = 0.0,
) -> Vector:
    """RMSprop with the square-root rule. Epsilon is under the root, as Keras has it; the momentum is without a rate."""
    weights = problem.start.astype(np.float64)
    second, buffer = np.zeros(len(weights)), np.zeros(len(weights))
    for samples, k, rate in zip(batches, ratios, rates, strict=True):
        gradient = problem.gradient(weights, samples)
        decay = max(min(rho, 0.9), 1 - k * (1 - rho))
        second = decay * second + (1 - decay) * gradient**2
        buffer = momentum * buffer + gradient / np.sqrt(second + eps / k)
        weights = weights - np.sqrt(k) * rate * buffer
    return weights
