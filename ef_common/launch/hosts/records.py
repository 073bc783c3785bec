"""What nodes on other machines write, as their launcher keeps it: event logs in its run directory, and lines."""

from __future__ import annotations

from pathlib import Path

from ef_common.launch.hosts.lines import OUTPUT, Data
from ef_common.launch.hosts.output import Output
from ef_common.terminal import is_json

_MAX_LINE_BYTES = 1 << 16


class Records:
    """What a host has written in the present life of its node.

    Args:
        host: Name of the host, which stands before each of its lines.
        run_dir: Directory of the run.
        output: Where lines are shown.

    Attributes:
        life: Of the node; "" before it is known.
        known: How many bytes of each file have come.
    """

    def __init__(self, host: str, run_dir: Path, output: Output) -> None:
        self.life = ""
        self.known: dict[str, int] = {}
        self._host = host
        self._prefix = b"" if is_json() else f"{host}: ".encode()
        self._events = run_dir / "events"
        self._output = output
        self._rest = b""
        self._dropping = False

    def begin(self, life: str) -> None:
        """The node runs. In a new life it begins all its files anew."""
        if life != self.life:
            self.end()
            self.life, self.known, self._rest, self._dropping = life, {}, b"", False

    def end(self) -> None:
        """The node writes no more: show the last line even if it is not whole."""
        if self._rest:
            self._show(b"\n")

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
        if not self._dropping:
            self._log(data.file, content)

    def _log(self, file: str, content: bytes) -> None:
        """Add to an event log. As in a worker, no job dies of it, and no more is added after a failure."""
        try:
            self._events.mkdir(exist_ok=True)
            with (self._events / file).open("ab", buffering=0) as log:
                written = log.write(content)
                if written != len(content):
                    raise OSError(f"only {written} of {len(content)} bytes were written")
        except OSError as error:
            self._dropping = True
            text = f"events of host {self._host} are no longer logged in {self._events} ({error.strerror or error})"
            self._output.say(f"{text}. The job goes on", color="yellow", event="log_lost", host=self._host)

    def _show(self, content: bytes) -> None:
        """Show whole lines; of one that a progress bar has drawn again and again, its last state."""
        *whole, self._rest = (self._rest + content).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            self._rest = self._rest.rpartition(b"\r")[2][-_MAX_LINE_BYTES:]
        shown = [self._prefix + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in whole]
        self._output.show(b"".join(shown))
