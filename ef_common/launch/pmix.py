"""Asks the PMIx server of this rank on which hosts all ranks are, and prints them as JSON.

It is a process of its own, so that the library's threads, and whatever goes wrong in it, are not in the launcher, which
forks. It has the variables of its rank, so to the server it is that rank, which says goodbye properly.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import os
import sys

_LIBRARIES = ("libpmix.so.2", "libpmix.so")
_HOSTNAME = b"pmix.hname"
_STRING = 3  # the type of a value


class _Process(ctypes.Structure):
    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("string", ctypes.c_char_p))


def hosts(size: int) -> list[str]:
    """The host of each rank.

    Raises:
        OSError: There is no library, or no server answers.
    """
    library = _library()
    myself = _Process()
    _check(library.PMIx_Init(ctypes.byref(myself), None, ctypes.c_size_t(0)), "PMIx_Init")
    try:
        return [_host(library, myself.nspace, rank) for rank in range(size)]
    finally:
        library.PMIx_Finalize(None, ctypes.c_size_t(0))


def _library() -> ctypes.CDLL:
    for name in (*_LIBRARIES, ctypes.util.find_library("pmix")):
        try:
            if name is not None:
                return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError("there is no library libpmix.so.2 (Debian's package libpmix2)")


def _host(library: ctypes.CDLL, nspace: bytes, rank: int) -> str:
    value = ctypes.POINTER(_Value)()
    process = _Process(nspace, rank)
    status = library.PMIx_Get(ctypes.byref(process), _HOSTNAME, None, ctypes.c_size_t(0), ctypes.byref(value))
    _check(status, f"PMIx_Get of the host of rank {rank}")
    if value.contents.type != _STRING or not value.contents.string:
        raise OSError(f"the host of rank {rank} is no string")
    return os.fsdecode(value.contents.string)


def _check(status: int, what: str) -> None:
    if status:
        raise OSError(f"{what} has failed with status {status}")


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(hosts(int(sys.argv[1]))))
    except OSError as error:
        sys.exit(str(error))
