from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.tiers.bytecode import compiled


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for folder in ("a", "a/b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module.py").write_text("x = 1\n")
    return tmp_path / "a"


def caches(package: Path) -> set[str]:
    return {str(cache.parents[1].relative_to(package)) for cache in package.rglob("__pycache__/module.*.pyc")}


def test_modules_are_compiled_for_the_time_of_a_run(package: Path) -> None:
    seen = []
    with contextlib.suppress(KeyboardInterrupt), compiled([package]):
        seen.append(caches(package))
        raise KeyboardInterrupt
    assert seen == [{".", "b"}]
    assert not list(package.rglob("__pycache__"))


def test_bytecode_that_was_there_before_stays(package: Path) -> None:
    with compiled([package / "b"]):
        kept = package / "b" / "__pycache__"
        with compiled([package]):
            assert caches(package) == {".", "b"}
        assert caches(package) == {"b"}
    assert not kept.exists()
