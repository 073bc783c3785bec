from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest

from ef_common.session.crash_record import (
    MAX_RANGES,
    SIZE,
    Crash,
    CrashRecord,
    Life,
    ended_early,
    has_left,
    in_training,
    lives,
    path_of,
    read,
)


def test_crash_record_of_a_process_that_is_killed_is_what_it_wrote_last(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        record = CrashRecord(tmp_path, 2, clock=iter([0.0, 10.0, 12.5]).__next__)
        record.begin(3, 40, [(0, 8)])
        record.end()
        record.begin(3, 41, [(8, 16), (99, 100)])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert read(path_of(tmp_path, 2)) == Crash(3, 41, True, ((8, 16), (99, 100)), 9, 2.5, False)


def test_crash_record_of_another_process_replaces_the_one_before(tmp_path: Path) -> None:
    CrashRecord(tmp_path).begin(0, 1, [(0, 8)])
    CrashRecord(tmp_path)
    assert read(path_of(tmp_path, 0)) == Crash(-1, 0, False, (), 0, 0.0, False)


def test_crash_record_on_a_full_disk_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a file system of a limited size")
    try:
        (tmp_path / "other").write_bytes(bytes(4096))
        child = os.fork()
        if not child:
            try:
                CrashRecord(tmp_path)
            except OSError as error:
                os._exit(error.errno or 0)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == errno.ENOSPC << 8
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_crash_record_with_more_ranges_than_fit_keeps_the_first_and_their_number(tmp_path: Path) -> None:
    CrashRecord(tmp_path).begin(0, 1, [(10 * number, 10 * number + 2) for number in range(100)])
    noted = read(path_of(tmp_path, 0))
    assert noted is not None
    assert (len(noted.ranges), noted.ranges[-1], noted.num_positions) == (MAX_RANGES, (150, 152), 200)


def test_crash_record_knows_a_fault_and_where_it_was(tmp_path: Path) -> None:
    record = CrashRecord(tmp_path)
    record.begin(1, 5, [(0, 8)])
    record.excuse()
    noted = read(path_of(tmp_path, 0))
    assert noted is not None
    assert (noted.excused, noted.epoch, noted.step) == (True, 1, 5)


@pytest.mark.parametrize("data", [b"", b"x" * SIZE, b"x"], ids=len)
def test_file_that_is_no_crash_record_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a").write_bytes(data)
    assert read(tmp_path / "a") is None
    assert read(tmp_path / "b") is None


def test_crash_record_that_was_being_written_is_none(tmp_path: Path) -> None:
    CrashRecord(tmp_path).begin(0, 1, [(0, 8)])
    path = path_of(tmp_path, 0)
    data = bytearray(path.read_bytes())
    data[8] += 1
    path.write_bytes(data)
    assert read(path) is None


def test_crash_record_without_a_directory_is_kept_in_memory() -> None:
    record = CrashRecord()
    record.begin(0, 3, [(0, 8)])
    record.fail("boom")
    assert (record.epoch, record.step) == (0, 3)


def test_crash_record_tells_of_heartbeats_until_none_are_to_be_expected(tmp_path: Path) -> None:
    record, other = CrashRecord(tmp_path, 1), CrashRecord(tmp_path, 2)
    for number, one in enumerate((record, other)):
        one.introduce(f"ü-{number}")
    assert lives(tmp_path) == {}
    record.beat()
    record.begin(0, 1, [(0, 8)])
    record.beat()
    assert lives(tmp_path) == {path_of(tmp_path, 1): Life("ü-0", os.getpid(), 2)}
    assert read(path_of(tmp_path, 1)) == Crash(0, 1, True, ((0, 8),), 8, 0.0, False)
    record.rest()
    assert lives(tmp_path) == {}
    record.beat()
    path_of(tmp_path, 1).write_bytes(b"x" * SIZE)
    assert lives(tmp_path) == {}


def test_node_has_left_unless_one_of_its_workers_has_come_to_the_end(tmp_path: Path) -> None:
    first, second = CrashRecord(tmp_path, 0), CrashRecord(tmp_path, 1)
    second.finish()
    assert not has_left(tmp_path)
    first.leave()
    assert has_left(tmp_path)
    second.finish()
    assert not has_left(tmp_path)


def test_workers_that_end_in_a_training_have_ended_early_unless_one_of_them_is_through(tmp_path: Path) -> None:
    assert not ended_early(tmp_path), "nothing is trained there"
    first, second = CrashRecord(tmp_path, 0), CrashRecord(tmp_path, 1)
    assert not ended_early(tmp_path), "they may have evaluated"
    for record in (first, second):
        record.begin_training()
        record.begin(0, 3, [(0, 8)])
    assert ended_early(tmp_path)
    second.end_training()
    assert not ended_early(tmp_path)
    second.begin_training()
    second.finish()  # the others have finished without it
    assert not ended_early(tmp_path)
    first.leave()
    assert ended_early(tmp_path)


def test_record_that_is_not_there_or_not_whole_is_of_no_training(tmp_path: Path) -> None:
    assert not in_training(path_of(tmp_path, 0))
    path_of(tmp_path, 0).write_bytes(b"\1" * SIZE)
    assert not in_training(path_of(tmp_path, 0))


def test_nobody_reads_that_a_worker_has_left_whose_record_is_in_memory() -> None:
    record = CrashRecord()
    record.leave()
    record.finish()
