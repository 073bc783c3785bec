"""The oldest releases that `make test-matrix` installs are those that pyproject.toml allows."""

from __future__ import annotations

from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

OLDEST = Path(__file__).parent / "matrix" / "oldest.txt"
EXTRAS = ("", "torch", "lightning", "pytorch-lightning", "keras", "s3", "testing")


def test_oldest_releases_are_those_that_are_allowed() -> None:
    wanted = [Requirement(line) for line in requires("elasticflow") or []]
    mine = [one for one in wanted if any(one.marker is None or one.marker.evaluate({"extra": e}) for e in EXTRAS)]
    allowed = {
        canonicalize_name(one.name): Version(next(iter(one.specifier)).version)
        for one in mine
        if one.name != "elasticflow"
    }
    lines = [line for line in OLDEST.read_text().splitlines() if line and not line.startswith("#")]
    pinned = {
        canonicalize_name(name): Version(version) for name, _, version in (line.partition("==") for line in lines)
    }
    assert {name: pinned.get(name) for name in allowed} == allowed
    assert set(pinned) - set(allowed) == {"tensorflow-cpu"}
