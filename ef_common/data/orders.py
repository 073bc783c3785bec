"""The order of an object's lists and rows of numbers, which a shuffle changes.

A user's data set shuffles its own content, usually a row of indices or a list of paths. Such an attribute differs
between two processes only in the order, so sharing the order makes it equal in both.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any, NamedTuple

import numpy as np

from ef_common.collectives import operations
from ef_common.session import Session

_KINDS = "iufbSU"
_MAX_ENTRIES = 1 << 22  # longer rows are mostly contents (the tokens of a corpus), and would take long to sort


class AttributeOrder(NamedTuple):
    """The order of one attribute.

    Args:
        content: Checksum of what it holds, in whatever order.
        places: For each entry, which of the distinct ones in sorted order it is. Shape (length,), int32.
    """

    content: int
    places: np.ndarray


def orders_of(owner: Any) -> dict[str, AttributeOrder]:
    """Orders of an object's attributes by name: one-dimensional arrays, and lists of numbers or strings.

    Cost: a sort of each; a second for a million paths.
    """
    found = {}
    for name, value in sorted(vars(owner).items()):
        entries = _entries(value)
        if entries is not None:
            distinct, places, counts = np.unique(entries, return_inverse=True, return_counts=True)
            content = zlib.crc32(counts.tobytes(), zlib.crc32(distinct.tobytes()))
            found[name] = AttributeOrder(content, places.reshape(-1).astype(np.int32))
    return found


def put_in_order(owner: Any, orders: dict[str, AttributeOrder]) -> None:
    """Give an object's attributes this order where they contain the same entries."""
    _rearrange(owner, orders_of(owner), orders)


def _rearrange(owner: Any, mine: dict[str, AttributeOrder], orders: dict[str, AttributeOrder]) -> None:
    for name, order in orders.items():
        own = mine.get(name)
        if own is None or own.content != order.content or np.array_equal(own.places, order.places):
            continue
        value = vars(owner)[name]
        where = np.argsort(own.places, kind="stable")[_ranks(order.places)]
        if isinstance(value, np.ndarray):
            value[:] = value[where]
        else:
            value[:] = [value[place] for place in where]


def agree_on_orders(session: Session, owner: Any) -> dict[str, AttributeOrder]:
    """Give the attributes the order of rank 0's. All members call this together; returns the orders.

    Cost: a gather of some bytes for each attribute. If orders differ, a sum of 4 bytes for each entry.
    """
    mine = orders_of(owner)
    described = {name: [len(o.places), o.content, zlib.crc32(o.places.tobytes())] for name, o in mine.items()}
    everybody, _ = operations.gather(session, described, what="order of the data")
    differ = [
        name
        for name, found in described.items()
        if any(others.get(name) != found for others in everybody)
        and all(others.get(name, ())[:2] == found[:2] for others in everybody)
    ]
    if differ:
        first = operations.FirstRankArrays([mine[name].places for name in differ], session)
        session.run(first)
        orders = {
            name: AttributeOrder(mine[name].content, places) for name, places in zip(differ, first.apply(), strict=True)
        }
        _rearrange(owner, mine, orders)
        mine |= orders
    return mine


def _entries(value: Any) -> np.ndarray | None:
    """Sortable stand-ins for the attribute's entries; None if it has no order that could be reported."""
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.flags.writeable:
        found = value
    elif isinstance(value, list) and 1 < len(value) <= _MAX_ENTRIES:
        found = _array_of(value)
    else:
        return None
    return found if found.dtype.kind in _KINDS and 1 < len(found) <= _MAX_ENTRIES else None


def _array_of(value: list[Any]) -> np.ndarray:
    """A list of numbers or strings as an array; without entries for anything else."""
    kinds = {type(entry) for entry in value}
    if kinds == {str}:
        return np.fromiter(map(_hash, value), dtype=np.uint64, count=len(value))
    is_plain = kinds <= {int, float, bool} or all(issubclass(kind, np.number) for kind in kinds)
    return np.array(value) if is_plain else np.empty(0)


def _hash(text: str) -> int:
    """A hash that is the same in all processes, and large enough for a million entries."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _ranks(places: np.ndarray) -> np.ndarray:
    """The rank of each entry in a stable sort."""
    ranks = np.empty(len(places), dtype=np.int64)
    ranks[np.argsort(places, kind="stable")] = np.arange(len(places))
    return ranks
