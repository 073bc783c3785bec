"""The oldest releases that `make test-matrix` installs are those that pyproject.toml allows."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
OLDEST = ROOT / "tests" / "matrix" / "oldest.txt"
EXTRAS = ("torch", "lightning", "pytorch-lightning", "keras", "s3", "testing")


def test_oldest_releases_are_those_that_are_allowed() -> None:
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in EXTRAS)]
    wanted = [Requirement(line) for lines in lists for line in lines]
    allowed = {
        canonicalize_name(one.name): Version(next(iter(one.specifier)).version)
        for one in wanted
        if one.name != project["name"]
    }
    lines = [line for line in OLDEST.read_text().splitlines() if line and not line.startswith("#")]
    pinned = {
        canonicalize_name(name): Version(version) for name, _, version in (line.partition("==") for line in lines)
    }
    assert {name: pinned.get(name) for name in allowed} == allowed
    assert set(pinned) - set(allowed) == {"tensorflow-cpu"}
