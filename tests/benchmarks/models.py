"""The models and data of the benchmarks."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 8
_DEPTH = 8
_WIDTHS = {"tiny": 16, "50k": 80, "2m": 500, "33m": 2048}
SIZES = tuple(_WIDTHS)


def mlp(size: str) -> nn.Sequential:
    """An MLP of eight hidden layers with about as many parameters as `size` says."""
    width = _WIDTHS[size]
    hidden = [layer for _ in range(_DEPTH) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), *hidden, nn.Linear(width, 4))


def state_bytes(size: str) -> int:
    """Bytes of a model's weights and of its optimizer's momenta."""
    with torch.device("meta"):
        model = mlp(size)
    return 2 * sum(p.numel() * p.element_size() for p in model.parameters())


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum: as little arithmetic as a real optimizer has."""
    return torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)


def loader(num_samples: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """So many samples in batches of `BATCH_SIZE`; all equal, so that they take no memory."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 16, generator=generator).expand(num_samples, 16)
    targets = torch.zeros(1, dtype=torch.long).expand(num_samples)
    return DataLoader(TensorDataset(inputs, targets), BATCH_SIZE, shuffle=True)
