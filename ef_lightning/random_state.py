"""A worker's random generators, as bytes whose reading executes no code."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from ef_common.collectives.torch_codec import TENSORS
from ef_common.data.seeds import python_states, set_python_states
from ef_common.data.torch_determinism import seed_everything, set_torch_states, torch_states


def random_state() -> torch.Tensor:
    """The states of the generators of torch, NumPy and Python; shape (bytes,), uint8."""
    state = _states()
    state["numpy"][1] = torch.from_numpy(state["numpy"][1])
    return torch.frombuffer(bytearray(TENSORS.dumps(state, what="random state")), dtype=torch.uint8)


def restore_random_state(saved: torch.Tensor, *, rank: int) -> None:
    """Continue from a generator's state. Only rank 0 does so exactly: the others must draw different numbers."""
    encoded = saved.numpy().tobytes()
    if rank == 0:
        _restore(TENSORS.loads(encoded))
    else:
        seed_everything([*hashlib.blake2b(encoded, digest_size=16).digest(), rank])


class Generators:
    """The state of this process's random generators at one moment, for restoring it in this process."""

    def __init__(self) -> None:
        self._states = _states()

    def restore(self) -> None:
        """Restore this state. May be repeated."""
        _restore(self._states)


def _states() -> dict[str, Any]:
    cpu, *cuda = torch_states()
    return {"torch": cpu, "cuda": cuda, **python_states()}


def _restore(states: dict[str, Any]) -> None:
    set_torch_states([states["torch"], *states["cuda"]])
    set_python_states(states)
