"""Tells a process from a later one that has its number.

Its time of birth by the clock would not do: the clock may be set while the process runs, and then all earlier births
are seen to be at other times.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_STATE, _BIRTH = 0, 19  # places behind the name of the program, which may hold spaces and brackets


def process_name(pid: int) -> str:
    """The start of the system, and the ticks from there to the birth of the process; "" if it has ended.

    A process that its parent has not reaped yet has ended.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    boot = ""
    with contextlib.suppress(OSError):  # hidden in some containers
        boot = _BOOT.read_text().strip()
    return "" if fields[_STATE] in (b"Z", b"X", b"x") else f"{boot}/{int(fields[_BIRTH])}"
