"""The worker's side of `elasticflow.launch`: `python -m ef_common.launch.called NAME FOLDER DIGEST`.

::

    FOLDER/call             the function and its arguments, pickled by the process that launches
    FOLDER/raised-PID       the traceback of an exception that has ended a worker
    FOLDER/returned-RANK    the value that the function returned there, as JSON

Nothing is unpickled that comes over the network or that others have written: the folder belongs to the user alone, and
a worker refuses a call whose digest differs from that on its command line.
"""

from __future__ import annotations

import hashlib
import io
import json
import linecache
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any

from ef_common.errors import JobFailed, UsageError
from ef_common.files import write_whole
from ef_common.launch.child import append_paths, paths

_CALL, _RAISED, _RETURNED = "call", "raised", "returned"


def pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Serialize a function with its arguments, and the source of the cells in which it may be defined.

    The classes and functions of `__main__` that they use are listed with their names, as the workers have another one.
    So are the places behind the standard library where this program finds modules.

    Raises:
        UsageError: The function or an argument cannot be serialized.
    """
    if not callable(fn):
        raise UsageError(f"expected a function. Received: fn={fn!r}")
    import cloudpickle

    program = vars(sys.modules["__main__"])
    used: dict[str, Any] = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """Notes what it meets of the program."""

        def reducer_override(self, one: Any) -> Any:
            if isinstance(one, (type, FunctionType)) and one.__module__ == "__main__":
                name = one.__name__
                if program.get(name) is one:
                    used[name] = one
            return super().reducer_override(one)

    # Of a file there is a time of modification, and in workers there is the file.
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    try:
        Pickler(function := io.BytesIO()).dump((fn, args, used))  # in this order: `used` is complete when it comes
        return pickle.dumps((cells, paths()[1], function.getvalue()))
    except Exception as error:  # whatever the objects raise
        raise UsageError(
            "the function cannot be sent to the workers, because something that it uses or is given cannot be "
            f"serialized. Make it inside of the function. ({type(error).__name__}: {error})"
        ) from error


class CallFolder:
    """The folder through which a function reaches the workers, and their results come back.

    Args:
        folder: Its path.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, call: bytes) -> list[str]:
        """Pass a call to the workers; returns how they find it, for their command line."""
        self._write(_CALL, call)
        return [str(self._folder), hashlib.sha256(call).hexdigest()]

    def take(self, digest: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """In a worker: the call to make. What it uses of the program's `__main__` is put into that of this process.

        Pickle finds classes and functions there by their names, as in hyperparameters and `torch.save(model)`.

        Raises:
            UsageError: The call is not the one that was passed on.
        """
        call = (self._folder / _CALL).read_bytes()
        if hashlib.sha256(call).hexdigest() != digest:
            raise UsageError(f"the function in this folder was changed. Received: {self._folder}")
        cells, behind, function = pickle.loads(call)  # noqa: S301 - of the launching process, see above
        linecache.cache.update(cells)
        append_paths(behind)
        fn, args, used = pickle.loads(function)  # noqa: S301
        vars(sys.modules["__main__"]).update(used)
        return fn, args

    def raised(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Record the exception that has ended this worker. Fits `sys.excepthook`."""
        if isinstance(error, JobFailed):  # that of another worker
            return
        try:
            self._write(f"{_RAISED}-{os.getpid()}", "".join(traceback.format_exception(error)).encode())
        except OSError:
            sys.__excepthook__(kind, error, trace)

    def returned(self, rank: int, value: Any) -> None:
        """Record the function's value in the worker of this rank; the first call counts, as ranks change."""
        name = f"{_RETURNED}-{rank}"
        if (self._folder / name).exists():
            return
        try:
            text = json.dumps({"value": value}, default=lambda one: one.tolist())
        except (AttributeError, TypeError, ValueError, RecursionError):
            text = json.dumps({"refused": f"{type(value).__name__}"})
        self._write(name, text.encode())

    def exceptions(self) -> list[str]:
        """Tracebacks of the workers that raised an exception, the first one first."""
        found = sorted(self._folder.glob(f"{_RAISED}-*"), key=lambda path: path.stat().st_mtime_ns)
        return [path.read_text(errors="replace") for path in found]

    def value(self) -> tuple[Any, str]:
        """The value from the worker of the lowest rank; and its type if it cannot be passed on, else ""."""
        found = sorted(self._folder.glob(f"{_RETURNED}-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        record = json.loads(found[0].read_text()) if found else {}
        return record.get("value"), record.get("refused", "")

    def _write(self, name: str, data: bytes) -> None:
        """Write a file that nobody else can read."""
        write_whole(self._folder / name, data, mode=0o600)


def main() -> None:
    """The body of a worker process."""
    _, folder, digest = sys.argv[1:]
    exchange = CallFolder(Path(folder))
    sys.excepthook = exchange.raised
    fn, args = exchange.take(digest)
    del sys.argv[1:]  # they are none of the function's
    value = fn(*args)
    try:
        exchange.returned(_rank(), value)
    except OSError as error:  # which is no error of a training that is complete
        from ef_common.terminal import say  # of packages that are found only behind those of Python

        say(f"the value that the function returned cannot be passed on: {error.strerror}", color="yellow")


def _rank() -> int:
    """Rank of this worker; 0 if the function has trained nothing and the process never became a worker."""
    process = sys.modules.get("ef_common.launch.process")
    worker = None if process is None else process.worker_if_any()
    return 0 if worker is None else int(worker.session.rank)


if __name__ == "__main__":
    from ef_common.launch import called  # the names of `__main__` are the program's

    called.main()
