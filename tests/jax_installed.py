"""Which tests need JAX, and skip themselves where it is not installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

HAS_JAX = find_spec("jax") is not None
needs_jax = pytest.mark.skipif(not HAS_JAX, reason="JAX is not installed in this environment: pip install jax")

ON_JAX = pytest.param("jax", marks=[needs_jax, pytest.mark.thorough])
"""A case of a test that is parametrized by Keras's backends."""
