"""Modules in a checkpoint: a loss, or metrics, that `on_save_checkpoint` has put there.

Objects are not sent to newcomers. A newcomer runs the same program, so its own hook puts such a module there, too, and
only the module's state is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import Module

from ef_common.errors import ElasticFlowError


def take_out(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Take the modules out of a checkpoint; returns the class and the state of each by its key."""
    found = {key: value for key, value in checkpoint.items() if isinstance(value, Module)}
    for key in found:
        del checkpoint[key]
    return {key: {"class": _kind(module), "state": module.state_dict()} for key, module in found.items()}


def put_back(
    checkpoint: dict[str, Any], taken: Mapping[str, Any], own: Callable[[], Mapping[str, Any]]
) -> list[Module]:
    """Put this worker's own modules there, with the state of those that were taken out elsewhere.

    Args:
        checkpoint: Without modules.
        taken: What :func:`take_out` has returned.
        own: A checkpoint of this worker; not called if no module was taken out.

    Returns:
        These modules.

    Raises:
        ElasticFlowError: This worker has others.
    """
    found = own() if taken else {}
    for key, wanted in taken.items():
        module, received = found.get(key), _kind(found.get(key))
        if not isinstance(module, Module) or received != wanted["class"]:
            raise ElasticFlowError(_other(key, wanted["class"], received))
        try:
            module.load_state_dict(wanted["state"])
        except RuntimeError as error:
            raise ElasticFlowError(_other(key, wanted["class"], f"one of another form ({error})")) from error
        checkpoint[key] = module
    return [checkpoint[key] for key in taken]


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _other(key: str, expected: str, received: str) -> str:
    return (
        f"on_save_checkpoint has put another module into checkpoint[{key!r}] here than in the others. Run the same "
        f"program on all nodes. Expected: {expected}. Received: {received}"
    )
