"""The API server's verbs on JSON objects.

lightkube knows where it is, how to prove who we are, and how to keep a token of a service account fresh. Its requests
for objects are not used: they cannot delete a pod on the condition that it is still the same one, and they drop fields
that its models do not have.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import httpx2
from lightkube import KubeConfig
from lightkube.config.client_adapter import Client, ConnectionParams
from lightkube.core.exceptions import ConfigError

from ef_common.errors import (
    ClusterAway,
    ClusterConflict,
    ClusterExists,
    ClusterExpired,
    ClusterFailed,
    ClusterNotFound,
    ClusterRefused,
    UsageError,
)
from ef_common.kubernetes import remote
from ef_common.kubernetes.kinds import PODS, Kind
from ef_common.kubernetes.resource import Json

_TIMEOUT_S = 10.0
_SILENCE_S = 60.0
_WATCH_SILENCE_S = 90.0
"""A watch that has sent nothing for this time is over: an API server sends a bookmark each minute."""
_LOG_SILENCE_S = 90.0
"""A log that is followed and has said nothing for this time is opened again, as its connection may be dead."""
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)) (.*)", re.DOTALL)
"""The time of a line of a log. A line with carriage returns is taken for several, of which the first one has it."""
_MERGE, _APPLY = "application/merge-patch+json", "application/apply-patch+yaml"
_MAX_CHARS = 200
_PAGE = 500
"""So many objects are listed at a time, as kubectl does it."""
_Part = TypeVar("_Part", str, Json)
Observer = Callable[[str, int, float | None], object]
"""Is told of each call: its method, the status of the answer, 0 for none, and how long it took; None for a watch."""
_ERRORS: dict[int, type[ClusterFailed]] = {
    404: ClusterNotFound,
    409: ClusterConflict,
    410: ClusterExpired,
    **dict.fromkeys((400, 403, 422), ClusterRefused),
    **dict.fromkeys((429, 503, 504), ClusterAway),
}
_EXISTS = "AlreadyExists"
"""The reason that tells one answer with status 409 from the others."""


class Api:
    """A connection to an API server. Threads may share it.

    Args:
        kubeconfig: File that says where it is; "" for that of the environment, as kubectl finds it, or of the pod.
        manager: Who changes objects, for people who look at them.
        timeout_s: How long one call may take.

    Raises:
        UsageError: Nothing says where it is.

    Attributes:
        namespace: The one of the current context, or of the pod.
    """

    def __init__(self, kubeconfig: str = "", *, manager: str = "elasticflow", timeout_s: float = _TIMEOUT_S) -> None:
        try:
            config = (KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_env()).get()
        except (ConfigError, OSError) as error:
            raise UsageError(f"no cluster can be found: {error}. Set KUBECONFIG, as kubectl needs it") from None
        self.namespace: str = config.namespace or "default"
        self._manager = {"fieldManager": manager}
        self._only: str | None = None
        self._observe: Observer = lambda verb, status, duration_s: None
        self._client = Client(config, ConnectionParams(timeout=httpx2.Timeout(timeout_s)))

    def close(self) -> None:
        """End it."""
        self._client.close()

    def limit_to(self, namespace: str) -> None:
        """List and watch what is in this namespace from now on, in place of what is in all of them."""
        self._only = namespace

    def observe(self, observer: Observer) -> None:
        """Let it be told of each call and of each watch from now on."""
        self._observe = observer

    def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        """One object.

        Raises:
            ClusterNotFound: It is not there.
        """
        return self._ask("GET", kind.path(namespace, name))

    def list(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: str = "",
        keep: Callable[[Json], Json] = lambda thing: thing,
    ) -> tuple[list[Json], str]:
        """All objects, and the version of the list, which is read in pages.

        Args:
            kind: Their kind.
            namespace: Where they are; None for everywhere.
            labels: They have these.
            keep: What is returned of an object. The rest of it is in memory as long as its page.
        """
        path, params = kind.path(namespace or self._only), {"labelSelector": labels} if labels else {}
        page = {**params, "limit": str(_PAGE)}
        kept: list[Json] = []
        while True:
            try:
                found = self._ask("GET", path, params=page)
            except ClusterExpired:
                if "continue" not in page:
                    raise
                kept, page = [], params  # pages are not kept for ever, so this time there is only one
                continue
            meta = _part(found, "metadata", dict)
            kept.extend(keep(thing) for thing in found.get("items") or ())
            if not (token := meta.get("continue")):
                return kept, _part(meta, "resourceVersion", str)
            page = {**params, "limit": str(_PAGE), "continue": str(token)}

    def watch(self, kind: Kind, version: str, *, limit_s: int) -> Iterator[tuple[str, Json]]:
        """Changes since a version: `ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`, and the object.

        It ends after a while, and when nothing has come for 90 seconds. Then its connection may be dead: if the host of
        an API server crashes, nobody closes it. Some API servers send no bookmarks of objects that never change. A
        watch of these is begun again from the same version, which costs one request.

        Raises:
            ClusterFailed: The API server has gone, knows that version no more, or sends what is malformed.
        """
        params = {
            "watch": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(limit_s),
            "allowWatchBookmarks": "true",
        }
        timeout = httpx2.Timeout(_TIMEOUT_S, read=_WATCH_SILENCE_S)
        try:
            with self._client.stream("GET", kind.path(self._only), params=params, timeout=timeout) as answer:
                self._observe("WATCH", answer.status_code, None)
                if answer.is_error:
                    answer.read()
                    raise _error_of(answer)
                for line in _lines_until_silence(answer):
                    event = _object_in(line)
                    what, thing = _part(event, "type", str), _part(event, "object", dict)
                    if what == "ERROR":
                        raise ClusterFailed(str(thing.get("message")))
                    yield what, thing
        except httpx2.HTTPError as error:
            self._observe("WATCH", 0, None)
            raise ClusterAway(f"the API server does not answer: {error!r}") from error

    def create(self, kind: Kind, thing: Mapping[str, Any]) -> Json:
        """Make an object.

        Raises:
            ClusterExists: Its name is taken.
            ClusterConflict: It was not made; a quota changes too often at the moment, say.
        """
        path = kind.path(thing["metadata"].get("namespace"))
        return self._ask("POST", path, body=thing, params=self._manager)

    def replace(self, kind: Kind, thing: Mapping[str, Any], *, sub: str = "") -> Json:
        """Write an object, or a part of it.

        Raises:
            ClusterConflict: Somebody has written it since it was read.
        """
        path = kind.path(thing["metadata"].get("namespace"), thing["metadata"]["name"], sub)
        return self._ask("PUT", path, body=thing, params=self._manager)

    def change(self, kind: Kind, namespace: str | None, name: str, patch: Mapping[str, Any]) -> Json:
        """Change some fields of an object."""
        return self._ask("PATCH", kind.path(namespace, name), body=patch, params=self._manager, form=_MERGE)

    def apply(self, kind: Kind, thing: Mapping[str, Any]) -> Json:
        """Make an object, or let it have these fields."""
        path = kind.path(thing["metadata"].get("namespace"), thing["metadata"]["name"])
        return self._ask("PATCH", path, body=thing, params={**self._manager, "force": "true"}, form=_APPLY)

    def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str = "", grace_s: int | None = None
    ) -> Json:
        """Delete an object; returns it if it does not go at once.

        Args:
            kind: Its kind.
            namespace: Where it is.
            name: Its name.
            uid: It is only deleted if it is this one.
            grace_s: How long a pod may take to end, at most; None for what the pod says.

        Raises:
            ClusterConflict: It is another one.
            ClusterNotFound: It is not there.
        """
        body: Json = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        return self._ask("DELETE", kind.path(namespace, name), body=body)

    def log(self, namespace: str, pod: str, container: str) -> Iterator[str]:
        """The lines that a container of a pod has written."""
        return self._log(namespace, pod, container, {}, silence_s=_TIMEOUT_S)

    def follow_log(self, namespace: str, pod: str, container: str, *, since: str = "") -> Iterator[tuple[str, str]]:
        """The lines that a container of a pod writes, until it has ended: the time of each of them, and the line.

        Args:
            namespace: Where the pod is.
            pod: Its name.
            container: Its container.
            since: Of the lines up to this time, none is returned; "" for all of them.

        Raises:
            ClusterAway: The API server has gone, or may have, as nothing was written for 90 seconds.
        """
        params = {"follow": "true", "timestamps": "true", **({"sinceTime": since} if since else {})}
        at = since
        for line in self._log(namespace, pod, container, params, silence_s=_LOG_SILENCE_S):
            found = _STAMP.match(line)
            at, text = found.groups() if found else (at, line)
            if at > since or not since:  # an API server sends all lines of the second in which it begins
                yield at, text

    def _log(
        self, namespace: str, pod: str, container: str, more: Mapping[str, str], *, silence_s: float
    ) -> Iterator[str]:
        params, timeout = {"container": container, **more}, httpx2.Timeout(_TIMEOUT_S, read=silence_s)
        try:
            with self._client.stream("GET", PODS.path(namespace, pod, "log"), params=params, timeout=timeout) as answer:
                if answer.is_error:
                    answer.read()
                    raise _error_of(answer)
                yield from answer.iter_lines()
        except httpx2.HTTPError as error:
            raise ClusterAway(f"the API server does not answer: {error!r}") from error

    def run(self, namespace: str, pod: str, container: str, command: Sequence[str]) -> Iterator[bytes]:
        """What a command writes that runs in a container of a pod, as `kubectl exec` runs it.

        Raises:
            ClusterFailed: It cannot be run, has not ended well, or says nothing for a while.
        """
        options = [("container", container), ("stdout", "true"), ("stderr", "true")]
        params = [*options, *(("command", part) for part in command)]
        path, headers = PODS.path(namespace, pod, "exec"), remote.headers()
        try:
            with self._client.stream("GET", path, params=params, headers=headers) as answer:
                if answer.status_code != remote.SWITCHING:
                    answer.read()
                    raise _error_of(answer)
                yield from remote.output(answer.extensions["network_stream"], silence_s=_SILENCE_S)
        except httpx2.HTTPError as error:
            raise ClusterAway(f"the API server does not answer: {error!r}") from error

    def _ask(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
        form: str = "application/json",
    ) -> Json:
        content = None if body is None else json.dumps(body).encode()
        began = time.monotonic()
        try:
            answer = self._client.request(method, path, params=params, content=content, headers={"Content-Type": form})
        except httpx2.HTTPError as error:
            self._observe(method, 0, time.monotonic() - began)
            raise ClusterAway(f"the API server does not answer: {error!r}") from error
        self._observe(method, answer.status_code, time.monotonic() - began)
        if answer.is_error:
            raise _error_of(answer)
        return _object_in(answer.text)


def _lines_until_silence(answer: httpx2.Response) -> Iterator[str]:
    with contextlib.suppress(httpx2.ReadTimeout):
        yield from answer.iter_lines()


def _object_in(text: str) -> Json:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ClusterFailed(f"expected an object from the API server. Received: {text[:_MAX_CHARS]!r}")
    return found


def _part(thing: Json, name: str, kind: type[_Part]) -> _Part:
    part = thing.get(name)
    if not isinstance(part, kind):
        raise ClusterFailed(f"expected {name} in what the API server sends. Received: {str(thing)[:_MAX_CHARS]}")
    return part


def _error_of(answer: httpx2.Response) -> ClusterFailed:
    try:
        status = _object_in(answer.text)
    except ClusterFailed:
        status = {}
    message = str(status.get("message") or answer.text or answer.reason_phrase)
    if status.get("reason") == _EXISTS:
        return ClusterExists(message)
    return _ERRORS.get(answer.status_code, ClusterFailed)(message)
