"""Sources of the notice that a worker must leave: a file, a URL such as a cloud's metadata server, its agent's end.

What cannot be asked gives no notice: a worker must not leave because a metadata server is slow.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

import psutil

from ef_common.errors import UsageError
from ef_common.launch.ending import has_ended

logger = logging.getLogger(__name__)

TIMEOUT_S = 2.0
_MAX_BYTES = 4096
_NO_NOTICE = ("", "NONE", "FALSE")
_HEADERS: Mapping[str, str] = {"Metadata-Flavor": "Google", "Metadata": "true"}  # metadata servers insist on one


class NoticeSource(Protocol):
    """Something that can be asked for a notice."""

    def ask(self) -> str:
        """The notice in one line; empty if there is none. Waits for seconds at most, and never raises."""


@dataclass(frozen=True, slots=True)
class FileSource:
    """A file, whose existence is the notice.

    Args:
        path: Path of the file.
    """

    path: Path

    def ask(self) -> str:
        """See the port."""
        try:
            return f"there is a file {self.path}" if self.path.exists() else ""
        except OSError:
            return ""


@dataclass(frozen=True, slots=True)
class UrlSource:
    """An http(s) URL: status 200 with a body other than NONE or FALSE is a notice.

    Args:
        url: Asked without a proxy, as it is this machine's own.
    """

    url: str

    def ask(self) -> str:
        """See the port."""
        import urllib.error  # with http.client they take a tenth of the time in which a command starts
        import urllib.request
        from http.client import HTTPException

        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(self.url, headers=dict(_HEADERS))
        try:
            with opener.open(request, timeout=TIMEOUT_S) as answer:
                body = answer.read(_MAX_BYTES) if answer.status == 200 else b""
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 404:
                logger.debug("%s answers with status %d", self.url, error.code)
            return ""
        except (OSError, HTTPException, ValueError) as error:
            logger.debug("%s cannot be asked: %s", self.url, error)
            return ""
        text = " ".join(body.decode(errors="replace").split())
        return "" if text.upper() in _NO_NOTICE else f"{self.url} says {text[:200]}"


class AgentEnd:
    """The end of the agent that has started this worker: without it, nobody would end the worker with its node.

    Args:
        agent: As the agent has written it with `this_agent`. Nothing is known of one in another PID namespace.

    Raises:
        ValueError: That is no agent.
    """

    def __init__(self, agent: str) -> None:
        pid, _, namespace = agent.partition("@")
        self._agent: psutil.Process | None = None
        self._has_ended = False
        if int(pid) > 0 and namespace == _namespace():
            try:
                self._agent = psutil.Process(int(pid))  # which is told from a later one of the same number
            except psutil.NoSuchProcess:
                self._has_ended = True

    def ask(self) -> str:
        """See the port."""
        if self._agent is not None and not self._has_ended:
            with contextlib.suppress(psutil.Error):  # it cannot be seen now
                self._has_ended = has_ended(self._agent)
        return "the agent of this worker has ended" if self._has_ended else ""


def this_agent(pid: int | None = None) -> str:
    """Names this process, or another one of this machine, so that `AgentEnd` finds it."""
    return f"{pid or os.getpid()}@{_namespace()}"


def _namespace() -> str:
    """The PID namespace of this process: in another one, its id means another process, or none."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


def source_for(url: str, *, what: str) -> NoticeSource:
    """The source for a URL.

    Args:
        url: ``file:///path``, ``http://…`` or ``https://…``.
        what: Name of the setting, for the error.

    Raises:
        UsageError: The URL names no source.
    """
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  (it is checked where it is read)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return FileSource(Path(unquote(parts.path)))
    if parts.scheme in ("http", "https") and parts.hostname:
        return UrlSource(url)
    raise UsageError(f"{what} must be file:///PATH, http://… or https://…. Received: {url!r}")
