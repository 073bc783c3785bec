"""Which scripts an agent takes for plain ones."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ef_common.launch.plain_script import PlainScript
from ef_common.session.crash_record import CrashRecord


@pytest.mark.parametrize(
    ("listens", "is_ours", "is_plain"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_script_is_plain_if_its_workers_build_a_group_and_none_is_of_ours(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], listens: bool, is_ours: bool, is_plain: bool
) -> None:
    times = iter(range(0, 100, 10))
    script = PlainScript(tmp_path, clock=lambda: next(times))
    if is_ours:
        CrashRecord(tmp_path, 0).introduce("one of ours")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        if listens:
            one.listen()
        for _ in range(3):
            script.look(one.getsockname()[1])
    said = "".join(capfd.readouterr())
    assert said.count("--rdzv-backend=c10d") == int(is_plain)
