from __future__ import annotations

from pathlib import Path

import pytest

from ef_common.errors import UsageError
from ef_common.launch.hosts import list as list_of_hosts
from ef_common.launch.hosts.list import HostList, file_of_hosts, parse_hosts, script_of_hosts
from tests.waiting import poll_until


def read(text: str, slots: int = 1) -> dict[str, int]:
    return {host.name: host.slots for host in parse_hosts(text, slots=slots, source="hosts.txt")}


def test_lines_of_the_peers_are_read() -> None:
    text = (
        "# all\n\nnode1\n node2 slots=4 max_slots=8 # big\n"
        "node3:2\nme@node4:3\n[fe80::1]:2\nfe80::2 slots=5\n10.0.0.1\n"
    )
    assert read(text, slots=7) == {
        "node1": 7,
        "node2": 4,
        "node3": 2,
        "me@node4": 3,
        "[fe80::1]": 2,
        "fe80::2": 5,
        "10.0.0.1": 7,
    }


def test_slots_of_a_host_add_up() -> None:
    assert read("node1\nnode2\nnode1") == {"node1": 2, "node2": 1}


@pytest.mark.parametrize(
    "line",
    ["-oProxyCommand=true", "node1:0", "node1 slots=x", "node1 slots", "node1 gpus=2", "node1:1:2 3", "a b", "$(id)"],
)
def test_malformed_line_is_named(line: str) -> None:
    with pytest.raises(UsageError, match=r"Received: line 2 of hosts\.txt: "):
        read(f"node1\n{line}\n")


class Lists:
    """A list that is read when the test says so."""

    def __init__(self, text: str) -> None:
        self.text: str | Exception = text
        self.said: list[str] = []
        self.list = HostList(self._read, slots=1, source="hosts.txt", say=self.said.append)
        self.list.start()
        self.list.stop()

    def _read(self) -> str:
        if isinstance(self.text, Exception):
            raise self.text
        return self.text

    def look(self, text: str | Exception, times: int = 2) -> list[str]:
        self.text = text
        for _ in range(times):
            self.list.look()
        return [host.name for host in self.list.hosts]


def test_new_content_counts_when_it_was_the_same_twice() -> None:
    lists = Lists("a")
    assert lists.look("a\nb", times=1) == ["a"]
    assert lists.look("a\nb\nc", times=1) == ["a"]
    assert lists.look("a\nb\nc", times=1) == ["a", "b", "c"]


@pytest.mark.parametrize("bad", ["", "# a\n", "a b", UsageError("it cannot be read")])
def test_list_that_is_no_list_changes_nothing_and_is_said_once(bad: str | Exception) -> None:
    lists = Lists("a\nb")
    assert lists.look(bad, times=5) == ["a", "b"]
    assert len(lists.said) == 1
    assert lists.said[0].endswith("The hosts stay as they are")
    assert lists.look("b") == ["b"]
    assert lists.look(bad, times=5) == ["b"]
    assert len(lists.said) == 2


def test_list_that_is_bad_at_the_start_is_refused() -> None:
    for text in ("", "a b"):
        with pytest.raises(UsageError):
            Lists(text)


def test_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("a")
    assert file_of_hosts(tmp_path / "hosts.txt")() == "a"
    (tmp_path / "windows.txt").write_bytes(b"\xef\xbb\xbfnode1\r\nnode2 slots=2 # big\r\n")
    assert read(file_of_hosts(tmp_path / "windows.txt")()) == {"node1": 1, "node2": 2}
    with pytest.raises(UsageError, match=r"cannot be read: No such file or directory. Received: --hosts=.*missing"):
        file_of_hosts(tmp_path / "missing")()


def test_script_is_run_by_a_shell() -> None:
    assert script_of_hosts("echo a; echo b:2")() == "a\nb:2\n"
    with pytest.raises(UsageError, match=r"has ended with status 3 \(no power\)"):
        script_of_hosts("echo no power >&2; exit 3")()
    with pytest.raises(UsageError, match=r"has ended with status 127"):
        script_of_hosts("./missing.sh")()


def test_list_is_read_again_after_an_error_that_nobody_has_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_of_hosts, "LOOK_S", 0.01)
    texts: list[str | Exception] = ["a", RuntimeError("out of order"), "b", "b"]

    def read() -> str:
        text = texts.pop(0) if len(texts) > 1 else texts[0]
        if isinstance(text, Exception):
            raise text
        return str(text)

    hosts = HostList(read, slots=1, source="hosts.txt", say=lambda what: None)
    hosts.start()
    poll_until(lambda: [host.name for host in hosts.hosts] == ["b"])
    hosts.stop()
