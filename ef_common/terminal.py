"""Lines on the terminal, beside a progress bar, in a file, and after whoever has read them is gone."""

from __future__ import annotations

import os
import select
import stat
import sys
import threading

import click

PREFIX = "elasticflow: "


def say(text: str, *, color: str | None = None) -> None:
    """Write one line to stderr: in color on a terminal, and above a progress bar. Where nobody reads it, it is lost.

    Args:
        text: The line, without a newline.
        color: One that `click.style` knows.
    """
    stream = sys.stderr
    try:
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


def num_workers(number: int) -> str:
    """In words."""
    return f"{number} worker{'' if number == 1 else 's'}"


def outlive_reader() -> None:
    """Go on without output when its reader is gone, as after Ctrl-C in `elasticflow run … | tee log`.

    Else what is printed next would raise BrokenPipeError in the middle of a training, or of its last checkpoint.
    """
    pipes = [fd for fd in (1, 2) if _is_pipe(fd)]
    if pipes:
        threading.Thread(target=_replace_broken, args=(pipes,), name="elasticflow-output", daemon=True).start()


def _is_pipe(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


def _replace_broken(pipes: list[int]) -> None:
    poll = select.poll()
    for fd in pipes:
        poll.register(fd, 0)  # an error alone: the reader is gone
    while pipes:
        for fd, _ in poll.poll():
            poll.unregister(fd)
            pipes.remove(fd)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, fd)
            os.close(nowhere)
