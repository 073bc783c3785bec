"""Targets of worker processes that import Keras with a chosen backend, and nothing of it here."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any


def call_in(module: str, backend: str, function: str, *args: Any, **options: Any) -> Any:
    """Call a function of a module of this folder, as a worker of the job."""
    importlib.import_module(f"tests.keras.on_{backend}")
    return getattr(importlib.import_module(f"tests.keras.{module}"), function)(*args, **options)


def call_alone(module: str, backend: str, function: str) -> Any:
    """The same in a process that is no worker of the job, but has its run directory."""
    del os.environ["ELASTICFLOW_COORDINATOR"]
    return call_in(module, backend, function)


def call_all(module: str, backend: str, functions: Sequence[str]) -> dict[str, Any]:
    """The same with several functions."""
    del os.environ["ELASTICFLOW_COORDINATOR"]
    return {function: call_in(module, backend, function) for function in functions}


def call(backend: str, function: str, coordinator: bool = True) -> Any:
    """Call a function of `scenarios`, as a worker of the job or without one."""
    return (call_in if coordinator else call_alone)("scenarios", backend, function)
