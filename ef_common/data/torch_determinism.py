"""The torch settings that make one process compute the same bits as another."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ef_common.data.seeds import seed_python


class Determinism:
    """Sets torch up for determinism; `undo` restores the previous settings.

    Sums within one operation depend on the number of threads, so each worker computes in one; give each core a worker.
    On a GPU, an operation without a deterministic kernel raises torch's own error, which names it.
    """

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self._algorithms = torch.are_deterministic_algorithms_enabled()
        self._benchmark = torch.backends.cudnn.benchmark
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS may choose among algorithms

    def undo(self) -> None:
        """Restore the previous settings."""
        torch.set_num_threads(self._threads)
        torch.use_deterministic_algorithms(self._algorithms)
        torch.backends.cudnn.benchmark = self._benchmark


def seed_everything(key: Sequence[int]) -> None:
    """Make the random numbers of torch, NumPy and Python a function of the key from here on."""
    seed_torch(seed_python(key))


def seed_torch(seed: int) -> None:
    """Seed torch's generators: the CPU's, and those of the GPUs if they are in use."""
    # Not `torch.manual_seed`: where CUDA is not in use, it notes down a traceback each time, for when it will be.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def torch_states() -> list[torch.Tensor]:
    """The states of torch's generators: the CPU's, then those of the GPUs if they are in use."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if in_use else ())]


def set_torch_states(states: Sequence[torch.Tensor]) -> None:
    """Restore these states; those of GPUs only if the number of GPUs is the same."""
    cpu, *cuda = states
    torch.set_rng_state(cpu)
    if cuda and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
