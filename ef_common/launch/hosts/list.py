"""The hosts on which a job may run: a file, or what a script prints, which may change at any time.

A line names one host, in any of the forms that users know from Open MPI, MPICH and `horovodrun`::

    node1
    node2 slots=4       # four workers
    node3:4

"""

from __future__ import annotations

import logging
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from ef_common import threads
from ef_common.core.hosts import Host
from ef_common.errors import UsageError

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the list is read, as `horovodrun` does."""
_SCRIPT_TIMEOUT_S = 30.0
_MAX_SLOTS = 4096
_NAME = re.compile(r"[A-Za-z0-9_][\w.@%-]*|([\w.-]+@)?\[[0-9A-Fa-f:.%\w]+\]|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f.]*")
_IGNORED = ("max_slots", "max-slots")


def parse_hosts(text: str, *, slots: int, source: str) -> tuple[Host, ...]:
    r"""Read a list of hosts. Slots of a host that stands in several lines add up, as with Open MPI.

    Args:
        text: The lines; ``#`` begins a comment.
        slots: Of a host whose line does not say.
        source: Name of the list, for messages.

    Raises:
        UsageError: A line is malformed; the message names it.

    Example:
        >>> parse_hosts("node1\nnode2 slots=4", slots=1, source="hosts.txt")
        (Host(name='node1', slots=1), Host(name='node2', slots=4))
    """
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            try:
                host = _host_of(words, slots)
            except ValueError:
                raise UsageError(
                    "expected a host in each line, as `node1`, `node1:4` or `node1 slots=4`. "
                    f"Received: line {number} of {source}: {line.strip()}"
                ) from None
            found[host.name] = found.get(host.name, 0) + host.slots
    return tuple(Host(name, number) for name, number in found.items())


def _host_of(words: list[str], slots: int) -> Host:
    name = words[0]
    if name.count(":") == 1 or "]:" in name:
        name, _, number = name.rpartition(":")
        slots = _number(number)
    if not _NAME.fullmatch(name):
        raise ValueError(name)
    for word in words[1:]:
        key, _, number = word.partition("=")
        if key == "slots":
            slots = _number(number)
        elif key not in _IGNORED:
            raise ValueError(word)
    return Host(name, slots)


def _number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_SLOTS:
        raise ValueError(text)
    return int(text)


def file_of_hosts(path: Path) -> Callable[[], str]:
    """Reads a file of hosts."""

    def read() -> str:
        try:
            return path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UsageError(f"the file of hosts cannot be read: {reason}. Received: --hosts={path}") from None

    return read


def script_of_hosts(command: str) -> Callable[[], str]:
    """Runs a script that prints hosts, in a shell, as `horovodrun --host-discovery-script` does."""
    received = f"Received: --host-discovery-script={command}"

    def read() -> str:
        try:
            done = subprocess.run(
                command, shell=True, capture_output=True, text=True, timeout=_SCRIPT_TIMEOUT_S, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"the script that finds hosts has not ended after {_SCRIPT_TIMEOUT_S:g} s. {received}"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the script that finds hosts cannot be run: {error}. {received}") from None
        if done.returncode:
            last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
            why = f" ({last.strip()})" if last else ""
            raise UsageError(f"the script that finds hosts has ended with status {done.returncode}{why}. {received}")
        return done.stdout

    return read


class HostList:
    """A list of hosts that is read again and again in a thread.

    What cannot be read, is malformed or names no host at all changes nothing: it is said once. A new content counts
    when it was the same twice, as an editor may be writing it.

    Args:
        read: Reads it.
        slots: Of a host whose line does not say.
        source: Its name, for messages.
        say: Called with what is wrong with it.
    """

    def __init__(self, read: Callable[[], str], *, slots: int, source: str, say: Callable[[str], object]) -> None:
        self._read, self._slots, self._source, self._say = read, slots, source, say
        self._stopped = threading.Event()
        self._text = self._seen = ""
        self._problem = ""
        self.hosts: tuple[Host, ...] = ()

    def start(self) -> None:
        """Read it, and start the thread.

        Raises:
            UsageError: It cannot be read, is malformed or names no host.
        """
        self._text = self._seen = self._read()
        self.hosts = self._parse(self._text)
        threads.start(self._run, name="elasticflow-hosts", job="reads the list of hosts")

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def look(self) -> None:
        """Read it once more."""
        try:
            text = self._read()
            if text == self._seen != self._text:
                self.hosts, self._text = self._parse(text), text
            if text == self._text:
                self._problem = ""
            self._seen = text
        except UsageError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                self._say(f"{error}. The hosts stay as they are")

    def _parse(self, text: str) -> tuple[Host, ...]:
        hosts = parse_hosts(text, slots=self._slots, source=self._source)
        if not hosts:
            raise UsageError(f"no host is named. `elasticflow stop` ends a job. Received: {self._source}")
        return hosts

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            try:
                self.look()
            except Exception:  # the job waits for new hosts, so the thread must go on
                logger.exception("the list of hosts cannot be read")
