"""The torch settings that make one process compute the same bits as another."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ef_common.data.seeds import seed_python


class Determinism:
    """Puts torch's settings in place; `undo` brings back what was there.

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
        """Bring back what was there."""
        torch.set_num_threads(self._threads)
        torch.use_deterministic_algorithms(self._algorithms)
        torch.backends.cudnn.benchmark = self._benchmark


def seed_everything(key: Sequence[int]) -> None:
    """Let the random numbers of torch, NumPy and Python be a function of the key from here on."""
    seed = seed_python(key)
    # Not `torch.manual_seed`: where CUDA is not in use, it notes down a traceback each time, for when it will be.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def torch_states() -> list[torch.Tensor]:
    """What torch's generators will give next: the one of the CPU, then those of the GPUs, if they are in use."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if in_use else ())]


def set_torch_states(states: Sequence[torch.Tensor]) -> None:
    """Let them go on from there; those of GPUs only if there are as many."""
    cpu, *cuda = states
    torch.set_rng_state(cpu)
    if cuda and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
