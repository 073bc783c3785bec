"""What workers are asked, and what is taken from their answers."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import pytest

from ef_common.core.cluster import WorkerReport
from ef_common.core.door_list import VALID_S
from ef_common.kubernetes import asking
from ef_common.kubernetes.asking import Reports, nonce_in, report_in

PAGE = """elasticflow_workers 3
elasticflow_view_generation 7
elasticflow_step 40
elasticflow_samples_per_second 51.567
elasticflow_nodes_wanted 2
"""


PLAIN = WorkerReport(5.0, workers=3, generation=7, step=40, samples_per_s=51.6, asked=2)


def test_page_is_read() -> None:
    assert report_in(PAGE, 5.0) == PLAIN
    assert report_in("# HELP x\nelse 7\n" + PAGE, 5.0) == report_in(PAGE, 5.0)


def test_slow_pods_are_read_as_far_as_they_are_addresses() -> None:
    texts = ["10.0.0.9", "fd00::1", "10.0.0.9", "host", '"', "1" * 46]
    found = report_in(PAGE + "".join(f'elasticflow_straggler{{address="{text}"}} 1\n' for text in texts), 5.0)
    assert found is not None
    assert found.slow == ("10.0.0.9", "fd00::1")
    many = "".join(f'elasticflow_straggler{{address="10.0.0.{number}"}} 1\n' for number in range(100))
    assert len(report_in(PAGE + many, 5.0).slow) == 16  # type: ignore[union-attr]


def test_checkpoint_and_the_pod_of_rank_0_are_read_if_they_are_told() -> None:
    more = 'elasticflow_checkpoint_step 30\nelasticflow_rank_zero{address="10.0.0.9"} 1\n'
    assert report_in(PAGE + more, 5.0) == replace(PLAIN, checkpoint=30, first="10.0.0.9")
    assert report_in(PAGE + more.replace("10.0.0.9", "a host"), 5.0) == replace(PLAIN, checkpoint=30)


def test_pod_of_rank_0_is_asked_first_and_then_the_one_that_has_answered() -> None:
    reports = Reports(on_news=lambda: None)
    doors = [(f"10.0.0.{number}", 29401) for number in range(1, 5)]
    reports._answered["job"] = doors[2]
    assert reports._in_order("job", doors) == [doors[2], doors[0]]
    reports._reports["job"] = replace(PLAIN, first="10.0.0.4")
    assert reports._in_order("job", doors) == [doors[3], doors[2]]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("elasticflow_workers 3", "elasticflow_workers 0"),
        ("elasticflow_workers 3", "elasticflow_workers 3.5"),
        ("elasticflow_workers 3", "elasticflow_workers -3"),
        ("elasticflow_workers 3", "elasticflow_workers 3 4"),
        ("elasticflow_step 40", "elasticflow_step NaN"),
        ("elasticflow_step 40", "elasticflow_step " + "9" * 16),
        ("elasticflow_step 40", "step 40"),
        ("second 51.567", "second inf"),
        ("second 51.567", "second 1e308"),
        ("elasticflow_nodes_wanted 2\n", ""),
    ],
)
def test_page_that_makes_no_sense_says_nothing(old: str, new: str) -> None:
    assert old in PAGE
    assert report_in(PAGE.replace(old, new), 5.0) is None


def test_numbers_are_none_that_a_status_cannot_hold() -> None:
    found = report_in(PAGE.replace("workers 3", f"workers {10**14}").replace("wanted 2", f"wanted {10**14}"), 5.0)
    assert found is not None
    assert found.workers == found.asked == 2**31 - 1


@contextmanager
def serving(*parts: bytes, pause_s: float = 0.0, ends: bool = True) -> Iterator[tuple[str, int]]:
    """A pod that sends these parts to whoever asks."""
    stopped = threading.Event()

    def run() -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                with closing(connection), suppress(OSError):
                    connection.recv(1000)
                    for part in parts:
                        connection.sendall(part)
                        stopped.wait(pause_s)
                    if not ends:
                        stopped.wait(10.0)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=run, daemon=True).start()
        try:
            yield server.getsockname()
        finally:
            stopped.set()
            server.shutdown(socket.SHUT_RDWR)


def nobody() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()  # type: ignore[no-any-return]


HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n"


@pytest.fixture
def news() -> list[int]:
    return []


@pytest.fixture
def reports(news: list[int]) -> Reports:
    return Reports(on_news=lambda: news.append(1), clock=lambda: 5.0)


def asked(reports: Reports, times: int = 1) -> None:
    for _ in range(times):
        asyncio.run(reports.ask_all())


def heard_by(door: tuple[str, int]) -> WorkerReport:
    """What a pod at this address has said first."""
    return replace(PLAIN, by=door[0], moved_at=5.0)


def test_each_job_is_asked_and_what_matters_is_told_at_once(reports: Reports, news: list[int]) -> None:
    with serving(HEAD, PAGE.encode()) as door:
        reports.follow({"a": [door], "b": []})
        asked(reports, 2)
        assert reports.of("a") == heard_by(door)
        assert reports.of("b") is None
        assert news == [1]
    with serving(HEAD, PAGE.replace("step 40", "step 50").encode()) as door:
        reports.follow({"a": [door]})
        asked(reports)
    assert news == [1]
    with serving(HEAD, PAGE.replace("wanted 2", "wanted 3").encode()) as door:
        reports.follow({"a": [door]})
        asked(reports)
    assert news == [1, 1]
    reports.follow({"a": []})
    assert reports.of("a") is None
    assert not reports._answered


@pytest.mark.parametrize("trouble", ["closed", "silent", "slow", "long", "foreign"])
def test_pod_that_does_not_answer_delays_nobody_and_another_one_is_asked(
    reports: Reports, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_TIMEOUT_S", 0.3)
    parts, pause_s, ends = {
        "closed": ((), 0.0, True),
        "silent": ((), 0.0, False),
        "slow": ((b"x",) * 100, 0.2, True),
        "long": ((HEAD, b"elasticflow_step 1\n" * 10_000, PAGE.encode()), 0.0, True),
        "foreign": ((HEAD, PAGE.replace("workers 3", "workers 0").encode()), 0.0, True),
    }[trouble]
    with serving(*parts, pause_s=pause_s, ends=ends) as bad, serving(HEAD, PAGE.encode()) as good:
        reports.follow({"bad": [bad], "good": [good], "both": [bad, nobody(), good, bad]})
        asked(reports)
        assert reports.of("bad") is None
        assert reports.of("good") == heard_by(good)
        asked(reports, 3)  # whoever comes first changes
        assert reports.of("both") == heard_by(good)


def test_answer_that_cannot_be_read_at_all_keeps_nobody_from_being_asked(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(door: tuple[str, int]) -> str:
        if door[1] == 1:
            raise ValueError("what is this")
        return PAGE

    monkeypatch.setattr(asking, "_read", read)
    reports.follow({"bad": [("10.0.0.1", 1)], "good": [("10.0.0.1", 2)]})
    asked(reports)
    assert (reports.of("bad"), reports.of("good")) == (None, heard_by(("10.0.0.1", 2)))


def test_answer_that_comes_when_nobody_may_be_asked_any_more_does_not_count(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def page(door: tuple[str, int]) -> str:
        reports.follow({"b": [door]})
        return PAGE + 'elasticflow_seeking{nonce="00112233445566ff"} 1\n'

    monkeypatch.setattr(asking, "_page", page)
    reports.follow({"a": [("10.0.0.1", 1)]})
    asyncio.run(reports.ask_all())
    assert (reports.of("a"), reports.seekers_of("a")) == (None, {})


def test_two_pods_of_a_job_are_asked_in_a_round_and_others_in_the_next(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_SEEKERS_AT_FIRST", 0)
    asked_at: list[int] = []

    async def page(door: tuple[str, int]) -> str:
        asked_at.append(door[1])
        return ""

    monkeypatch.setattr(asking, "_page", page)
    reports.follow({"a": [("10.0.0.1", port) for port in range(4)]})
    asked(reports, 4)
    assert [asked_at[number : number + 2] for number in range(0, 8, 2)] == [[1, 2], [2, 3], [3, 0], [0, 1]]


def test_pod_that_has_answered_is_asked_first(reports: Reports) -> None:
    first, second = ("10.0.0.1", 1), ("10.0.0.2", 1)
    reports._answered["a"] = second
    for _ in range(4):
        reports._round += 1
        assert reports._in_order("a", [first, second])[0] == second


def test_training_that_goes_on_is_told_from_one_that_does_not(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [5.0]
    reports = Reports(on_news=lambda: None, clock=lambda: now[0])
    pods = Pods(reports, monkeypatch, PAGE)

    def moved() -> tuple[float, float]:
        asked(reports)
        found = reports.of("a")
        assert found is not None
        assert (found.at, found.by) == (now[0], "10.0.0.0")
        return found.moved_at, found.moves_s

    assert moved() == (5.0, 0.0)
    now[0] = 8.0
    assert moved() == (5.0, 0.0)
    now[0], pods.texts[0] = 11.0, PAGE.replace("step 40", "step 41")
    assert moved() == (11.0, 6.0)


# ---------------------------------------------------------------- those that look for their job

NONCE, ANOTHER = "00112233445566ff", "ff66554433221100"


def seeking(nonce: str) -> str:
    return f'elasticflow_seeking{{nonce="{nonce}"}} 1\n'


@pytest.mark.parametrize(
    "text", ["", PAGE, seeking("00"), seeking(NONCE + "0"), seeking(NONCE.upper()), seeking(NONCE)[:-1] + "0", "x" * 99]
)
def test_page_that_shows_no_nonce_says_nothing(text: str) -> None:
    assert nonce_in(text) == ""
    assert nonce_in(text + "\n" + seeking(NONCE)) == NONCE


class Pods:
    """Pods of a job, and what they answer: None where nobody listens, "" where nobody answers."""

    def __init__(self, reports: Reports, monkeypatch: pytest.MonkeyPatch, *texts: str | None) -> None:
        self.texts, self.asked, self._reports = list(texts), [0] * len(texts), reports
        monkeypatch.setattr(asking, "_page", self._page)
        reports.follow({"a": [(f"10.0.0.{number}", 1) for number in range(len(texts))]})

    async def _page(self, door: tuple[str, int]) -> str | None:
        number = int(door[0].rpartition(".")[2])
        self.asked[number] += 1
        return self.texts[number]

    def seekers(self, times: int = 1) -> dict[int, str]:
        asked(self._reports, times)
        return {int(address[-1]): nonce for address, nonce in self._reports.seekers_of("a").items()}


def test_pods_that_look_for_their_job_are_found_and_are_news_once(
    reports: Reports, news: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = Pods(reports, monkeypatch, None, seeking(NONCE), "", seeking(ANOTHER))
    assert pods.seekers() == {1: NONCE, 3: ANOTHER}
    assert news == [1]
    assert pods.seekers(3) == {1: NONCE, 3: ANOTHER}
    assert news == [1]
    pods.texts[1] = seeking(ANOTHER)
    assert pods.seekers() == {1: ANOTHER, 3: ANOTHER}
    assert news == [1, 1]
    assert pods.asked == [5, 5, 5, 5]


@pytest.mark.parametrize("text", [None, PAGE, PAGE.replace("workers 3", "workers 0")], ids=["refused", "member", "no"])
def test_pod_that_has_found_its_job_looks_for_it_no_more(
    reports: Reports, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    pods = Pods(reports, monkeypatch, seeking(NONCE), None)
    assert pods.seekers() == {0: NONCE}
    pods.texts[0] = text
    assert pods.seekers() == {}


def test_pod_that_says_nothing_may_still_look_for_its_job_as_long_as_it_would_believe_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [5.0]
    reports = Reports(on_news=lambda: None, clock=lambda: now[0])
    pods = Pods(reports, monkeypatch, seeking(NONCE), None)
    assert pods.seekers() == {0: NONCE}
    pods.texts[0] = ""
    now[0] += VALID_S - 0.1
    assert pods.seekers() == {0: NONCE}
    now[0] += 0.2
    assert pods.seekers() == {}
    reports.follow({})
    assert not reports._seekers


def test_pod_that_has_gone_while_it_looked_for_its_job_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    reports = Reports(on_news=lambda: None, clock=lambda: now[0])
    pods = Pods(reports, monkeypatch, seeking(NONCE), seeking(ANOTHER))
    assert pods.seekers() == {0: NONCE, 1: ANOTHER}
    reports.follow({"a": [("10.0.0.1", 1)]})
    now[0] += VALID_S
    assert pods.seekers() == {1: ANOTHER}
    assert list(reports._seekers["a"]) == ["10.0.0.1"]


def test_others_are_asked_only_while_fewer_pods_train_than_run_and_a_few_in_each_round(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 2 * asking._SEEKERS + 1
    pods = Pods(reports, monkeypatch, f"{PAGE}elasticflow_nodes {number}\n", *[None] * (number - 1))
    reports._answered["a"] = ("10.0.0.0", 1)
    pods.seekers(3)
    assert pods.asked == [3, *[0] * (number - 1)]
    pods.texts[0] = f"{PAGE}elasticflow_nodes {number - 1}\n"
    pods.seekers()
    assert sum(pods.asked) == 4 + asking._SEEKERS
    pods.seekers(2)
    assert min(pods.asked) > 0
    pods.texts[0], before = PAGE, sum(pods.asked)  # one that does not say in how many pods they train
    pods.seekers()
    assert sum(pods.asked) == before + 1 + asking._SEEKERS


def test_nobody_listening_is_told_from_nobody_answering(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_TIMEOUT_S", 0.3)
    assert asyncio.run(asking._page(nobody())) is None
    with serving(ends=False) as silent:
        assert asyncio.run(asking._page(silent)) == ""


# ---------------------------------------------------------------- those that do not train


def test_pods_that_do_not_train_are_known_until_all_do(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = PAGE.replace("workers 3", "workers 0")
    pods = Pods(reports, monkeypatch, f"{PAGE}elasticflow_nodes 1\n", None, waits, "", seeking(NONCE))
    asked(reports)
    assert reports.idle_of("a") == {"10.0.0.1", "10.0.0.2", "10.0.0.4"}
    pods.texts[1:3] = PAGE, ""
    asked(reports)
    assert reports.idle_of("a") == {"10.0.0.2", "10.0.0.4"}, "one that does not answer may do either"
    reports.follow({"a": [(f"10.0.0.{number}", 1) for number in range(4)]})
    asked(reports)
    assert reports.idle_of("a") == {"10.0.0.2"}, "the other one has gone"
    pods.texts[0] = f"{PAGE}elasticflow_nodes 4\n"
    asked(reports)
    assert reports.idle_of("a") == frozenset()
    pods.texts[:] = [None] * 5
    asked(reports)
    assert reports.idle_of("a") == {f"10.0.0.{number}" for number in range(4)}
    reports.follow({})
    assert not reports._idle
    assert reports.idle_of("a") == frozenset()
