"""Lines on the terminal: next to a progress bar, in a file, and after their reader has gone.

With `ELASTICFLOW_LOG_FORMAT=json`, each line is a JSON object, for those who collect logs.
"""

from __future__ import annotations

import json
import logging
import os
import select
import stat
import sys
import time
from functools import partial
from typing import Any

import click

from ef_common import threads

LOG_FORMAT = "ELASTICFLOW_LOG_FORMAT"
FORMATS = ("text", "json")
_LEVELS = {"red": "error", "yellow": "warning"}
_PACKAGES = ("ef_common", "ef_keras", "ef_lightning")
PREFIX = "elasticflow: "


def say(text: str, *, color: str | None = None, **fields: Any) -> None:
    """Write one line to stderr, in color on a terminal and above a progress bar. Without a reader it is lost.

    Args:
        text: The line, without a newline.
        color: One that `click.style` knows. As JSON, red is an error and yellow a warning.
        fields: The values in the line, for programs; only used in JSON lines.
    """
    stream = sys.stderr
    if stream is None:  # it was closed when this process began
        return
    try:
        if is_json():
            stream.write(_line_of(time.time(), _LEVELS.get(color or "", "info"), "elasticflow", text, fields))
            stream.flush()
            return
        on_terminal = stream.isatty()
        encoding = stream.encoding or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        line = PREFIX + text
        if on_terminal:
            line = click.style(PREFIX, bold=True) + click.style(text, fg=color)
        bars = sys.modules.get("tqdm")
        if bars is not None and getattr(bars.tqdm, "_instances", None):
            bars.tqdm.write(line, file=stream)  # takes its bars away, and draws them again
        else:
            # What Keras has drawn of its bar stands in this line. Rich stands in for stderr while it draws.
            erased = "\r\x1b[K" if on_terminal and stream is sys.__stderr__ else ""
            stream.write(f"{erased}{line}\n")
            stream.flush()
    except (OSError, ValueError):  # closed, or a pipe that nobody reads
        pass


def is_json() -> bool:
    """Whether lines are JSON objects."""
    return os.environ.get(LOG_FORMAT, "").strip() == "json"


def _line_of(moment: float, level: str, source: str, message: str, fields: dict[str, Any]) -> str:
    return json.dumps({"time": moment, "level": level, "logger": source, "message": message, **fields}) + "\n"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)  # with its traceback, if it has one
        return _line_of(record.created, record.levelname.lower(), record.name, message, {}).rstrip("\n")


def log_as_json() -> None:
    """Make our loggers write JSON lines to stderr, if lines are to be JSON. May be called again."""
    for name in _PACKAGES if is_json() else ():
        logger = logging.getLogger(name)
        if logger.propagate:
            handler = logging.StreamHandler()
            handler.setFormatter(_JsonFormatter())
            logger.addHandler(handler)
            logger.propagate = False


def num_workers(number: int) -> str:
    """The number of workers in words."""
    return f"{number} worker{'' if number == 1 else 's'}"


def mark(ok: bool, *, checked: bool = True) -> str:
    """A tick, a cross, or a dash for what was not checked; in letters where stdout has no such characters."""
    sign, plain = ("✗", "FAIL") if not ok else ("✓", "ok  ") if checked else ("–", "?   ")
    return sign if can_print(sign) else plain


def can_print(text: str) -> bool:
    """Whether the encoding of stdout has these characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def outlive_reader() -> None:
    """Continue without output when its reader is gone, as after Ctrl-C in `elasticflow run … | tee log`.

    Or when its terminal is closed. Else what is printed next would raise an error in the middle of a training, or of
    its last checkpoint.
    """
    outputs = [fd for fd in (1, 2) if _has_reader(fd)]
    if outputs:
        job = "replaces an output that nobody reads"
        threads.start(partial(_replace_broken, outputs), name="elasticflow-output", job=job)


def _has_reader(fd: int) -> bool:
    """Whether an output is a pipe, a socket or a terminal."""
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


def _replace_broken(outputs: list[int]) -> None:
    poll = select.poll()
    for fd in outputs:
        poll.register(fd, 0)  # an error alone: the reader is gone
    while outputs:
        for fd, _ in poll.poll():
            poll.unregister(fd)
            outputs.remove(fd)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, fd)
            os.close(nowhere)
