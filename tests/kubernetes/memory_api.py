"""An API server in memory: versions, conditions on them, watches that can be lost, and an outage."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ef_common.errors import (
    ClusterAway,
    ClusterConflict,
    ClusterExists,
    ClusterFailed,
    ClusterNotFound,
    ClusterRefused,
)
from ef_common.kubernetes.kinds import PODS, Kind
from ef_common.kubernetes.resource import Json

_Name = tuple[str, str, str]


class MemoryApi:
    """It has the methods of `Api`.

    Attributes:
        namespace: The current one.
        calls: What was changed, as `create pods a-0`.
        down: It answers nothing.
        refused: What it refuses, as in `calls`, and why.
        failing: Where it fails itself, as in `calls`, and how.
        contended: What it does not do once, as in `calls`, because others change a quota at the same time.
        num_failed: How many changes it has failed to make, also while it was down.
        unknown: Versions of groups that it does not have.
        adds_tolerations: Pods get a toleration for each resource that they ask for (`ExtendedResourceToleration`).
    """

    namespace = "here"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.down = False
        self.refused: dict[str, str] = {}
        self.failing: dict[str, str] = {}
        self.contended: set[str] = set()
        self.num_failed = 0
        self.unknown: set[str] = set()
        self.adds_tolerations = False
        self._objects: dict[_Name, Json] = {}
        self._version = 0
        self._lock = threading.RLock()
        self._watches: list[tuple[Kind, queue.SimpleQueue[tuple[str, Json] | None]]] = []

    # ---------------------------------------------------------------- as Api has it

    def observe(self, observer: Callable[[str, int, float | None], object]) -> None:
        """Nothing is sent, so there is nothing to tell."""

    def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        with self._lock:
            self._check()
            return copy.deepcopy(self._found(kind, namespace, name))

    def list(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: str = "",
        keep: Callable[[Json], Json] = lambda thing: thing,
    ) -> tuple[list[Json], str]:
        label, _, value = labels.partition("=")
        with self._lock:
            self._check()
            found = [
                keep(copy.deepcopy(thing))
                for (plural, where, _), thing in self._objects.items()
                if plural == kind.plural
                and namespace in (None, where)
                and (not label or (thing["metadata"].get("labels") or {}).get(label) == value)
            ]
            return found, str(self._version)

    def watch(self, kind: Kind, version: str, *, limit_s: int) -> Iterator[tuple[str, Json]]:
        events: queue.SimpleQueue[tuple[str, Json] | None] = queue.SimpleQueue()
        with self._lock:
            self._check()
            if int(version) != self._version:
                raise ClusterFailed("too old resource version")
            self._watches.append((kind, events))
        while (event := events.get()) is not None:
            yield event
        raise ClusterFailed("the API server has gone")

    def create(self, kind: Kind, thing: Mapping[str, Any]) -> Json:
        made = copy.deepcopy(dict(thing))
        meta = made["metadata"]
        with self._lock:
            if kind.api_version in self.unknown:
                raise ClusterNotFound("the server could not find the requested resource")
            name = meta.get("name") or f"{meta['generateName']}{self._version}"
            call = f"create {kind.plural} {name}"
            self._check(call if call in self.refused else "")  # quotas are looked at before what is there
            if self._name(kind, meta.get("namespace"), name) in self._objects:
                raise ClusterExists(f"{name} already exists")
            self._check(call)
            meta.update(name=name, uid=f"uid-{self._version}", generation=1)
            if self.adds_tolerations and kind.plural == "pods":
                _tolerate_resources(made["spec"])
            return self._put("ADDED", kind, made)

    def replace(self, kind: Kind, thing: Mapping[str, Any], *, sub: str = "") -> Json:
        meta = thing["metadata"]
        with self._lock:
            self._check(f"replace {kind.plural} {meta['name']}")
            before = self._found(kind, meta.get("namespace"), meta["name"])
            if before["metadata"]["resourceVersion"] != meta["resourceVersion"]:
                raise ClusterConflict("the object has been modified")
            made = {**before, "status": thing["status"]} if sub == "status" else {**thing}
            return self._put("MODIFIED", kind, copy.deepcopy(made))

    def apply(self, kind: Kind, thing: Mapping[str, Any]) -> Json:
        meta = thing["metadata"]
        with self._lock:
            try:
                return self.change(kind, meta.get("namespace"), meta["name"], thing)
            except ClusterNotFound:
                return self.create(kind, thing)

    def change(self, kind: Kind, namespace: str | None, name: str, patch: Mapping[str, Any]) -> Json:
        with self._lock:
            if kind.api_version in self.unknown:
                raise ClusterNotFound("the server could not find the requested resource")
            call = f"change {kind.plural} {name}"
            self._check(call if call in self.refused else "")
            made = copy.deepcopy(self._found(kind, namespace, name))
            version = (patch.get("metadata") or {}).get("resourceVersion")
            if version not in (None, made["metadata"]["resourceVersion"]):
                raise ClusterConflict("the object has been modified")
            _merge(made, patch)
            return self._put("MODIFIED", kind, made)

    def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str = "", grace_s: int | None = None
    ) -> Json:
        with self._lock:
            self._check(f"delete {kind.plural} {name}")
            found = self._found(kind, namespace, name)
            if uid and found["metadata"]["uid"] != uid:
                raise ClusterConflict("the UID in the precondition does not match")
            runs = (found.get("status") or {}).get("phase") == "Running"
            if runs and grace_s != 0:
                made = copy.deepcopy(found)
                made["metadata"]["deletionTimestamp"] = "2100-01-01T00:00:00Z"
                return self._put("MODIFIED", kind, made)
            self.remove(kind, namespace, name)
            return {"kind": "Status"}

    # ---------------------------------------------------------------- what else happens

    def remove(self, kind: Kind, namespace: str | None, name: str) -> None:
        """It has gone."""
        with self._lock:
            found = self._objects.pop(self._name(kind, namespace, name))
            self._version += 1
            self._say("DELETED", kind, found)

    def lose_watches(self) -> None:
        """All watches end, and what they would have told is not told."""
        with self._lock:
            for _, events in self._watches:
                events.put(None)
            self._watches.clear()

    def change_spec(self, kind: Kind, namespace: str, name: str, **spec: Any) -> None:
        """A user changes what is wanted."""
        with self._lock:
            generation = self.get(kind, namespace, name)["metadata"]["generation"] + 1
            self.change(kind, namespace, name, {"spec": spec, "metadata": {"generation": generation}})

    def change_status(self, pod: str, status: Json) -> None:
        """A kubelet says this of a pod here."""
        self.change(PODS, self.namespace, pod, {"status": status})

    def run_pods(self, status: int | None = None) -> None:
        """All pods run; or have ended with this status."""
        with self._lock:
            for plural, _, name in list(self._objects):
                if plural == "pods":
                    self.end_pod(name, status)

    def end_pod(self, name: str, status: int | None) -> None:
        """A pod has ended with this status; with None, it runs."""
        state: Json = {"running": {}} if status is None else {"terminated": {"exitCode": status}}
        phase = "Running" if status is None else "Failed" if status else "Succeeded"
        with self._lock:
            ((_, namespace, _), pod), *_ = [one for one in self._objects.items() if one[0][::2] == ("pods", name)]
            containers = [{"name": pod["spec"]["containers"][0]["name"], "state": state}]
            self.change(PODS, namespace, name, {"spec": {"nodeName": "n1"}})
            self.change(PODS, namespace, name, {"status": {"phase": phase, "containerStatuses": containers}})

    # ---------------------------------------------------------------- inside

    def _check(self, call: str = "") -> None:
        if self.down:
            self.num_failed += bool(call)
            raise ClusterAway("the API server does not answer")
        if call in self.refused:
            raise ClusterRefused(self.refused[call])
        if call in self.failing:
            self.num_failed += 1
            raise ClusterFailed(self.failing[call])
        if call in self.contended:
            self.contended.remove(call)
            raise ClusterConflict("Operation cannot be fulfilled on resourcequotas: the object has been modified")
        if call:
            self.calls.append(call)

    @staticmethod
    def _name(kind: Kind, namespace: str | None, name: str) -> _Name:
        return kind.plural, namespace or "", name

    def _found(self, kind: Kind, namespace: str | None, name: str) -> Json:
        try:
            return self._objects[self._name(kind, namespace, name)]
        except KeyError:
            raise ClusterNotFound(f"{kind.plural} {name} not found") from None

    def _put(self, what: str, kind: Kind, thing: Json) -> Json:
        self._version += 1
        thing["metadata"]["resourceVersion"] = str(self._version)
        self._objects[self._name(kind, thing["metadata"].get("namespace"), thing["metadata"]["name"])] = thing
        self._say(what, kind, thing)
        return copy.deepcopy(thing)

    def _say(self, what: str, kind: Kind, thing: Json) -> None:
        thing["metadata"]["resourceVersion"] = str(self._version)
        for watched, events in self._watches:
            if watched.plural == kind.plural:
                events.put((what, copy.deepcopy(thing)))


def _tolerate_resources(spec: Json) -> None:
    names = {name for one in spec["containers"] for name in (one.get("resources") or {}).get("limits") or {}}
    added = [{"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in sorted(names) if "/" in name]
    spec["tolerations"] = [*(spec.get("tolerations") or ()), *added]


def _merge(thing: Json, patch: Mapping[str, Any]) -> None:
    for name, value in patch.items():
        if isinstance(value, Mapping):
            _merge(thing.setdefault(name, {}), value)
        else:
            thing[name] = value
