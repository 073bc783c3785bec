"""The file that `torch.save` writes for a tree, as :class:`~ef_common.data.source.SourceState`.

Its layout (see :mod:`ef_common.storage.layout`) is that of the file that a host copy of the tree is saved to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ef_common.collectives.torch_codec import as_bytes
from ef_common.collectives.torch_tensors import bytes_of, in_one_piece
from ef_common.data.source import Release
from ef_common.storage.checkpoints import Content, WriteFile
from ef_common.storage.layout import FileLayout, Path, Segment, Slice, StandIns
from ef_common.storage.shares import SharedFile
from ef_lightning.host_copy import HostCopies, copy_tree, plain_tensors

FILE = "lightning.ckpt"

IsShared = Callable[[Path, Tensor], bool]


@dataclass(frozen=True, slots=True)
class SavedTree:
    """A tree to be saved.

    Args:
        tree: Dicts, lists, tuples, tensors and other values.
        copies: Makes copies of it.
        is_shared: Which tensors of it all workers hold; not asked for empty ones.
        content_of: Returns the content to save, given the file that is made of the tree.
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

    def layout(self) -> FileLayout:
        stand_ins = StandIns(tensor.nbytes for tensor in plain_tensors(self.tree))

        def copied(value: Tensor, path: Path) -> Tensor:
            if not value.numel() or not self.is_shared(path, value):
                return torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value)
            memory = stand_ins.take(Segment(value.nbytes, path, _kind(value)))
            return torch.frombuffer(memory, dtype=value.dtype).view(value.shape)

        return stand_ins.layout(lambda file: save(copy_tree(self.tree, copied), file), writer="torch", array="tensor")

    def kind_of(self, path: Path) -> str:
        return _kind(_find(self.tree, path))

    def copy_parts(self, parts: Sequence[Slice]) -> tuple[Callable[[Slice], Any], Release]:
        flat = {part: bytes_of(in_one_piece(_find(self.tree, part.path))) for part in parts}
        copy = self.copies.of({part: tensor[part.start : part.stop] for part, tensor in flat.items()})
        return lambda part: as_bytes(copy.tree[part]).numpy(), copy.release


def save(tree: Any, file: Any) -> None:
    """Save like `torch.save`, but without its checksums, which cost a tenth and repeat those of the manifest."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tree, file)
    finally:
        torch.serialization.set_crc32_options(before)


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _find(tree: Any, path: Path) -> Any:
    """The object at this place; None if there is no such place."""
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree
