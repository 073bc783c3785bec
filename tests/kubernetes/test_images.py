"""The images of the examples, as far as no images are needed to look at them."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from tests.kubernetes import tools

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "15-kubernetes" / "Containerfile"
TEXT = FILE.read_text()


def test_whatever_an_image_copies_is_there_and_all_packages_are() -> None:
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*)$", TEXT, re.M) for word in line.split()[:-1]]
    paths = [word for word in copied if not word.startswith("--")]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages | {project["project"]["readme"], *project["project"]["license-files"]} <= set(paths)
    extras = {extra for group in re.findall(r"whl\)\[(.*)\]", TEXT) for extra in group.split(",")}
    assert extras <= set(project["project"]["optional-dependencies"])


def test_pages_build_each_image() -> None:
    targets = set(re.findall(r"^FROM .* AS (\w+)$", TEXT, re.M)) - {"wheel"}
    pages = "".join((ROOT / "examples" / page / "README.md").read_text() for page in ("15-kubernetes", "17-kubeflow"))
    assert set(re.findall(r"--target=(\w+)", pages)) == targets


@pytest.mark.thorough
@pytest.mark.skipif(tools.why_not("hadolint") is not None, reason=str(tools.why_not("hadolint")))
def test_linter_finds_nothing_in_the_file_of_images() -> None:
    tools.run("hadolint", FILE, cwd=ROOT)
