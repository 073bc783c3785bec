"""What has changed lately, told by git."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.tiers.places import ROOT

_DAY_S = 24 * 3600


def of_the_last_day(root: Path = ROOT) -> list[str]:
    """Files that are here and have changed in the day that ends with the newest commit; none without git's history."""
    try:
        newest = int(_git(root, "show", "--no-patch", "--format=%ct", "HEAD"))
        base = _git(root, "rev-list", "-1", f"--before={newest - _DAY_S}", "HEAD").strip()
    except (OSError, subprocess.CalledProcessError):
        return []
    if not base:
        return []
    return [file for file in _git(root, "diff", "--name-only", base, "HEAD").splitlines() if (root / file).exists()]


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout
