"""Connections to a live page that wait for a request: a limited number, of which the oldest makes room for one more."""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

MOST = 64
"""Strangers who say nothing, or say it slowly, cost this many descriptors, and keep nobody else from an answer."""


class LimitedProtocol(H11Protocol):
    """HTTP, as long as the connection is not one too many. A connection whose request is being answered is never ended.

    Cost: all connections are looked at when one comes.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """One more has come."""
        super().connection_made(transport)
        self._since = self.loop.time()
        waiting = [one for one in self.connections if isinstance(one, LimitedProtocol) and one.waits]
        if len(waiting) > MOST:
            min(waiting, key=lambda one: one._since).transport.abort()

    @property
    def waits(self) -> bool:
        """Whether it has asked for nothing that it has not got."""
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        return not self.transport.is_closing() and (cycle is None or cycle.response_complete)
