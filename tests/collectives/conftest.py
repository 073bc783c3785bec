"""What the tests of gradient reduction share."""

from __future__ import annotations

import pytest

from ef_common.collectives.gradients import buckets


@pytest.fixture(params=["alternating", "lent"])
def buffers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the size of a test as small ones are treated, and as large ones are."""
    if request.param == "lent":
        monkeypatch.setattr(buckets, "DOUBLE_BUFFER_BYTES", 0)
        monkeypatch.setattr(buckets, "LARGE_GRADIENT_BYTES", 0)
