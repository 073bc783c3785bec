"""The parts of a model as a torch module, so that Lightning moves, saves and trains them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ef_common.errors import UsageError


class Entries(nn.Module):
    """A module of a dict or a list that holds modules, tensors and other values, nested in dicts and lists.

    Tensors that require a gradient become parameters, others buffers.

    Args:
        parts: The dict, list or tuple.
        parameters: Existing parameters by the id of the tensor, so that a tensor that occurs twice is one.

    Raises:
        UsageError: A key that cannot be the name of a part of a module.
    """

    def __init__(self, parts: Any, parameters: dict[int, nn.Parameter] | None = None) -> None:
        super().__init__()
        made: dict[int, nn.Parameter] = {} if parameters is None else parameters
        self._kind: Any = dict if isinstance(parts, Mapping) else type(parts)
        self._others: dict[Any, Any] = {}
        self._keys: list[tuple[Any, str | None]] = []
        for key, part in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
            is_part = isinstance(part, nn.Module | Tensor | Mapping | list | tuple)
            self._keys.append((key, str(key) if is_part else None))
            if not is_part:
                self._others[key] = part
                continue
            try:
                self._add(str(key), part, made)
            except KeyError as error:
                raise UsageError(
                    "a module of torch cannot have a part of this name (a method has it, or there is a dot in it): "
                    f"choose another key. Received: {key!r}"
                ) from error

    def _add(self, name: str, part: Any, made: dict[int, nn.Parameter]) -> None:
        if isinstance(part, nn.Module):
            self.add_module(name, part)
        elif not isinstance(part, Tensor):
            self.add_module(name, Entries(part, made))
        elif part.requires_grad:
            if id(part) not in made:
                made[id(part)] = part if isinstance(part, nn.Parameter) else nn.Parameter(part.detach())
            self.register_parameter(name, made[id(part)])
        else:
            self.register_buffer(name, part)

    def get(self) -> Any:
        """The original structure with the current parts: buffers are replaced when they move."""
        found = {}
        for key, name in self._keys:
            part = self._others[key] if name is None else getattr(self, name)
            found[key] = part.get() if isinstance(part, Entries) else part
        return found if self._kind is dict else list(found.values()) if self._kind is list else tuple(found.values())

    def __getitem__(self, key: Any) -> Any:
        """The current value of a part."""
        return self.get()[key]
