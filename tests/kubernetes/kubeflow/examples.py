"""The examples for Kubeflow's users, whose programs are replaced by a training of the tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ef_common.kubernetes.resource import Json

FOLDER = Path(__file__).parents[3] / "examples" / "17-kubeflow"
NAMES = ("pytorchjob", "trainjob", "mpijob", "tfjob")


def example(name: str) -> dict[str, Json]:
    """The objects of an example in the namespace `default`, by their kinds."""
    things = yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())
    return {thing["kind"]: {**thing, "metadata": {**thing["metadata"], "namespace": "default"}} for thing in things}


def with_containers(thing: Any, change: Callable[[Json], Json]) -> Any:
    """A copy in which whatever has a command, and so is a container, is changed."""
    if isinstance(thing, list):
        return [with_containers(one, change) for one in thing]
    if not isinstance(thing, dict):
        return thing
    made = {name: with_containers(one, change) for name, one in thing.items()}
    return change(copy.deepcopy(made)) if "command" in made else made


def without_mounts(thing: Any) -> Any:
    """A copy whose containers mount nothing: a folder of its own at `/tmp` would hide the files of a test."""
    if isinstance(thing, list):
        return [without_mounts(one) for one in thing]
    if not isinstance(thing, dict):
        return thing
    return {name: without_mounts(one) for name, one in thing.items() if name != "volumeMounts"}
