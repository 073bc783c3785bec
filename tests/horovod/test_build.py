"""What `elasticflow horovod build` needs, finds and refuses; that it builds is shown by all tests of the engine."""

from __future__ import annotations

import errno
import hashlib
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from ef_common.horovod import build as building
from ef_common.horovod import resources, source
from ef_common.horovod.build import BuildError

GIB = 1 << 30


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_all_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(building, "search_path", lambda: str(tmp_path))
    with pytest.raises(BuildError) as caught:
        building.check_tools()
    for remedy in ("apt-get install g++", "pip install cmake", "apt-get install make"):
        assert remedy in str(caught.value)


def test_cmake_that_is_too_old_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "cmake"
    old.write_text("#!/bin/sh\necho cmake version 3.5.1\n")
    old.chmod(0o755)
    monkeypatch.setenv("HOROVOD_CMAKE", str(old))
    with pytest.raises(BuildError, match=r"cmake 3\.13 or newer .* Found: 3\.5"):
        building.check_tools()


@pytest.mark.parametrize(("available", "cores", "expected"), [(2 * GIB, 8, 1), (7 * GIB, 8, 3), (64 * GIB, 4, 4)])
def test_no_more_compilers_than_memory_and_cores(
    monkeypatch: pytest.MonkeyPatch, available: int, cores: int, expected: int
) -> None:
    monkeypatch.setattr(resources, "available_bytes", lambda: available)
    monkeypatch.setattr(resources, "num_cores", lambda: cores)
    assert building.num_jobs() == expected


def test_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "available_bytes", lambda: GIB)
    with pytest.raises(BuildError, match=r"too little memory .*Needed: 2\.0 GiB\. Available: 1\.0 GiB"):
        building.num_jobs()


def test_versions_that_nobody_has_tried_are_named() -> None:
    assert building.untested({"torch": "2.13.0", "tensorflow": "2.21.1"}) == []
    assert building.untested({"torch": "2.130.0", "tensorflow": "3.0"}) == ["torch 2.130.0", "tensorflow 3.0"]


def test_neither_framework_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "frameworks", dict)
    with pytest.raises(BuildError, match="neither torch nor TensorFlow"):
        building.build(say=lambda line: None)


def test_wheel_is_found_again_by_versions_options_and_changes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0"}
    monkeypatch.setattr(building, "frameworks", lambda: versions)
    monkeypatch.setattr(building, "check_tools", lambda: pytest.fail("a build was begun"))
    directory = building.wheel_directory(versions, {})
    directory.mkdir(parents=True)
    wheel = directory / "horovod-0.whl"
    wheel.touch()
    assert building.build(say=lambda line: None) == wheel
    assert cache in wheel.parents
    others = [building.wheel_directory({"torch": "2.13.1"}, {}), building.wheel_directory(versions, {"GPU": "NCCL"})]
    monkeypatch.setattr(source, "CHANGES", source.CHANGES[1:])
    others.append(building.wheel_directory(versions, {}))
    assert len({directory, *others}) == 4


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build takes no time, and makes a wheel that contains "compiled"."""

    def compile_wheel(root: Path, target: Path, versions: Any, jobs: int) -> Path:
        target.mkdir()
        wheel = target / "horovod-0.whl"
        wheel.write_text("compiled")
        return wheel

    monkeypatch.setattr(building, "frameworks", lambda: {"torch": "2.13.0"})
    monkeypatch.setattr(building, "check_tools", lambda: None)
    monkeypatch.setattr(building, "num_jobs", lambda: 1)
    monkeypatch.setattr(building, "download", lambda directory, say: directory)
    monkeypatch.setattr(source, "apply", lambda root: None)
    monkeypatch.setattr(building, "_compile", compile_wheel)


@pytest.mark.usefixtures("compiled")
def test_wheel_is_put_into_the_cache(cache: Path) -> None:
    wheel = building.build(say=lambda line: None)
    assert wheel.read_text() == "compiled"
    assert list(cache.rglob("*horovod-0.whl*")) == [wheel]


@pytest.mark.usefixtures("compiled")
def test_wheel_is_not_lost_where_the_cache_cannot_be_made(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.touch()  # a file where a directory should be
    monkeypatch.setattr("tempfile.tempdir", str(cache.parent))
    said: list[str] = []
    wheel = building.build(say=said.append)
    assert wheel.read_text() == "compiled"
    assert "XDG_CACHE_HOME" in said[-1]
    assert str(wheel) in said[-1]
    assert list(cache.parent.rglob("*.whl")) == [wheel]


@pytest.mark.usefixtures("compiled")
def test_wheel_is_not_lost_where_the_cache_is_full(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(wheel: Path, target: Path) -> None:
        target.write_text("comp")
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr("tempfile.tempdir", str(cache.parent))
    monkeypatch.setattr("shutil.copy", copy)
    said: list[str] = []
    wheel = building.build(say=said.append)
    assert wheel.read_text() == "compiled"
    assert "No space left on device" in said[-1]
    assert list(cache.parent.rglob("*horovod-0.whl*")) == [wheel]


@pytest.mark.usefixtures("compiled")
def test_user_without_a_home_learns_how_to_name_a_cache_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", home)
    monkeypatch.setattr(building, "_compile", lambda *args: pytest.fail("a build was begun"))
    with pytest.raises(BuildError, match=r"home directory\. Set XDG_CACHE_HOME"):
        building.build(say=lambda line: None)


def test_source_with_another_checksum_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    archive = tmp_path / f"horovod-{source.VERSION}.tar.gz"

    def run(*args: Any, **kwargs: Any) -> None:
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(__file__, f"horovod-{source.VERSION}/setup.py")

    monkeypatch.setattr(building, "_run", run)
    with pytest.raises(BuildError, match=r"is not the one expected.*Received: ") as caught:
        building.download(tmp_path, say=lambda line: None)
    assert hashlib.sha256(archive.read_bytes()).hexdigest() in str(caught.value)
    assert not (tmp_path / f"horovod-{source.VERSION}").exists()


def test_command_that_fails_shows_the_end_of_its_output() -> None:
    program = "import sys; print('many lines\\n' * 100 + 'the reason'); sys.exit(3)"
    with pytest.raises(BuildError, match=r"could not do it \(exit status 3\)[\s\S]*the reason") as caught:
        building._run([sys.executable, "-c", program], "do it")
    assert str(caught.value).count("many lines") < 100
