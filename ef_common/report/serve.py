"""`elasticflow status --serve`: the live page of a run, and its metrics.

::

    /         the page
    /events   news as server-sent events: the whole state, which has a bounded size, about once per second
    /metrics  for Prometheus
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from ef_common.control.sockets import listen
from ef_common.errors import UsageError
from ef_common.protocol.addresses import Address, format_address, is_loopback
from ef_common.protocol.auth import Token, page_key
from ef_common.report.guard import Guard
from ef_common.report.live import Live
from ef_common.report.waiting import LimitedProtocol

_EVERY_S = 1.0
_SHARE = 5.0
"""After making a state, the server waits for this many times the duration that it took."""
_KEEP_ALIVE_S = 15.0
_BACKLOG = 64
"""So many connections are accepted before any of them is looked at."""
_ALL = ("0.0.0.0", "::")
_LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})


class Server:
    """Serves one run.

    Args:
        run_dir: Directory of the run.
        address: Where to listen; port 0 for any that is free.
        token: The job's, from which the key of the page follows; needed except on the loopback interface.

    Attributes:
        url: Where the page is, with its key.

    Raises:
        UsageError: There is no token, or the address cannot be bound.
    """

    def __init__(self, run_dir: Path, address: Address, *, token: Token | None = None) -> None:
        host, _ = address
        if token is None and not is_loopback(host):
            raise UsageError(
                f"to serve on an address that others reach, set ELASTICFLOW_TOKEN to the job's token; without one, "
                f"a page is for this machine. Received: {format_address(address)}"
            )
        try:
            self._socket = listen(address)
        except OSError as error:
            text = f"cannot listen there: {error.strerror or error}. Received: {format_address(address)}"
            raise UsageError(text) from None
        self.address: Address = (host, self._socket.getsockname()[1])
        key = None if token is None else page_key(token)
        name = socket.gethostname() if host in _ALL else host
        self.url = f"http://{format_address((name, self.address[1]))}/" + (f"?key={key}" if key else "")
        self._live = Live(run_dir)
        self._failure: Exception | None = None
        routes = [Route("/", self._page), Route("/events", self._events), Route("/metrics", self._metrics)]
        guarded = Guard(
            Starlette(routes=routes, lifespan=self._lifespan),
            key=key,
            hosts=_LOOPBACK_NAMES | {host} if is_loopback(host) else None,
        )
        # No log of requests: their addresses may hold the key.
        config = uvicorn.Config(
            guarded,
            http=LimitedProtocol,
            backlog=_BACKLOG,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=3,
        )
        self._server = uvicorn.Server(config)

    def run(self, *, on_start: Callable[[], None] = lambda: None) -> None:
        """Serve until a signal (Ctrl-C) ends it.

        Args:
            on_start: Called once requests are answered.

        Raises:
            UsageError: The log is malformed.
        """
        self._on_start = on_start
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._server.should_exit = True

    # ------------------------------------------------------------ what it does all the time

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        reading = asyncio.create_task(self._read())
        self._on_start()
        try:
            yield
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading

    async def _read(self) -> None:
        while True:
            begin = time.monotonic()
            try:
                await run_in_threadpool(self._live.update)
            except Exception as error:  # a page that stands still would look like a job that does
                self._failure = UsageError(f"cannot read the log: {error}") if isinstance(error, OSError) else error
                self.stop()
                return
            await asyncio.sleep(max(_EVERY_S, _SHARE * (time.monotonic() - begin)))

    # ------------------------------------------------------------ what is asked of it

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(await run_in_threadpool(self._live.page))

    async def _metrics(self, request: Request) -> Response:
        content, kind = await run_in_threadpool(self._live.metrics, request.headers.get("accept", ""))
        return Response(content, headers={"content-type": kind})

    async def _events(self, request: Request) -> Response:
        return StreamingResponse(self._news(), media_type="text/event-stream")

    async def _news(self) -> AsyncIterator[str]:
        """Yield each new state for one client; it skips those for which the client was too slow."""
        told, told_at = -1, time.monotonic()
        while not self._server.should_exit:
            begin = time.monotonic()
            if self._live.version != told:
                told, told_at = self._live.version, begin
                state = await run_in_threadpool(self._live.state)
                yield f"event: state\ndata: {state}\n\n"
            elif begin - told_at > _KEEP_ALIVE_S:
                told_at = begin
                yield ": still here\n\n"
            await asyncio.sleep(max(_EVERY_S / 4, time.monotonic() - begin))
