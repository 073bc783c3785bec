"""Stores that are full, or stop to answer, for real."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ef_common.core.lineage import CheckpointId
from ef_common.errors import StorageFailed
from ef_common.storage.checkpoints import Checkpoints, Content
from ef_common.storage.retries import Retries
from ef_common.storage.saver import Saver, Snapshot
from ef_common.storage.store import Store
from tests.storage.ceph import KEYS, Ceph
from tests.storage.conftest import BUCKET

ENOUGH_S = 60.0
RETRIES = Retries(first=timedelta(milliseconds=1), longest=timedelta(milliseconds=50), total=timedelta(days=1))
DATA = bytes(300_000)


def snapshot(run: int, step: int) -> Snapshot:
    return Snapshot(CheckpointId(run, 1, step), Content({"weights": lambda file: file.write(DATA)}))


class Heard(logging.Handler):
    """Waits for a line in the log."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.heard = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self.text in record.getMessage():
            self.heard.set()

    def __enter__(self) -> Heard:
        logging.getLogger("ef_common.storage").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("ef_common.storage").removeHandler(self)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
        ).returncode
    )
    if not mounted:
        pytest.skip("no right to mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_disk_that_is_full_keeps_the_one_before_and_saving_goes_on_when_there_is_room(small_disk: Path) -> None:
    checkpoints = Checkpoints(Store(small_disk / "run"))
    run = checkpoints.claim(parent=None)
    with Saver(checkpoints, retries=RETRIES) as saver, Heard("the store is full") as full:
        saver.submit(snapshot(run, 1))
        assert saver.flush(ENOUGH_S)
        filler = small_disk / "filler"
        filler.write_bytes(bytes(600_000))
        saver.submit(snapshot(run, 2))
        assert full.heard.wait(ENOUGH_S)
        assert saver.saved == CheckpointId(run, 1, 1)
        assert Checkpoints(Store(small_disk / "run")).newest_valid().id.step == 1
        filler.unlink()
        saver.close(ENOUGH_S)
    assert Checkpoints(Store(small_disk / "run")).newest_valid().id.step == 2


def test_disk_that_is_full_of_what_a_killed_job_has_left_has_room_again(small_disk: Path) -> None:
    store = Store(small_disk / "run")
    killed = CheckpointId(Checkpoints(store).claim(parent=None), 1, 1)
    with store.writer(f"checkpoints/{killed.name}/weights") as file:
        file.write(bytes(900_000))
    checkpoints = Checkpoints(store)
    run = checkpoints.claim(parent=None)
    with Saver(checkpoints, retries=Retries(total=timedelta(0))) as saver:
        saver.submit(snapshot(run, 2))
        saver.close(ENOUGH_S)
    assert Checkpoints(store).newest_valid().id == CheckpointId(run, 1, 2)


@pytest.mark.processes
def test_store_that_stalls_holds_up_nobody_and_saving_goes_on_when_it_answers(ceph: Ceph) -> None:
    patient = {**KEYS, "endpoint_url": ceph.endpoint}
    options = {**patient, "config_kwargs": {"read_timeout": 1, "retries": {"max_attempts": 0}}}
    url = f"s3://{BUCKET}/stalled"
    run = Checkpoints(Store(url, patient)).claim(parent=None)
    checkpoints = Checkpoints(Store(url, options))
    checkpoints.join(run)
    with Saver(checkpoints, retries=RETRIES) as saver, Heard("did not answer in time") as stalled:
        saver.submit(snapshot(run, 1))
        assert saver.flush(ENOUGH_S)
        ceph.stall()
        try:
            for step in range(2, 50):
                saver.submit(snapshot(run, step))
                assert saver.num_held <= 2
            assert stalled.heard.wait(ENOUGH_S)
            assert not saver.flush(0)
            assert saver.saved == CheckpointId(run, 1, 1)
        finally:
            ceph.go_on()
        saver.close(ENOUGH_S)
    assert Checkpoints(Store(url, patient)).newest_valid().id.step == 49


def test_store_that_is_out_of_reach_makes_the_end_fail(moto: dict[str, Any]) -> None:
    url, no_retries = f"s3://{BUCKET}/gone", {"config_kwargs": {"retries": {"max_attempts": 0}}}
    checkpoints = Checkpoints(Store(url, moto))
    run = checkpoints.claim(parent=None)
    with socket.create_server(("127.0.0.1", 0)) as closed_soon:
        address = f"http://127.0.0.1:{closed_soon.getsockname()[1]}"
    away = Checkpoints(Store(url, {**moto, **no_retries, "endpoint_url": address}))
    away.join(run)
    saver = Saver(away, retries=Retries(total=timedelta(0)))
    saver.start()
    saver.submit(snapshot(run, 1))
    with pytest.raises(StorageFailed, match=r"none was saved at all.*the store cannot be reached"):
        saver.close(ENOUGH_S)
    assert checkpoints.newest_valid() is None


HANGS = """
import socket
from ef_common.core.lineage import CheckpointId
from ef_common.storage.checkpoints import Checkpoints, Content
from ef_common.storage.saver import Saver, Snapshot
from ef_common.storage.store import Store

with socket.create_server(("127.0.0.1", 0)) as silent:
    address = f"http://127.0.0.1:{silent.getsockname()[1]}"
    checkpoints = Checkpoints(Store("s3://bucket/run", {"key": "k", "secret": "s", "endpoint_url": address}))
    checkpoints.join(1)
    saver = Saver(checkpoints)
    saver.start()
    saver.submit(Snapshot(CheckpointId(1, 1, 1), Content({})))
    silent.accept()  # it has asked, and waits for an answer
    saver.close(0)
"""


@pytest.mark.processes
def test_process_whose_store_never_answers_ends_and_fails() -> None:
    pytest.importorskip("s3fs")
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", HANGS], cwd=root, capture_output=True, text=True, timeout=ENOUGH_S)
    assert done.returncode == 1
    assert "the newest checkpoint is not saved in time" in done.stderr.splitlines()[-1]
