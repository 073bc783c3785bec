"""The versions of modules, which torch attaches to the dict that `state_dict()` returns.

`load_state_dict` hands each module the version of the code that wrote its state. Without it, a module that has changed
its keys or its computation takes the state for one of its oldest version, and converts or refuses it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

_ATTRIBUTE = "_metadata"
_PLAIN = (type(None), bool, int, float, str)


def versions_of(state: Mapping[Any, Any]) -> dict[str, dict[str, Any]] | None:
    """A copy of the versions that are attached to a state: module → what is known of it; None if there are none."""
    found = vars(state).get(_ATTRIBUTE) if isinstance(state, OrderedDict) else None
    return _plain(found) if isinstance(found, dict) else None


def with_versions(state: dict[Any, Any], versions: object) -> dict[Any, Any]:
    """The state as `load_state_dict` takes it, with these versions; the state itself if there are none.

    Raises:
        TypeError: These are no versions.
    """
    if versions is None:
        return state
    if not isinstance(versions, dict):
        raise TypeError(f"no versions of modules. Received: {versions!r}")
    made = OrderedDict(state)
    setattr(made, _ATTRIBUTE, _plain(versions))
    return made


def _plain(versions: dict[Any, Any]) -> dict[str, dict[str, Any]]:
    """Plain values alone: that is all that torch's modules have, and what can be sent and saved."""
    return {
        name: {key: value for key, value in known.items() if isinstance(key, str) and type(value) in _PLAIN}
        for name, known in versions.items()
        if isinstance(name, str) and isinstance(known, dict)
    }
