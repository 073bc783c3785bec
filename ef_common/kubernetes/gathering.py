"""The event logs of the pods of a job, gathered in one directory as if all workers had written there.

Each pod is asked for its own with `elasticflow logs --json`. A pod that lies can therefore send nothing but lines. They
are checked as those of any log are, and their number and size are limited.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ef_common.errors import ClusterFailed
from ef_common.events import MAX_LINE_BYTES, EventLogError, path_of, read
from ef_common.kubernetes.kinds import JOBS, PODS
from ef_common.kubernetes.resource import JOB_LABEL
from ef_common.kubernetes.texts import one_line

if TYPE_CHECKING:
    from ef_common.kubernetes.api import Api

MAX_POD_BYTES = 1 << 30
MAX_POD_WORKERS = 10_000
_RUN_DIR, _RUN_DIR_VARIABLE = "--run-dir", "ELASTICFLOW_RUN_DIR"
_NUM_AT_ONCE = 8
_HELD_BYTES = 1 << 20
_MAX_NAME_BYTES = 255
_MOST_TOLD = 8


@dataclass(slots=True)
class Gathered:
    """What has been found.

    Attributes:
        unread: Pods that run and whose log cannot be used, and why.
        missing: Workers that have trained and whose logs are not there: their pods are gone, or have just begun. A view
            names its members, and shares at least one with the view before it. So if this is empty, nothing is missing
            of what the job has done since it was last started, be it from a checkpoint.
    """

    unread: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """What a user should know of that."""
        for pod, why in self.unread.items():
            yield one_line(f"The event log of {pod} is not in the report: {why}")
        if self.missing:
            some = ", ".join(self.missing[:_MOST_TOLD])
            more = f" and {len(self.missing) - _MOST_TOLD} more" if len(self.missing) > _MOST_TOLD else ""
            yield one_line(f"The event logs of these workers are missing, as no pod that runs has them: {some}{more}")


def gather(api: Api, namespace: str, job: str, place: Path, *, run_dir: str = "") -> Gathered:
    """Gather them.

    All that the pods have logged is transferred, from eight pods at a time. If pods share a run directory, it is
    transferred for each of them, and kept once.

    Args:
        api: The cluster.
        namespace: Where the job is.
        job: Its name.
        place: A new directory, which becomes that of a run.
        run_dir: The run directory of the pods; "" for what the job says, or else for the newest one of each pod.

    Raises:
        ClusterNotFound: There is no such job.
        ClusterFailed: No pod of it has logs that can be read.
    """
    spec = api.get(JOBS, namespace, job)["spec"]["template"]["spec"]["containers"][0]
    where = run_dir or run_dir_in(spec)
    command = ["elasticflow", "logs", "--json", *([where] if where else [])]
    gathered, named = Gathered(), set[str]()
    running = _running(api, namespace, job)
    if not running:
        raise ClusterFailed(
            f"no pod of {job} runs, and pods take their event logs with them. If their run directory is on a volume "
            "that outlives them, use `elasticflow report DIR` where that can be read"
        )
    (place / "events").mkdir(parents=True)
    with ThreadPoolExecutor(_NUM_AT_ONCE, thread_name_prefix="elasticflow-gather") as readers:
        ask = partial(_ask, api, namespace, spec["name"], command, place)
        for pod, found in zip(running, readers.map(ask, running), strict=True):
            if isinstance(found, str):
                gathered.unread[pod] = found
                continue
            named |= found
            _take(_folder(place, pod), place)
    there = {unquote(file.stem) for file in (place / "events").iterdir()}
    if not there:
        reasons = "".join(f": {why}" for why in sorted(set(gathered.unread.values()))[:1])
        raise ClusterFailed(
            one_line(f"none of the {len(running)} pods of {job} that run has an event log that can be read{reasons}")
        )
    gathered.missing = sorted(named - there)
    return gathered


def _take(folder: Path, place: Path) -> None:
    for file in (folder / "events").iterdir():
        target = place / "events" / file.name
        if not target.exists():  # else another pod that shares the run directory had it, too
            file.rename(target)


def run_dir_in(container: dict[str, Any]) -> str:
    """The run directory that a container is given by its command or a variable; "" if it is given none.

    Example:
        >>> run_dir_in({"command": ["elasticflow", "run", "--run-dir=/run/elasticflow", "train.py"]})
        '/run/elasticflow'
    """
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == _RUN_DIR:
            return str(value if equals else following)
    variables = {one["name"]: one.get("value", "") for one in container.get("env") or ()}
    return str(variables.get(_RUN_DIR_VARIABLE, ""))


def _running(api: Api, namespace: str, job: str) -> list[str]:
    found, _ = api.list(PODS, namespace, labels=f"{JOB_LABEL}={job}")
    return sorted(pod["metadata"]["name"] for pod in found if pod["status"].get("phase") == "Running")


def _ask(api: Api, namespace: str, container: str, command: list[str], place: Path, pod: str) -> set[str] | str:
    """Fetch the log of a pod: the workers that it names, or why it cannot be used."""
    folder = _folder(place, pod)
    (folder / "events").mkdir(parents=True)
    try:
        return _keep(_lines(api.run(namespace, pod, container, command)), folder)
    except (ClusterFailed, EventLogError) as error:
        return str(error).replace(f"{folder}/", "")


def _folder(place: Path, pod: str) -> Path:
    return place / "pods" / pod


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines, with their ends; what comes behind the last one is left out."""
    rest, size = b"", 0
    for chunk in chunks:
        size += len(chunk)
        if size > MAX_POD_BYTES:
            raise ClusterFailed(f"its log is larger than {MAX_POD_BYTES >> 20} MiB")
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise ClusterFailed(f"its log has a line of more than {MAX_LINE_BYTES} bytes")
        yield from (line + b"\n" for line in lines)


def _keep(lines: Iterator[bytes], folder: Path) -> set[str]:
    """Write the lines of each worker to a file of its own; the workers that they name."""
    held: defaultdict[Path, list[bytes]] = defaultdict(list)
    known, size = set[Path](), 0
    for line in lines:
        path = path_of(folder, _worker_of(line))
        known.add(path)
        if len(path.name) > _MAX_NAME_BYTES or len(known) > MAX_POD_WORKERS:
            raise ClusterFailed(f"its log has more than {MAX_POD_WORKERS} workers, or one with a very long name")
        held[path].append(line)
        size += len(line)
        if size > _HELD_BYTES:
            _write(held)
            size = 0
    _write(held)
    if not known:
        return set()
    return {worker for record in read(folder) if record["kind"] == "view" for worker in record["members"]}


def _write(held: defaultdict[Path, list[bytes]]) -> None:
    for path, lines in held.items():
        with path.open("ab") as file:
            file.writelines(lines)
    held.clear()


def _worker_of(line: bytes) -> str:
    try:
        worker = json.loads(line)["worker"]
        if isinstance(worker, str) and worker.encode():
            return worker
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise ClusterFailed(f"it sends what is no event log: {line[:100]!r}")
