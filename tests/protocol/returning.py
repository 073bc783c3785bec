"""What a worker says that comes back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ef_common.core.membership import Phase, Returned
from ef_common.core.quorum import ChainLink
from ef_common.core.view import Member
from ef_common.protocol import wire
from ef_common.protocol.fields import digest_of_view
from ef_common.protocol.view_patch import ViewName


def returning(
    links: Iterable[ChainLink] = (), phase: Phase = Phase.MEMBER, **fields: Any
) -> tuple[wire.Return, wire.Told]:
    """What a worker says that comes back and has received these views; by default it has settled in the first one."""
    links = tuple(links)
    names = tuple(ViewName(one.view.generation, digest_of_view(one.view), one.over, one.agreed) for one in links)
    generations = [name.generation for name in names]
    known = {"promised": max(generations, default=0), "settled": min(generations, default=0), **fields}
    report = wire.Return(Returned(Member("", "", ""), phase, **known), names)
    return report, wire.Told(tuple(link.view for link in links))
