"""Parts of the model in a checkpoint: a loss, or metrics, that `on_save_checkpoint` has put there.

Objects are not sent to newcomers. A part of the model is a part of the newcomer's model, too, under the same name, and
its state is sent with that of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import Module

from ef_common.errors import ElasticFlowError


def take_out(checkpoint: dict[str, Any], model: Module) -> dict[str, str]:
    """Take the parts of the model out of a checkpoint; returns the name of each in the model, by its key."""
    names = {id(part): name for name, part in model.named_modules()}
    taken = {key: names[id(value)] for key, value in checkpoint.items() if id(value) in names}
    for key in taken:
        del checkpoint[key]
    return taken


def put_back(checkpoint: dict[str, Any], taken: Mapping[str, str], model: Module) -> list[Module]:
    """Put the same parts of this worker's model there; returns them.

    Raises:
        ElasticFlowError: Its model has no such part.
    """
    for key, name in taken.items():
        try:
            checkpoint[key] = model.get_submodule(name)
        except AttributeError as error:
            raise ElasticFlowError(
                f"the others' on_save_checkpoint gives checkpoint[{key!r}] a part that this model lacks. Run the same "
                f"program on all nodes. Expected: a module {name!r}"
            ) from error
    return [checkpoint[key] for key in taken]
