"""What the launcher of several hosts shows never holds it up for good."""

from __future__ import annotations

import threading

import pytest

from ef_common.launch.hosts import output
from ef_common.launch.hosts.output import Output

GUARD_S = 30.0


def test_nobody_waits_for_a_thread_that_can_no_longer_show_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_write", lambda content: 1 / 0)
    monkeypatch.setattr(output, "_MOST_BYTES", 4)
    shown = Output()
    shown.show(b"more than there is room for\n")
    waits = threading.Thread(target=shown.wait_for_room, daemon=True)
    waits.start()
    shown.start()
    waits.join(GUARD_S)
    assert not waits.is_alive()
    shown.show(b"and more\n")
    shown.wait_for_room()
    shown.close(lambda: False)


def test_output_without_standard_output_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.sys, "stdout", None)
    monkeypatch.setattr(output.os, "write", lambda *args: 1 / 0)  # that descriptor may be another file's
    output._write(b"nobody reads this")
