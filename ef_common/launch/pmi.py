"""The part of PMI 1, the protocol of MPICH's process managers, by which ranks tell each other something at the start.

Lines of ``key=value`` go over a descriptor that the manager has left open (``PMI_FD``). Each rank puts its value, all
meet at a barrier, and each gets those of the others.
"""

from __future__ import annotations

import os
import select
import time

from ef_common.errors import UsageError

_KEY = "elasticflow-{}"
_MAX_LINE_BYTES = 4096


def exchange(value: str, *, rank: int, size: int, fd: int, timeout_s: float) -> tuple[list[str], str]:
    """Tell all ranks a value.

    Args:
        value: Of this rank, without white space.
        rank: This one.
        size: How many there are.
        fd: The descriptor.
        timeout_s: How long to wait for an answer.

    Returns:
        The values of all ranks, in the order of the ranks, each of them once; and the name of the job.

    Raises:
        UsageError: The manager does not answer, or not as the protocol says.
    """
    line = _Line(fd, timeout_s)
    line.ask("init pmi_version=1 pmi_subversion=1", "response_to_init")
    space = line.ask("get_my_kvsname", "my_kvsname")["kvsname"]
    line.ask(f"put kvsname={space} key={_KEY.format(rank)} value={value}", "put_result")
    line.ask("barrier_in", "barrier_out")
    gets = (f"get kvsname={space} key={_KEY.format(other)}" for other in range(size))
    values = [line.ask(get, "get_result")["value"] for get in gets]
    line.ask("finalize", "finalize_ack")
    return list(dict.fromkeys(values)), space


class _Line:
    """The line to the manager.

    Args:
        fd: Its descriptor.
        timeout_s: How long to wait for an answer.
    """

    def __init__(self, fd: int, timeout_s: float) -> None:
        self._fd, self._timeout_s = fd, timeout_s

    def ask(self, command: str, answer: str) -> dict[str, str]:
        """Give a command; what the answer says.

        Raises:
            UsageError: There is none, or another one.
        """
        try:
            os.write(self._fd, f"cmd={command}\n".encode())
            text = self._read_line()
        except (OSError, ValueError) as error:
            raise UsageError(f"the process manager of MPI does not answer `{command}`: {error}") from None
        said = dict(word.partition("=")[::2] for word in text.split())
        if said.get("cmd") != answer or said.get("rc", "0") != "0":
            raise UsageError(f"the process manager of MPI has answered `{command}` with `{text.strip()}`")
        return said

    def _read_line(self) -> str:
        deadline, line = time.monotonic() + self._timeout_s, b""
        while not line.endswith(b"\n"):
            if not select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise OSError(f"nothing within {self._timeout_s:g} s")
            byte = os.read(self._fd, 1)
            if not byte or len(line) > _MAX_LINE_BYTES:
                raise OSError("it has closed the line" if not byte else "the line does not end")
            line += byte
        return line.decode()
