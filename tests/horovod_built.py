"""Which tests need a Horovod that is built, and skip themselves where there is none."""

from __future__ import annotations

from typing import Any

import pytest

from ef_common.horovod.library import built_for


def is_built(framework: str) -> bool:
    """Whether there is a Horovod for "torch" or "tensorflow" in this environment."""
    return built_for(framework) is not None


def needs_horovod(framework: str) -> list[Any]:
    """Mark of such a test, in a list."""
    reason = f"Horovod is not built for {framework} in this environment: elasticflow horovod build"
    return [pytest.mark.skipif(not is_built(framework), reason=reason)]
