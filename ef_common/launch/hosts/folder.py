"""What the processes of a node of `elasticflow run --hosts` share on its host: a folder that only this user can read.

::

    order       what is to run; the keeper removes it, because the token is in it
    keeper      the process that keeps the node, and the name of this life of it
    output      what the node prints
    run/…       its run directory
    told        what the launcher has said last; it is written anew at each sign of life
    status      exit status of the node
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ef_common.errors import UsageError
from ef_common.files import write_whole
from ef_common.launch.hosts.lines import OUTPUT
from ef_common.launch.process_name import process_name
from ef_common.launch.run_directory import locked

_ORDER, _KEEPER, _TOLD, _STATUS, _RUN = "order", "keeper", "told", "status", "run"
_WISH = "wish.json"
_KILLED = 128 + signal.SIGKILL


def read_wish(run_dir: Path) -> tuple[int, int] | None:
    """What `wish_for` has written; None if nothing."""
    try:
        found = json.loads((run_dir / _WISH).read_text())
    except FileNotFoundError:
        return None
    return int(found["number"]), int(found["nodes"])


def wish_for(run_dir: Path, nodes: int) -> None:
    """Tell the launcher of this host's node, through its run directory, that the job wants so many nodes."""
    with locked(run_dir):  # another worker of this host may be rank 0 now, and each wish needs a number of its own
        number, _ = read_wish(run_dir) or (0, 0)
        write_whole(run_dir / _WISH, json.dumps({"number": number + 1, "nodes": nodes}).encode())


class HostFolder:
    """The folder of a node.

    Args:
        path: It.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, job: str, host: str) -> HostFolder:
        """That of the node of a job on a host, as the launcher names it.

        Raises:
            UsageError: Somebody else has made the directory in which it is.
        """
        top = Path(tempfile.gettempdir()) / f"elasticflow-{os.getuid()}"
        with contextlib.suppress(FileExistsError):
            top.mkdir(mode=0o700)
        found = top.lstat()
        if top.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UsageError(f"this user alone must have access to the directory. Received: {top}")
        return cls(top / f"{job}-{hashlib.sha256(host.encode()).hexdigest()[:12]}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else starts a keeper meanwhile. The folder is made if it is missing."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        with locked(self.path):
            yield

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    # ------------------------------------------------------------ the order and the keeper

    def give(self, order: dict[str, Any]) -> None:
        """Leave the order for a keeper that is to be started."""
        self._write(_ORDER, order)

    def take(self) -> dict[str, Any]:
        """Take the order."""
        order = self._read(_ORDER)
        (self.path / _ORDER).unlink()
        return order or {}

    def keep(self, life: str) -> None:
        """This process is the keeper from now on."""
        pid = os.getpid()
        self._write(_KEEPER, {"pid": pid, "process": process_name(pid), "life": life})

    @property
    def life(self) -> str:
        """The name of this life; "" if there has been no keeper."""
        return str((self._read(_KEEPER) or {}).get("life", ""))

    @property
    def is_kept(self) -> bool:
        """Whether the keeper runs."""
        keeper = self._read(_KEEPER)
        return keeper is not None and process_name(keeper["pid"]) == keeper["process"]

    # ------------------------------------------------------------ what the launcher says, and how the node ends

    def tell(self, what: str) -> None:
        """The launcher has given a sign of life, and says this."""
        self._write(_TOLD, {"what": what})

    def told(self) -> tuple[str, int]:
        """What the launcher has said last, and a number that changes with each sign of life."""
        try:
            return str((self._read(_TOLD) or {}).get("what", "")), (self.path / _TOLD).stat().st_mtime_ns
        except FileNotFoundError:
            return "", 0

    def end(self, status: int) -> None:
        """The node has ended."""
        self._write(_STATUS, {"status": status})

    @property
    def status(self) -> int | None:
        """Exit status of the node, that of a killed one if its keeper has ended without a word; None while it runs."""
        is_kept = self.is_kept  # first: the keeper ends after it has written the status
        known = self._read(_STATUS)
        return int(known["status"]) if known is not None else None if is_kept else _KILLED

    # ------------------------------------------------------------ what the node writes

    @property
    def run_dir(self) -> Path:
        """Its run directory."""
        return self.path / _RUN

    @property
    def output(self) -> Path:
        """What it prints."""
        return self.path / OUTPUT

    def written(self) -> Iterator[Path]:
        """The files that the launcher is to have."""
        yield self.output
        yield from sorted(self.run_dir.glob("events/*.jsonl"))

    def wish(self) -> tuple[int, int]:
        """The newest wish of the job for nodes: its number, from 1, and how many; (0, 0) if there is none."""
        found = read_wish(self.run_dir)
        return (0, 0) if found is None else found

    def _write(self, name: str, what: dict[str, Any]) -> None:
        write_whole(self.path / name, json.dumps(what).encode(), mode=0o600)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            return dict(json.loads((self.path / name).read_text()))
        except FileNotFoundError:
            return None
