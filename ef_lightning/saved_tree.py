"""A checkpoint of Lightning's, as :class:`~ef_common.data.source.SourceState`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ef_common.collectives.torch_codec import as_bytes
from ef_common.data.source import Release
from ef_common.storage.checkpoints import Content, WriteFile
from ef_common.storage.layout import Layout, Path, Slice
from ef_common.storage.shares import SharedFile
from ef_lightning.file_layout import IsShared, kind_of, layout_of, save
from ef_lightning.host_copy import HostCopies

FILE = "lightning.ckpt"


@dataclass(frozen=True, slots=True)
class SavedTree:
    """A tree that `torch.save` makes a file of.

    Args:
        tree: Dicts, lists, tuples, tensors and other values.
        copies: Makes copies of it.
        is_shared: Which tensors of it all workers hold.
        content_of: What is saved, with the file that is made of the tree.
    """

    tree: Any
    copies: HostCopies
    is_shared: IsShared
    content_of: Callable[[WriteFile | SharedFile], Content]
    file: ClassVar[str] = FILE

    def copy(self) -> tuple[Content, Release]:
        """See the protocol, also for what follows."""
        copy = self.copies.of(self.tree)
        return self.content_of(lambda file: save(copy.tree, file)), copy.release

    def content(self, file: SharedFile) -> Content:
        return self.content_of(file)

    def layout(self) -> Layout:
        return layout_of(self.tree, self.is_shared)

    def kind_of(self, path: Path) -> str:
        found = _find(self.tree, path)
        return kind_of(found) if isinstance(found, Tensor) else type(found).__name__

    def copy_parts(self, parts: Sequence[Slice]) -> tuple[Callable[[Slice], Any], Release]:
        flat = {part: _find(self.tree, part.path).detach().contiguous().view(-1).view(torch.uint8) for part in parts}
        copy = self.copies.of({part: tensor[part.start : part.stop] for part, tensor in flat.items()})
        return lambda part: as_bytes(copy.tree[part]).numpy(), copy.release


def _find(tree: Any, path: Path) -> Any:
    """What lies there; nothing, if there is no such place."""
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree
