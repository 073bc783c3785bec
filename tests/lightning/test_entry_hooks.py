"""Whose hooks run in a newcomer between its admission and its first batch."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from ef_lightning.joining import has_entry_hooks
from tests.lightning import training
from tests.lightning.conftest import HOSTS


def parts(pl: Any) -> dict[str, tuple[Any, Any, list[Any], bool]]:
    """Module, data module, callbacks, and whether a hook of the user's is among theirs."""
    plain: Any = training.regression(pl)

    class Own(plain):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None: ...

    class OwnData(pl.LightningDataModule):  # type: ignore[misc, name-defined]
        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    class OtherData(pl.LightningDataModule):  # type: ignore[misc, name-defined]
        def setup(self, stage: str) -> None: ...

    class OwnCallback(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, module: Any) -> None: ...

    class OtherCallback(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_end(self, trainer: Any, module: Any) -> None: ...

    class Unfreezing(pl.callbacks.BaseFinetuning): ...  # type: ignore[misc, name-defined]

    lightnings = [pl.callbacks.EarlyStopping("loss"), pl.callbacks.ModelCheckpoint(), pl.callbacks.TQDMProgressBar()]
    return {
        "nothing": (plain(), None, [], False),
        "Lightning's callbacks": (plain(), None, lightnings, False),
        "other hooks": (plain(), OtherData(), [OtherCallback()], False),
        "the module": (Own(), None, [], True),
        "the data module": (plain(), OwnData(), [], True),
        "a callback": (plain(), None, [*lightnings, OwnCallback()], True),
        "a callback of Lightning's that goes on": (plain(), None, [pl.callbacks.BackboneFinetuning()], True),
        "a callback that Lightning's calls": (plain(), None, [Unfreezing()], True),
        "a function": (plain(), None, [pl.callbacks.LambdaCallback(on_train_start=print)], True),
    }


@pytest.mark.parametrize("host", HOSTS)
def test_hooks_of_the_user_are_told_from_lightnings_own(host: str) -> None:
    found = {}
    for name, (module, data, callbacks, expected) in parts(importlib.import_module(host)).items():
        trainer = SimpleNamespace(lightning_module=module, datamodule=data, callbacks=callbacks)
        found[name] = (has_entry_hooks(trainer), expected)
    assert [name for name, (seen, expected) in found.items() if seen != expected] == []
