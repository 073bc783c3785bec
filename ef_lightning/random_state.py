"""The random generators of a worker, as bytes that run no code when they are read."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from ef_common.collectives.torch_codec import TENSORS
from ef_common.data.seeds import seed_python


def random_state() -> torch.Tensor:
    """What the generators of torch, NumPy and Python will give next; shape (bytes,), uint8."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if _has_cuda() else [],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys)), int(position), int(has_gauss), float(gauss)],
        "python": random.getstate(),
    }
    return torch.frombuffer(bytearray(TENSORS.dumps(state, what="random state")), dtype=torch.uint8)


def restore_random_state(saved: torch.Tensor, *, rank: int) -> None:
    """Go on where a generator stood. Only rank 0 does exactly that: what others draw must not be the same."""
    state: dict[str, Any] = TENSORS.loads(saved.numpy().tobytes())
    if rank == 0:
        torch.set_rng_state(state["torch"])
        if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
        kind, keys, *others = state["numpy"]
        np.random.set_state((kind, keys.numpy(), *others))
        random.setstate(state["python"])
        return
    digest = hashlib.blake2b(saved.numpy().tobytes(), digest_size=16).digest()
    seed = seed_python([*digest, rank]) >> 1
    torch.default_generator.manual_seed(seed)
    if _has_cuda():
        torch.cuda.manual_seed_all(seed)


class Generators:
    """The state of this process's random generators at one moment; for itself, and at once."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if _has_cuda() else []
        self._numpy = np.random.get_state(legacy=True)
        self._python = random.getstate()

    def restore(self) -> None:
        """Go back to it. May be repeated."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


def _has_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
