"""Which standbys a coordinator knows."""

from __future__ import annotations

import pytest

from ef_common.core.membership import Forming, Idle, Serving
from ef_common.core.quorum import ChainLink
from ef_common.core.view import Member, View
from ef_common.protocol import known_standbys
from ef_common.protocol.known_standbys import KnownStandbys, some_standbys

MEMBERS = tuple(Member(f"w{index}", f"n{index}", "h", standby=index) for index in range(12))
VIEW = View(1, MEMBERS[1:3])


def ports(known: KnownStandbys) -> list[int]:
    return [port for _, port in known.addresses]


def test_newest_is_the_last_and_those_without_a_standby_have_none() -> None:
    known = KnownStandbys()
    known.note(MEMBERS[:4], {}, Forming())
    known.note(MEMBERS[1:2], {}, Forming())
    known.forget(("h", 3))
    known.forget(("h", 9))
    assert ports(known) == [2, 1]


def test_former_ones_are_forgotten_when_they_are_too_many_and_those_of_the_chain_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_standbys, "NUM_FORMER", 3)
    state, known = Serving(view=VIEW, chain=(ChainLink(VIEW),)), KnownStandbys()
    known.note(MEMBERS[1:7], {}, state)
    assert ports(known) == [1, 2, 3, 4, 5, 6]
    known.note(MEMBERS[7:8], {}, state)
    assert ports(known) == [4, 5, 6, 1, 2, 7]
    monkeypatch.setattr(known_standbys, "MAX_STANDBYS", 5)
    known.note(MEMBERS[8:9], {}, state)
    assert ports(known) == [1, 2]


def test_standbys_of_which_a_worker_tells_are_all_kept_though_there_is_no_chain_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_standbys, "NUM_FORMER", 3)
    known = KnownStandbys()
    known.note(MEMBERS[11:12], {}, Idle())
    known.note(reversed(MEMBERS[1:11]), {}, Idle())
    assert ports(known) == [11, *range(10, 0, -1)]


def test_newcomer_is_told_a_few_short_addresses() -> None:
    long = Member("long", "n", "h" * 100, standby=1)
    many = [Member(f"w{index}", "n", "h", standby=1 + index // 2) for index in range(60)]
    assert some_standbys([long, *many]) == tuple(("h", port) for port in range(1, 17))


def test_looking_again_gives_the_same_object_until_one_is_noted_or_forgotten() -> None:
    known = KnownStandbys()
    known.note(MEMBERS[:4], {}, Forming())
    before = known.addresses
    assert known.addresses is before
    known.forget(("h", 3))
    assert ports(known) == [1, 2]
    known.note(MEMBERS[3:4], {}, Forming())
    assert ports(known) == [1, 2, 3]
