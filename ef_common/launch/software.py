"""The versions of the software on which it depends whether workers compute the same."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from ef_common import __version__

_FRAMEWORKS = {
    "torch": "torch",
    "lightning": "lightning",
    "pytorch_lightning": "pytorch-lightning",
    "keras": "keras",
    "tensorflow": "tensorflow",
    "jax": "jax",
}


def software_here() -> dict[str, str]:
    """Versions of ElasticFlow, Python and the frameworks that this process has imported, without their builds."""
    found = {"elasticflow": __version__, "Python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for module, distribution in _FRAMEWORKS.items():
        if module in sys.modules:
            try:
                found[module] = version(distribution).partition("+")[0]
            except PackageNotFoundError:  # a source tree that is not installed
                continue
    return found
