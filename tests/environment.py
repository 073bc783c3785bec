"""The environment of the tests: the same in a login shell, in a job of a cluster and in CI."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

_BUILD = Path(__file__).parents[1] / "build"
_KEPT = (
    *("HOME", "KUBERNETES", "LANG", "LOGNAME", "PATH", "PWD", "SHELL", "TMPDIR", "USER", "XDG_CACHE_HOME"),
    *("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_VISIBLE_DEVICES"),
    *("CC", "CI", "CXX", "HOROVOD_CMAKE", "PYTHONPATH", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV"),
)
_KEPT_PREFIXES = ("PIP_", "PYTEST_", "SSL_", "UV_")
_SET = {
    # The tests share the cores; threads of a library would only wait for each other.
    "OMP_NUM_THREADS": "1",
    # Read by gcsfs when it is imported: else it asks a gRPC server, which no emulator has, for the kind of bucket.
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    # A run of the tests leaves nothing behind outside of build/.
    "HYPOTHESIS_STORAGE_DIRECTORY": str(_BUILD / "hypothesis"),
    "KERAS_HOME": str(_BUILD / "keras"),
    "MPLCONFIGDIR": str(_BUILD / "matplotlib"),
    "PYTHONDONTWRITEBYTECODE": "1",
}


def clean(environ: MutableMapping[str, str]) -> None:
    """Keep what says where things are. What a scheduler, a launcher or a user has set for trainings goes."""
    for name in list(environ):
        if name not in _KEPT and not name.startswith(_KEPT_PREFIXES):
            del environ[name]
    environ.update(_SET)
