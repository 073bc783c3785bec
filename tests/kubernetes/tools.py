"""Tools of a cluster's users that are no part of a cluster: those on the path, or those that `tools.sh` has fetched."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.kubernetes.control_plane import CACHE

FETCHED = CACHE / "kubernetes-tools"


def program(name: str) -> str | None:
    """Where a tool is; None if it is not there."""
    return shutil.which(name, path=os.pathsep.join([str(FETCHED), os.environ.get("PATH", os.defpath)]))


def why_not(*names: str) -> str | None:
    """Reason why these cannot be used, or None."""
    missing = [name for name in names if program(name) is None]
    return f"not found, and not in {FETCHED}: {', '.join(missing)}" if missing else None


def run(name: str, *arguments: str | Path, cwd: Path) -> str:
    """Run a tool, which must succeed; what it has printed."""
    environ = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(cwd)}
    done = subprocess.run(
        [program(name) or name, *map(str, arguments)], cwd=cwd, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
