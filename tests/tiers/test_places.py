from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers.places import GUARDS, LAUNCHERS, ROOT, guards_of, is_of_launchers, paths_of


@pytest.mark.parametrize("place", GUARDS)
def test_guards_of_every_place_are_there(place: str) -> None:
    assert (ROOT / place).exists()
    for guard in GUARDS[place]:
        assert (ROOT / guard).exists()


@pytest.mark.parametrize("place", LAUNCHERS)
def test_tests_of_launchers_are_there_and_are_run_when_launchers_change(place: str) -> None:
    assert (ROOT / place).exists()
    assert place in guards_of(["ef_common/launch/run.py", "ef_common/kubernetes/controller.py"])


def test_tests_of_launchers_are_files_or_in_folders() -> None:
    assert is_of_launchers("tests/faults/test_slurm.py")
    assert is_of_launchers("tests/kubernetes/kubeflow/test_kubeflow.py")
    assert not is_of_launchers("tests/faults/test_kill.py")


def test_every_folder_of_the_product_has_guards() -> None:
    packages = [path for name in ("ef_common", "ef_keras", "ef_lightning") for path in (ROOT / name).rglob("*.py")]
    files = [str(path.relative_to(ROOT)) for path in packages]
    assert [file for file in files if not guards_of([file])] == []


def test_guards_of_a_file_are_those_of_the_longest_entry() -> None:
    assert guards_of(["ef_common/core/replay.py"]) == list(GUARDS["ef_common/core"])
    assert guards_of(["ef_common/events.py"]) == list(GUARDS["ef_common"])


def test_guards_of_a_test_are_itself_and_of_a_document_none() -> None:
    assert guards_of(["tests/core/test_replay.py", "README.md", "tests/gpu.py"]) == ["tests/core/test_replay.py"]


def test_guards_of_several_files_come_once_and_folders_before_their_files() -> None:
    assert guards_of(["ef_common/core/replay.py", "ef_common/core/sharding.py", "tests/core/test_replay.py"]) == list(
        GUARDS["ef_common/core"]
    )


@pytest.mark.parametrize(
    ("part", "paths"),
    [
        ("keras", ["tests/keras"]),
        ("faults/test_kill.py", ["tests/faults/test_kill.py"]),
        ("tests/core/", ["tests/core"]),
        ("ef_common/storage/", list(GUARDS["ef_common/storage"])),
    ],
)
def test_part_names_a_folder_or_a_file(part: str, paths: list[str]) -> None:
    assert paths_of(part) == paths
    assert all(Path(ROOT, path).exists() for path in paths)


def test_part_that_is_none_says_which_there_are() -> None:
    with pytest.raises(ValueError, match=r"there are no tests of 'kerass'. Parts: .*keras"):
        paths_of("kerass")
