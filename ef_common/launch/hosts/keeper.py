"""Keeps the node of a host of `elasticflow run --hosts`, which outlives the connection of the launcher.

If the launcher gives no sign of life for long, its machine may be lost. The workers then leave, with a checkpoint, so
that none of them trains on without anybody knowing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from typing import NoReturn

from ef_common.core.hosts import REFUSED
from ef_common.launch.child import Child
from ef_common.launch.hosts.folder import HostFolder
from ef_common.launch.hosts.lines import KILL, LEAVE, NodeOrder

LINGER_S = 600.0
"""How long the folder is kept for a launcher that has not asked yet how the node has ended."""
_LOOK_S = 0.1
_AGAIN_S = 0.5


class Keeper:
    """The keeper of a node.

    Args:
        folder: That of the node.
    """

    def __init__(self, folder: HostFolder) -> None:
        self._folder = folder
        self._told = folder.told()
        self._heard_at = time.monotonic()

    def run(self) -> None:
        """Run the node to its end, and wait until the launcher knows of it."""
        folder = self._folder
        order = NodeOrder(**folder.take())
        with folder.output.open("ab", buffering=0) as output:
            folder.keep(order.life)
            try:
                os.chdir(order.directory)
            except OSError as error:
                output.write(f"elasticflow: {order.directory} is not on this host: {error.strerror}\n".encode())
                folder.end(REFUSED)
            else:
                folder.end(self._run(order, output.fileno()))
        ended_at = time.monotonic()
        while folder.path.exists() and time.monotonic() < ended_at + LINGER_S:
            time.sleep(_LOOK_S)
        folder.remove()

    def _run(self, order: NodeOrder, output: int) -> int:
        """Run the node; its exit status."""
        asked = False
        with Child(order.arguments, output=output, environ=order.environ) as child:
            while (status := child.process.poll()) is None:
                what = self._hear(order.orphan_s, output)
                if what == LEAVE and not asked:
                    asked = True  # while it ends, it heeds no further signal
                    child.process.send_signal(signal.SIGUSR1)
                elif what == KILL:
                    child.process.terminate()  # the second one kills
                time.sleep(_AGAIN_S if what == KILL else _LOOK_S)
        return status if status >= 0 else 128 - status

    def _hear(self, orphan_s: float, output: int) -> str:
        """What the launcher says; that the node is to leave, if it says nothing for long."""
        told, now = self._folder.told(), time.monotonic()
        if told != self._told:
            self._told, self._heard_at = told, now
        if not told[0] and orphan_s and now >= self._heard_at + orphan_s:
            os.write(output, f"elasticflow: no sign of life of the launcher for {orphan_s:g} s: leaving\n".encode())
            self._folder.tell(LEAVE)
            return LEAVE
        return told[0]


def start_keeper(folder: HostFolder) -> int:
    """Start the keeper of a node: a copy of this process, which has imported all that it needs, and has one thread.

    Args:
        folder: That of the node, with the order.

    Returns:
        Its process id.
    """
    pid = os.fork()
    if not pid:
        _be_keeper(folder)
    return pid


def _close_all_above(number: int) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > number:
            with contextlib.suppress(OSError):  # that of the listing is closed already
                os.close(descriptor)


def _be_keeper(folder: HostFolder) -> NoReturn:
    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the end of a connection is not that of the node
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(folder.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for file, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(file, target)
        _close_all_above(2)  # those of the connection, and the lock of the folder
        Keeper(folder).run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # what is left of the connection is not this process's
