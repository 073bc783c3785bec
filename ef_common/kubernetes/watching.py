"""What a controller knows of the objects of one kind: a copy that follows the API server's."""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ef_common import threads
from ef_common.errors import ClusterFailed, ThreadFailed
from ef_common.kubernetes.kinds import Kind
from ef_common.kubernetes.resource import Json

if TYPE_CHECKING:
    from ef_common.kubernetes.api import Api

logger = logging.getLogger(__name__)

_WATCH_S = 300
_PAUSES_S = (0.2, 15.0)
_MAX_GONE = 512
"""So many that have gone are remembered, as the answer to a call may come later than the news of the end."""
Excerpt = Callable[[Json], Json | None]
"""What is kept of an object of which only a part counts; None for one of which everything counts."""


class Copy:
    """A copy, kept by a thread. If the API server fails, it stays as it is, and is read anew afterwards.

    Args:
        api: Where the objects are.
        kind: Their kind.
        on_change: Called after each change, but for those of objects whose excerpt stays the same.
        excerpt: What is kept of an object.
    """

    def __init__(
        self, api: Api, kind: Kind, *, on_change: Callable[[], object], excerpt: Excerpt = lambda thing: None
    ) -> None:
        self._api, self._kind, self._on_change, self._excerpt = api, kind, on_change, excerpt
        self._objects: dict[str, Json] = {}
        self._gone: deque[str] = deque(maxlen=_MAX_GONE)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._read = threading.Event()

    def start(self, *, on_failure: Callable[[ThreadFailed], object] = lambda failure: None) -> None:
        """Start the thread.

        Args:
            on_failure: Called if the thread ends by an error, so that the copy is out of date from then on.
        """
        name, job = f"elasticflow-{self._kind.plural}", f"watches {self._kind.plural}"
        threads.start(self._run, name=name, job=job, on_failure=on_failure)

    def stop(self) -> None:
        """Let the thread end, which may take as long as a watch lasts."""
        self._stopped.set()

    @property
    def is_read(self) -> bool:
        """Whether it has been read once."""
        return self._read.is_set()

    def objects(self) -> list[Json]:
        """The objects, which nobody may change."""
        with self._lock:
            return list(self._objects.values())

    @property
    def num_objects(self) -> int:
        """How many objects there are."""
        return len(self._objects)

    def update(self, thing: Json) -> None:
        """Take what a call has returned, which may be newer than what was watched: nobody does the same again then."""
        self._take("ADDED", thing)

    def _run(self) -> None:
        shortest, longest = _PAUSES_S
        pause_s = shortest
        while not self._stopped.is_set():
            try:
                version = self._read_all()
                while not self._stopped.wait(shortest):  # an API server may end watches at once
                    version = self._follow(version)
                    pause_s = shortest
            except Exception as error:  # the controller acts on the copy, so it must not stay as it is for ever
                if self._stopped.is_set():
                    return
                trace = None if isinstance(error, ClusterFailed) else error
                logger.warning("%s cannot be watched: %s", self._kind.plural, error, exc_info=trace)
                self._stopped.wait(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(longest, 2 * pause_s)

    def _read_all(self) -> str:
        found, version = self._api.list(self._kind, keep=lambda thing: self._kept(thing)[0])
        listed = {thing["metadata"]["uid"]: thing for thing in found}
        with self._lock:
            newer = {uid: one for uid, one in self._objects.items() if _is_older(version, _version_of(one))}
            self._objects = {**listed, **newer}  # a call may have returned something since the list was made
        self._read.set()
        self._on_change()
        return version

    def _follow(self, version: str) -> str:
        for what, thing in self._api.watch(self._kind, version, limit_s=_WATCH_S):
            if self._stopped.is_set():
                raise ClusterFailed("it is not watched any more")
            version = thing["metadata"]["resourceVersion"]
            if what != "BOOKMARK" and self._take(what, thing):
                self._on_change()
        return version

    def _take(self, what: str, thing: Json) -> bool:
        """Take a change. Returns whether it changes anything that is kept."""
        uid = thing["metadata"]["uid"]
        kept, is_whole = self._kept(thing)
        with self._lock:
            before = self._objects.get(uid)
            if what == "DELETED":
                self._objects.pop(uid, None)
                self._gone.append(uid)
            elif uid not in self._gone:
                self._objects[uid] = _newer(before, kept)
                return is_whole or before is None or _without_version(before) != _without_version(kept)
        return True

    def _kept(self, thing: Json) -> tuple[Json, bool]:
        """What is kept of an object, and whether that is all of it that anybody here reads."""
        part = self._excerpt(thing)
        if part is not None:
            return part, False
        thing["metadata"].pop("managedFields", None)  # half of its size
        return thing, True


def _newer(before: Json | None, thing: Json) -> Json:
    return thing if before is None or not _is_older(_version_of(thing), _version_of(before)) else before


def _version_of(thing: Json) -> str:
    return str(thing["metadata"]["resourceVersion"])


def _is_older(one: str, other: str) -> bool:
    """Versions are numbers that grow, in every API server that there is."""
    try:
        return int(one) < int(other)
    except ValueError:
        return False


def _without_version(thing: Json) -> Json:
    return {**thing, "metadata": {**thing["metadata"], "resourceVersion": ""}}
