"""The suites of tests that are run, and how."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path

import click

from tests.peers.comparison import WAYS

HERE = Path(__file__).parent
KERAS = tuple(f"keras/src/{part}" for part in ("callbacks", "distillation", "models", "trainers"))


@dataclass(frozen=True, slots=True)
class Suite:
    """A suite of tests.

    Args:
        name: Files in build/peers begin with it.
        peer: Whose it is.
        tests: Those to run.
        known: The list of failures that are known.
        ways: Those in which they are run, beside the plain one.
        folder: Where they are run; if None, in an empty one.
        options: Of pytest.
        environment: What is added to it.
    """

    name: str
    peer: str
    tests: tuple[str, ...]
    known: Path
    ways: tuple[str, ...]
    folder: Path | None = None
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def name_of(self, test: str) -> str:
        """What the list calls a test that pytest calls so: with the backend, if there are several."""
        # Pytest's name of one of Lightning's depends on where it finds its settings.
        _, _, backend = self.name.partition("-")
        return f"{backend}: {test}" if backend else test.removeprefix("tests/")


def suites_of(tests: Sequence[str]) -> list[Suite]:
    """Those that have these tests, or all of them. It says so where one cannot be run."""
    of_keras = tuple(test for test in tests if test.startswith("keras/"))
    of_lightning = tuple(test for test in tests if test not in of_keras)
    found = []
    if of_lightning or not tests:
        found += _lightning(of_lightning or ("tests_pytorch",))
    if of_keras or not tests:
        found += _keras(of_keras or KERAS)
    return found


def _lightning(tests: tuple[str, ...]) -> list[Suite]:
    source = os.environ.get("LIGHTNING_SRC")
    if not source:
        version = distribution("lightning").version
        click.echo(
            "Lightning's own tests are not run: LIGHTNING_SRC does not name a checkout of its repository "
            f"(https://github.com/Lightning-AI/pytorch-lightning, best of the tag {version})."
        )
        return []
    folder = Path(source).resolve() / "tests"
    if not (folder / "tests_pytorch").is_dir():
        raise click.ClickException(f"LIGHTNING_SRC has no tests/tests_pytorch. Received: {source}")
    # TensorFlow sets it when it is imported, and the suite blames the test at hand.
    environment = {"PYTHONPATH": str(folder), "HDF5_PLUGIN_PATH": "disable"}
    ways = tuple(way for way in WAYS if way != "two")
    return [Suite("lightning", "lightning", tests, HERE / "known_lightning.txt", ways, folder, environment=environment)]


def _keras(tests: tuple[str, ...]) -> list[Suite]:
    folder = Path(str(distribution("keras").locate_file(""))).resolve()
    options = (f"--rootdir={folder}", f"--config-file={os.devnull}")  # not those of the project that it is installed in
    return [
        Suite(
            f"keras-{backend}",
            "keras",
            tuple(str(folder / test) for test in tests),
            HERE / "known_keras.txt",
            WAYS,
            options=options,
            environment={"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"},
        )
        for backend in ("tensorflow", "torch")
    ]
