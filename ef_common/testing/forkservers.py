"""Forkservers that have imported the frameworks: one for each set of modules.

multiprocessing knows only one at a time, in the attributes of one object. Those of the others are kept here, so suites
that need different frameworks take turns without starting a server anew. Processes that test side by side, as those of
pytest-xdist, may share theirs (`share`): each server takes seconds to import what it has.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
_lock = threading.Lock()
_modules: tuple[str, ...] = ()
_resting: dict[tuple[str, ...], dict[str, Any]] = {}
_place: Path | None = None


def share(folder: Path) -> None:
    """Use the forkservers of other processes that share theirs in this folder, and let them use those of this one."""
    global _place
    _place = folder
    folder.mkdir(exist_ok=True)


def start(preload: Sequence[str]) -> None:
    """Have a forkserver run that has imported these modules, and have multiprocessing fork from it."""
    global _modules
    server = forkserver._forkserver
    known = vars(server)
    with _lock, _environ({**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}):
        if _modules != (modules := tuple(preload)):
            _resting[_modules] = dict(known)
            known.clear()
            known.update(_resting.pop(modules, {}) or vars(forkserver.ForkServer()))
            _modules = modules
        server.set_forkserver_preload(list(modules))
        if _place is None:
            server.ensure_running()
        else:
            _find(known, _place / hashlib.sha256(" ".join(modules).encode()).hexdigest()[:8])


def _find(known: dict[str, Any], record: Path) -> None:
    """Use the server of another process that is on record, or start one and put it there."""
    if "ensure_running" in known:  # it is that of another process
        if _is_alive(known["_forkserver_pid"]):
            return
        del known["ensure_running"]
        os.close(known["_forkserver_alive_fd"])
        known.update(_forkserver_address=None, _forkserver_alive_fd=None, _forkserver_pid=None)
    with record.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        owner, descriptor, server, address = json.loads(record.read_text()) if record.exists() else (0, 0, 0, "")
        if server and server == known["_forkserver_pid"] and _is_alive(server):
            return  # others may be connecting to it
        if owner != os.getpid() and _is_alive(server) and (alive := _opened(owner, descriptor)) is not None:
            known.update(_forkserver_address=address, _forkserver_alive_fd=alive, _forkserver_pid=server)
            known["ensure_running"] = _nothing_to_do
            return
        forkserver.ensure_running()
        (place := record.with_suffix(".socket")).unlink(missing_ok=True)
        os.link(known["_forkserver_address"], place)  # which goes with this process
        mine = (known["_forkserver_alive_fd"], known["_forkserver_pid"], str(place))
        record.write_text(json.dumps([os.getpid(), *mine]))


def _opened(owner: int, descriptor: int) -> int | None:
    """The pipe that keeps a server running as long as anybody has it open; None if its owner is gone."""
    try:
        return os.open(f"/proc/{owner}/fd/{descriptor}", os.O_WRONLY)
    except FileNotFoundError:
        return None


def _nothing_to_do() -> None:
    """In place of multiprocessing's `ensure_running`, which asks after a child."""


def _is_alive(pid: int) -> bool:
    """Whether it runs; whoever has started it may not have heard of its end."""
    try:
        return pid > 0 and bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def _environ(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
