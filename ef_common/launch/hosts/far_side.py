"""The far side of `elasticflow run --hosts`: what the remote shell of the launcher starts on a host.

It starts the keeper of the node (:mod:`ef_common.launch.hosts.keeper`) unless there is one, sends on what the node
writes, and hands over what the launcher says. If the connection is cut, it ends, and the node trains on; the next
connection finds the same keeper, and goes on where this one has stopped.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from dataclasses import asdict, replace

from ef_common import __version__, threads
from ef_common.errors import ElasticFlowError, UsageError
from ef_common.launch.hosts import lines
from ef_common.launch.hosts.folder import HostFolder
from ef_common.launch.hosts.keeper import start_keeper
from ef_common.launch.hosts.lines import (
    BEAT_S,
    KNOWN,
    SILENT_S,
    WISHES,
    Answer,
    Data,
    NodeEnded,
    NodeOrder,
    NodeRefused,
    Runs,
    Wants,
)
from ef_common.protocol.addresses import format_address, is_loopback

_LOOK_S = 0.05
_BEGIN_S = 0.002
_CHUNK_BYTES = 1 << 18
_START_S = 60.0
_NOBODY = os.EX_TEMPFAIL
"""Exit status of a node that is not there, and was not to be started: as of one that has left."""


class FarSide:
    """One connection.

    Args:
        order: What the launcher wants.

    Raises:
        UsageError: Nothing can be started here.
    """

    def __init__(self, order: NodeOrder) -> None:
        if order.version != __version__:
            raise UsageError(
                f"all hosts need the same ElasticFlow. Received: {__version__} of {sys.executable} here, and "
                f"{order.version} where the job was started"
            )
        self._order = order
        self._folder = HostFolder.of(order.job, order.host)
        self._sent: dict[str, int] = {}
        self._heard_at = self._said_at = time.monotonic()
        self._closed = self._is_over = self._is_known = False

    def run(self) -> None:
        """Serve the launcher until the node has ended, or the connection."""
        with self._folder.locked():
            if not self._folder.life:
                if not self._order.starts:
                    self._folder.remove()
                    self._say(NodeEnded(_NOBODY))
                    return
                self._start()
        life = self._folder.life
        self._sent = dict(self._order.known) if life == self._order.life else {}
        threads.start(self._listen, name="elasticflow-launcher", job="hears what the launcher says")
        self._say(Runs(life))
        while not self._is_cut():
            status = self._folder.status
            self._pass_wish_on()
            num_bytes = self._send()
            if status is not None and not num_bytes:
                self._is_over = True
                self._say(NodeEnded(status))
                self._wait_until_known()
                return
            if time.monotonic() >= self._said_at + BEAT_S:
                self._say(Runs(life))
            if not num_bytes:
                time.sleep(_LOOK_S)

    def _start(self) -> None:
        """Start the keeper, and wait until it is known to others."""
        order, folder = self._order, self._folder
        arguments = [f"--rdzv-endpoint={order.endpoint or self._coordinator()}", f"--run-dir={folder.run_dir}"]
        life = secrets.token_hex(8)
        folder.tell("")
        folder.give(asdict(replace(order, arguments=[*arguments, *order.arguments], life=life)))
        keeper = start_keeper(folder)
        deadline = time.monotonic() + _START_S
        while folder.life != life:
            ended, status = os.waitpid(keeper, os.WNOHANG)
            if ended or time.monotonic() > deadline:
                text = folder.output.read_text(errors="replace").strip().rpartition("\n")[2]
                folder.remove()
                raise UsageError(f"no node could be started there: {text or f'status {status}'}")
            time.sleep(_BEGIN_S)

    def _coordinator(self) -> str:
        """The coordinator of the launcher, as it is reached from here."""
        order = self._order
        came_from = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
        if not came_from or is_loopback(came_from):
            came_from = order.elsewhere
        return format_address((order.launcher or came_from, order.port))

    def _send(self) -> int:
        """Send what is new; how many bytes that were."""
        total = 0
        for file in self._folder.written():
            offset = self._sent.get(file.name, 0)
            if file.stat().st_size > offset:
                with file.open("rb") as source:
                    source.seek(offset)
                    content = source.read(_CHUNK_BYTES)
                self._say(Data(file.name, offset, content))
                self._sent[file.name] = offset + len(content)
                total += len(content)
        return total

    def _pass_wish_on(self) -> None:
        number, nodes = self._folder.wish()
        if number > self._sent.get(WISHES, 0):
            self._sent[WISHES] = number
            self._say(Wants(number, nodes))

    def _listen(self) -> None:
        try:
            for line in sys.stdin:
                what = lines.read_beat(line)
                self._heard_at = time.monotonic()
                if what == KNOWN:
                    self._is_known = True
                elif not self._is_over:
                    self._folder.tell(what)
        finally:
            self._closed = True

    def _is_cut(self) -> bool:
        return self._closed or time.monotonic() > self._heard_at + SILENT_S

    def _wait_until_known(self) -> None:
        """Nothing is kept when the launcher knows how the node has ended; else its next connection asks again."""
        while not self._is_known and not self._is_cut():
            time.sleep(_LOOK_S)
        if self._is_known:
            self._folder.remove()

    def _say(self, answer: Answer) -> None:
        _say(answer)
        self._said_at = time.monotonic()


def _say(answer: Answer) -> None:
    sys.stdout.write(lines.answer_line(answer))
    sys.stdout.flush()


def main() -> int:
    """The body of the process."""
    try:
        FarSide(lines.read_order(sys.stdin.readline())).run()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (ElasticFlowError, OSError) as error:
        _say(NodeRefused(str(error)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
