"""What the tests of gradient reduction share."""

from __future__ import annotations

import pytest

from ef_common.collectives import torch_gradients


@pytest.fixture(params=["alternating", "lent"])
def buffers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the size of a test as small ones are treated, and as large ones are."""
    if request.param == "lent":
        monkeypatch.setattr(torch_gradients, "DOUBLE_BUFFER_BYTES", 0)
        monkeypatch.setattr(torch_gradients, "_LARGE_GRADIENT_BYTES", 0)
