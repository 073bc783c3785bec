"""What nodes on other machines write, as their launcher keeps it: event logs in its run directory, and lines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ef_common.launch.hosts.lines import OUTPUT, Data
from ef_common.terminal import is_json

_MAX_LINE_BYTES = 1 << 16


class Records:
    """What a host has written in the present life of its node.

    Args:
        host: Name of the host, which stands before each of its lines.
        run_dir: Directory of the run.

    Attributes:
        life: Of the node; "" before it is known.
        known: How many bytes of each file have come.
    """

    def __init__(self, host: str, run_dir: Path) -> None:
        self.life = ""
        self.known: dict[str, int] = {}
        self._prefix = b"" if is_json() else f"{host}: ".encode()
        self._events = run_dir / "events"
        self._rest = b""

    def begin(self, life: str) -> None:
        """The node runs. In a new life it begins all its files anew."""
        if life != self.life:
            self.life, self.known, self._rest = life, {}, b""

    def keep(self, data: Data) -> None:
        """Keep a part of a file, unless it has come before."""
        begin = self.known.get(data.file, 0)
        content = data.content[begin - data.offset :] if begin > data.offset else data.content
        if not content or data.offset > begin:
            return
        self.known[data.file] = begin + len(content)
        if data.file == OUTPUT:
            self._show(content)
            return
        self._events.mkdir(exist_ok=True)
        with (self._events / data.file).open("ab", buffering=0) as log:
            log.write(content)

    def _show(self, content: bytes) -> None:
        """Show whole lines; of one that a progress bar has drawn again and again, its last state."""
        *whole, self._rest = (self._rest + content).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            self._rest = self._rest.rpartition(b"\r")[2][-_MAX_LINE_BYTES:]
        shown = [self._prefix + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in whole]
        sys.stdout.flush()
        try:
            os.write(1, b"".join(shown))
        except OSError:  # nobody reads it
            return
