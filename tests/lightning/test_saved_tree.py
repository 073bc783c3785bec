"""The layout of a file: with the tensors put back, it is the file."""

from __future__ import annotations

import io
import itertools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ef_common.storage.checkpoints import Content
from ef_common.storage.layout import FileLayout, Slice
from ef_common.storage.shares import cut
from ef_lightning.host_copy import HostCopies
from ef_lightning.saved_tree import IsShared, SavedTree, save


def _module_and_optimizer() -> dict[str, Any]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.rand(4, 64)).sum().backward()
    optimizer.step()
    return {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 3}


def _trees() -> dict[str, Any]:
    base = torch.arange(6000.0)
    wide = torch.arange(4096.0).reshape(64, 64)
    return {
        "module_and_optimizer": _module_and_optimizer(),
        "shared_storage": {"a": base[:3000], "b": base[3000:], "c": base, "d": base},
        "not_contiguous": {"turned": wide.t(), "every_other": wide[::2, ::2], "last": wide.expand(3, 64, 64)},
        "channels_last": [torch.rand(4, 8, 16, 16).to(memory_format=torch.channels_last)],
        "empty_and_scalar": {"none": torch.empty(0), "rows": torch.empty(0, 5), "one": torch.tensor(2.0), "w": wide},
        "types": (
            wide.bfloat16(),
            wide.half(),
            wide.long(),
            wide > 3,
            wide.to(torch.complex64),
            wide.to(torch.float8_e4m3fn),
            wide.to(torch.uint8),
            wide.to(torch.complex64).mul(1 + 2j).conj(),
            wide.to(torch.complex64).mul(1 + 2j).conj().imag,
        ),
        "sparse": {"sparse": wide.to_sparse(), "dense": wide},
        "objects": {"set": {1, 2}, "held": OrderedDict(a=torch.ones(2000), b=slice(2)), 5: torch.ones(2000), "t": (1,)},
        "no_tensors": {"a": 1, "b": "text"},
        "parameter": {"p": torch.nn.Parameter(wide.clone()), "size_one": torch.rand(1, 3000, 1)},
    }


def _saved(tree: Any, copies: HostCopies | None = None, is_shared: IsShared = lambda path, tensor: True) -> SavedTree:
    return SavedTree(tree, copies or HostCopies(), is_shared, lambda file: Content({}))


def _layout_of(tree: Any, is_shared: IsShared) -> FileLayout:
    return _saved(tree, is_shared=is_shared).layout()


def _written(layout: FileLayout, tree: Any, ranges: list[tuple[int, int]]) -> bytes:
    """By one worker for each range."""
    file = io.BytesIO()
    for start, stop in ranges:
        bytes_of, _ = _saved(tree).copy_parts(layout.slices([(start, stop)]))
        layout.write(file, start, stop, bytes_of)
    return file.getvalue()


def _expected(tree: Any) -> bytes:
    file = io.BytesIO()
    save(HostCopies().of(tree).tree, file)
    return file.getvalue()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", _trees())
def test_layout_with_the_tensors_put_back_is_the_file_that_torch_writes(name: str, deterministic: bool) -> None:
    tree = _trees()[name]
    torch.use_deterministic_algorithms(deterministic)  # memory that is new is filled then
    try:
        layout = FileLayout.of(_layout_of(tree, lambda path, tensor: tensor.nbytes >= 4096).plain())
    finally:
        torch.use_deterministic_algorithms(False)
    expected = _expected(tree)
    assert layout.size == len(expected)
    assert bool(layout.kinds) == (name != "no_tensors")
    third = layout.size // 3
    assert _written(layout, tree, [(0, third), (third, 2 * third), (2 * third, layout.size)]) == expected
    torch.load(io.BytesIO(expected), weights_only=name != "objects")


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_parts_of_any_ranges_join_to_the_file(data: st.DataObject) -> None:
    tree = _module_and_optimizer()
    layout = _layout_of(tree, lambda path, tensor: tensor.nbytes >= 1000)
    borders = sorted(data.draw(st.lists(st.integers(0, layout.size), max_size=6)))
    ends = [0, *borders, layout.size]
    assert _written(layout, tree, list(itertools.pairwise(ends))) == _expected(tree)


def test_layout_keeps_nothing_of_what_is_shared() -> None:
    tree = {"shared": torch.full((1 << 20,), 7.0), "own": torch.full((1 << 10,), 8.0)}
    layout = _layout_of(tree, lambda path, tensor: path == ("shared",))
    assert len(layout.literal) < 8192
    assert tree["own"].numpy().tobytes() in layout.literal
    slices = [part for part in layout.parts(0, layout.size) if isinstance(part, Slice)]
    assert slices == [Slice(("shared",), 0, 4 << 20)]


def test_kind_of_what_is_no_such_tensor_differs() -> None:
    path = ("state_dict", "w")
    found = [
        _saved(tree).kind_of(path)
        for tree in (
            {"state_dict": {"w": torch.ones(5000)}},
            {"state_dict": {"w": torch.ones(5000).half()}},
            {"state_dict": {"w": 3}},
            {"state_dict": {}},
            {"state_dict": 3},
        )
    ]
    assert found == ["torch.float32 (5000,)", "torch.float16 (5000,)", "int", "NoneType", "NoneType"]


def test_share_holds_still_while_the_state_changes_and_its_memory_is_used_again() -> None:
    tree = {"w": torch.ones(5000)}
    layout = _layout_of(tree, lambda path, tensor: True)
    copies = HostCopies()
    parts = layout.slices([(0, layout.size)])
    bytes_of, release = _saved(tree, copies).copy_parts(parts)
    before = _expected(tree)
    tree["w"].zero_()
    file = io.BytesIO()
    layout.write(file, 0, layout.size, bytes_of)
    assert file.getvalue() == before
    release()
    free = copies._pool._free[torch.uint8, (20_000,)]
    assert len(free) == 1
    _saved(tree, copies).copy_parts(parts)
    assert not free


def test_memory_for_shares_stays_that_of_one_share_while_the_workers_change() -> None:
    tree = {f"layer-{index}": torch.ones(50_000 + index % 3) for index in range(12)}
    layout = _layout_of(tree, lambda path, tensor: True)
    copies = HostCopies()
    copies.of(tree).release()  # the worker was alone
    for world, rank in ((2, 1), (3, 0), (7, 3), (5, 4), (6, 2), (8, 7), (9, 1), (4, 2)):
        pieces = cut(layout.size, [str(number) for number in range(world)], "ranges")
        parts = layout.slices([(pieces[rank].start, pieces[rank].stop)])
        _, release = _saved(tree, copies).copy_parts(parts)
        release()
        free = [tensor for tensors in copies._pool._free.values() for tensor in tensors]
        assert sum(tensor.nbytes for tensor in free) == sum(part.stop - part.start for part in parts)
