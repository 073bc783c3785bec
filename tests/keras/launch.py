"""Targets of worker processes that import Keras with a chosen backend, and nothing of it here."""

from __future__ import annotations

import importlib
import os
from typing import Any


def call(backend: str, function: str, coordinator: bool = True) -> Any:
    """Call a function of `scenarios`, as a worker of the job or without one."""
    if not coordinator:
        del os.environ["ELASTICFLOW_COORDINATOR"]
    importlib.import_module(f"tests.keras.on_{backend}")
    return getattr(importlib.import_module("tests.keras.scenarios"), function)()
