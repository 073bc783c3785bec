"""Imports without garbage collections, and those of the tests' programs."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from ef_common.imports import without_collections
from tests import imports


class _Node:
    """Part of a reference cycle of its own."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Nothing is frozen, and collections go on as before."""
    was_frozen = bool(gc.get_freeze_count())  # what the tests have imported (see `tests/conftest.py`)
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()
    if was_frozen:
        gc.freeze()


def test_nothing_is_collected_inside() -> None:
    """However many objects are made."""
    collections: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(info["generation"])

    with without_collections():
        gc.callbacks.append(note)
        try:
            made = [_Node() for _ in range(100_000)]
        finally:
            gc.callbacks.remove(note)
    assert made
    assert not collections
    assert gc.isenabled()


def test_objects_count_as_examined() -> None:
    """They are of the oldest generation, so the next collections of younger ones leave them alone."""
    with without_collections():
        node = _Node()
    assert any(each is node for each in gc.get_objects(generation=2))


def test_garbage_is_found_later() -> None:
    """Objects that were made inside are collected when nobody holds them any more."""
    with without_collections():
        node = _Node()
    gone = weakref.ref(node)
    del node
    gc.collect()
    assert gone() is None


def test_an_error_restores() -> None:
    """Of an import that fails, for example."""
    with pytest.raises(ImportError), without_collections():
        raise ImportError
    assert gc.isenabled()


def test_disabled_stays_disabled() -> None:
    """A program that collects no garbage, or only at times that it chooses."""
    gc.disable()
    with without_collections():
        pass
    assert not gc.isenabled()


def test_frozen_stays_frozen() -> None:
    """A program that has frozen its objects, for processes that it forks."""
    frozen = _Node()
    gc.freeze()
    with without_collections():
        pass
    assert not any(each is frozen for each in gc.get_objects())
    assert gc.isenabled()


def test_plugins_import_without() -> None:
    """The import of a plugin collects nothing after the frameworks are there; a worker starts with it."""
    code = """
import gc
gc.disable()
import lightning.pytorch, keras
import ef_common.imports
gc.collect()
gc.enable()
found = []
gc.callbacks.append(lambda phase, info: found.append(info))
import ef_lightning
num = len(found)
import ef_keras
print(num, len(found) - num)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.split()[-2:] == ["0", "0"], ended.stderr


# ---------------------------------------------------------------- programs of the tests


def test_lean_hides_packages_that_are_not_imported_yet_and_only_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plots, sounds = names = "ef_test_plots", "ef_test_sounds"
    for name in names:
        (tmp_path / f"{name}.py").touch()
        (tmp_path / f"{name}-1.dist-info").mkdir()
        (tmp_path / f"{name}-1.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(imports, "_FOR_PLOTS_AND_SOUNDS", names)
    import_module(sounds)
    with contextlib.suppress(KeyboardInterrupt), imports.lean():
        with pytest.raises(ImportError):
            import_module(plots)
        with pytest.raises(PackageNotFoundError):
            version(plots)
        import_module(sounds)
        assert (version(sounds), version("pytest")) == ("1", pytest.__version__)
        assert not gc.isenabled()
        raise KeyboardInterrupt
    import_module(plots)
    assert version(plots) == "1"
    for name in names:
        del sys.modules[name]
