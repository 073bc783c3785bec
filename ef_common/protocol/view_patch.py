"""Views between two ends that know others: by what has changed, and by name.

A view of a thousand members takes 100 kB. Sent to each of them at each change, and reported by each of them to the
next coordinator, it would take time and bytes in the square of their number. So a view is sent as what has changed
since one that its receiver knows (:class:`ViewPatch`), and reported by its digest (:class:`ViewName`), in place of
which a coordinator that does not know it asks a few workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from ef_common.core.view import Member, View
from ef_common.errors import ProtocolError

NO_VIEW = View(0, ())
"""What a whole view is a change of."""
MAX_NAMED = 2**20
"""Members that the views of one message may have, all together: to name one again costs its sender nothing."""

_T = TypeVar("_T")


class Span(NamedTuple):
    """What stands from `start` to `stop` in the view before."""

    start: int
    stop: int


class ViewName(NamedTuple):
    """What a worker knows of a view whose content it does not tell.

    Args:
        generation: Its generation.
        digest: See :func:`~ef_common.protocol.fields.digest_of_view`.
        over: As in :class:`~ef_common.core.quorum.ChainLink`.
        agreed: Likewise.
    """

    generation: int
    digest: str
    over: bool
    agreed: bool


@dataclass(frozen=True, slots=True)
class ViewPatch:
    """A view, as it differs from another one.

    Args:
        rest: The view, without its members and those that are gone.
        members: Its members in order; those that the other view has as well, as spans of their ranks.
        gone: Likewise.
    """

    rest: View
    members: tuple[Member | Span, ...]
    gone: tuple[str | Span, ...] = ()

    @classmethod
    def between(cls, before: View, after: View) -> ViewPatch:
        """How `after` differs from `before`."""
        members, gone = _difference(before.members, after.members), _difference(before.gone, after.gone)
        return cls(replace(after, members=(), gone=()), members, gone)

    def onto(self, before: View) -> View:
        """The view that differs so from `before`.

        Raises:
            ProtocolError: It names ranks that `before` does not have, or a member twice.
        """
        members = _patched(before.members, self.members)
        if len({member.id for member in members}) != len(members):
            raise ProtocolError(f"view {self.rest.generation}: expected different ids")
        return replace(self.rest, members=members, gone=_patched(before.gone, self.gone))


def _difference(before: Sequence[_T], after: Sequence[_T]) -> tuple[_T | Span, ...]:
    ranks = {value: rank for rank, value in enumerate(before)}
    parts: list[_T | Span] = []
    start = stop = -1  # of the span that stands last
    for value in after:
        rank = ranks.get(value)
        if rank is None:
            parts.append(value)
            stop = -1
        elif rank == stop:
            stop = rank + 1
            parts[-1] = Span(start, stop)
        else:
            start, stop = rank, rank + 1
            parts.append(Span(start, stop))
    return tuple(parts)


def _patched(before: Sequence[_T], parts: Sequence[_T | Span]) -> tuple[_T, ...]:
    found: list[_T] = []
    for part in parts:
        if not isinstance(part, Span):
            found.append(part)
            continue
        if not 0 <= part.start < part.stop <= len(before):
            raise ProtocolError(f"expected ranks below {len(before)}. Received: {part.start} to {part.stop}")
        found += before[part.start : part.stop]
        if len(found) > MAX_NAMED:
            raise ProtocolError(f"expected at most {MAX_NAMED} members")
    return tuple(found)
