"""Decides who may see a live page: holders of its key or, if there is no key, clients on this machine.

The key follows from the job's token, which itself is never sent. It comes as ``Authorization: Bearer KEY``, or once as
``?key=KEY``: then the browser gets a cookie, and is sent to the address without the key. Cookies do not tell the ports
of a host apart, so that of each key has a name of its own. Without a key the server
listens on the loopback interface only. There it answers only to its own names, so that no page of another site can
read it by a name of that site that leads here (DNS rebinding).
"""

from __future__ import annotations

import hashlib
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl

from starlette.datastructures import URL, Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ef_common.protocol.auth import proves

_HEADERS = {
    b"cache-control": b"no-store",
    b"content-security-policy": b"frame-ancestors 'none'",
    b"cross-origin-resource-policy": b"same-origin",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
}


class Guard:
    """Lets permitted requests pass, and forbids other sites to use the answers.

    Args:
        app: The application that it guards.
        key: To be shown by all who ask; None if none is asked for.
        hosts: Names by which this server may be called, without the port; None for any.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, hosts: frozenset[str] | None) -> None:
        self._app, self._key, self._hosts = app, key, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS.items()]
            await send(message)

        answer = self._answer(scope)
        await (self._app if answer is None else answer)(scope, receive, send_guarded)

    def _answer(self, scope: Scope) -> Response | None:
        """The answer in place of the application's; None if the application may answer."""
        headers = Headers(scope=scope)
        if self._hosts is not None and _name(headers.get("host", "")) not in self._hosts:
            return PlainTextResponse("This server is for its own machine.\n", status_code=421)
        if self._key is None:
            return None
        if given := _key_of_query(scope):
            if not proves(self._key, given):
                return _refused()
            answer = RedirectResponse(URL(scope=scope).path, status_code=303)
            answer.set_cookie(cookie_name(self._key), self._key, httponly=True, samesite="strict")
            return answer
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        shown = (
            bearer.strip() if scheme.lower() == "bearer" else _cookie(headers.get("cookie", ""), cookie_name(self._key))
        )
        return None if proves(self._key, shown) else _refused()


def _refused() -> Response:
    text = "This page needs its key: open the address that the server has printed, or send Authorization: Bearer KEY.\n"
    return PlainTextResponse(text, status_code=401, headers={"www-authenticate": "Bearer"})


def _key_of_query(scope: Scope) -> str:
    query: str = scope.get("query_string", b"").decode("latin-1")
    try:
        return dict(parse_qsl(query, max_num_fields=16)).get("key", "")
    except ValueError:
        return ""


def cookie_name(key: str) -> str:
    """Name of the cookie that holds a key."""
    return f"elasticflow-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def _cookie(header: str, name: str) -> str:
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return str(morsel.value) if morsel is not None else ""


def _name(host: str) -> str:
    """The host name without the port."""
    return host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0].lower()
