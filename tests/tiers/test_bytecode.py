from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

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


def test_assertions_of_tests_are_rewritten_once_for_all_processes_of_a_run(tmp_path: Path) -> None:
    (file := tmp_path / "test_it.py").write_text("def test_it():\n    one = 1\n    assert one == 2\n")
    with compiled([], tests=tmp_path):
        (cache,) = tmp_path.glob(f"__pycache__/test_it*{rewrite.PYC_TAIL}")
        assert cache.parent == rewrite.get_cache_dir(file)
        code = rewrite._read_pyc(file, cache)
        assert code is not None
        exec(code, space := {"__name__": "test_it"})
        with pytest.raises(AssertionError, match="assert 1 == 2"):
            space["test_it"]()
    assert [*tmp_path.iterdir()] == [file]


def test_bytecode_that_was_there_before_stays(package: Path) -> None:
    with compiled([package / "b"]):
        kept = package / "b" / "__pycache__"
        with compiled([package]):
            assert caches(package) == {".", "b"}
        assert caches(package) == {"b"}
    assert not kept.exists()
