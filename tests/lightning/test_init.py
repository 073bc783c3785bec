"""`ef_lightning/__init__.py` is a table of contents."""

from __future__ import annotations

import pytest

import ef_lightning


def test_contents() -> None:
    assert ef_lightning.__all__ == [
        "ElasticFlowStrategy",
        "module",
        "Compensation",
        "Autoscale",
        "Checkpointing",
        "Retention",
        "WorkersChange",
        "strategy_for",
    ]
    public = {name for name, value in vars(ef_lightning).items() if not name.startswith("_")}
    modules = {name.rpartition(".")[2] for name in __import__("sys").modules if name.startswith("ef_lightning.")}
    helpers = {"annotations", "TYPE_CHECKING", "Any", "register", "strategy_class", "without_collections"}
    assert public - modules <= {*ef_lightning.__all__, *helpers}


def test_unknown_name_raises() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = ef_lightning.Nothing  # type: ignore[attr-defined]
