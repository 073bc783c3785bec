"""How many objects belong to another one: what it holds in memory, whatever it is made of."""

from __future__ import annotations

import gc
from types import BuiltinFunctionType, FunctionType, ModuleType

_OF_ALL = (type, ModuleType, FunctionType, BuiltinFunctionType)


def num_reachable(root: object) -> int:
    """Number of objects that are reached from one, without those that belong to the program and not to an object."""
    found: dict[int, object] = {id(root): root}
    new = [root]
    while new:
        new = [one for one in gc.get_referents(*new) if id(one) not in found and not isinstance(one, _OF_ALL)]
        found.update((id(one), one) for one in new)
    return len(found)
