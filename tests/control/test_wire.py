from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ef_common.core import membership
from ef_common.core.doors import DoorAnswer
from ef_common.core.membership import Phase, Returned
from ef_common.core.progress import Progress
from ef_common.core.quorum import Bid
from ef_common.core.room import Demand, Room
from ef_common.core.stragglers import StragglerReport
from ef_common.core.view import Member, View
from ef_common.core.watermark import Watermark
from ef_common.errors import ProtocolError
from ef_common.protocol import fields, wire
from ef_common.protocol.view_patch import NO_VIEW, Span, ViewName, ViewPatch

NONCE, KEY, PROOF = "0f" * 16, "1e" * 16, "a9" * 32
MEMBERS = (
    Member("a", "n0", "10.0.0.1", 0, 2),
    Member("b", "n0", "", 1, 2, 29400, 65535),
    Member("ü-1", "nö", "fe80::1"),
)
VIEWS = (View(7, MEMBERS, 5, gone=("c",), base=6, issuer=29500), View(8, MEMBERS[:2], 5))
NAMES = tuple(ViewName(view.generation, fields.digest_of_view(view), over=True, agreed=False) for view in VIEWS)
CLAIM = "000000007-" + "0f" * 16
NOBODY = Member("", "", "")
FROM_WORKER = [
    wire.Hello(MEMBERS[1], NONCE, KEY, PROOF, returning=True),
    wire.Return(Returned(NOBODY, Phase.MEMBER, 8, 7, at_boundary=True, store="0f" * 16), NAMES),
    wire.Return(Returned(NOBODY, Phase.LEAVING, 8, 7, suspects=True, closed=True, demand=Demand(8, 3, 4)), NAMES),
    wire.Return(Returned(NOBODY, Phase.READY, failed="w raised E: m", training=3), ()),
    wire.Told(VIEWS),
    wire.Moved(),
    wire.Follow(29400, leads=True, job="job"),
    wire.Follow(29400, leads=False, failed="worker w raised ValueError: x"),
    wire.Heartbeat(None),
    wire.Heartbeat(Watermark(2, 40, (7, 3), 2)),
    wire.Heartbeat(None, Progress(3, 1, True, "step", 0.5, 0.1, 2.0, 3.0, 17, 1.7, 0.4, evicts_stragglers=True)),
    wire.Heartbeat(None, Progress(3, -1, True, "other", 0)),
    membership.Ready(""),
    membership.Ready("", 3),
    membership.Begun("", 2),
    membership.AtBoundary("", 3),
    membership.Suspected("", 3),
    membership.Settled("", 3),
    membership.Stored("", ""),
    membership.Stored("", "0f" * 16),
    membership.Claimed("", CLAIM, ("a", "ü-1")),
    membership.Leaving(""),
    membership.Wanted("", Demand(7, 2, 4)),
    membership.Wanted("", Demand(0, 1, 0)),
    membership.Closed(""),
    membership.Failed("", "w raised E: m", fatal=True),
    wire.Inquire("ü-1"),
    wire.Seek("h1:29400", "promise"),
    wire.Seek("", "look", "digits"),
    wire.Bye(),
    wire.Relay(3, "address/0", b"\x00\xff"),
]
FROM_COORDINATOR = [
    wire.Challenge(NONCE),
    wire.Welcome(membership.Accept("", True, 3), 2.0, PROOF, (("fe80::1", 29400), ("h", 1))),
    wire.Welcome(membership.Accept("", False), 2.0, PROOF, ()),
    wire.NewView(0, ViewPatch(View(7, (), 5, pending=True, reason="why not", base=6), MEMBERS, gone=("c",))),
    wire.NewView(7, ViewPatch.between(*VIEWS)),
    wire.Recall((NONCE, "1e" * 16)),
    wire.Relayed(3, (("address/0", b""), ("ü", b"\x00\xff"))),
    membership.Announce((), 3),
    wire.JobWatermark(Watermark(0, 0)),
    membership.Skip("", 2),
    wire.Finished(membership.Finish(""), PROOF),
    wire.Alive(),
    membership.Resume((), 7),
    membership.Republish((), 7),
    membership.Claim("", Bid(CLAIM, ("a", "ü-1"))),
    membership.Agree((), 7, NONCE),
    membership.Resign(""),
    membership.Stay(""),
    wire.Redirect("[fe80::1]:29400", PROOF),
    wire.Redirect("node-1.cluster_a.local:29400", PROOF),
    wire.Redirect("", PROOF),
    DoorAnswer(False, False, "", "h1:29400", True, ("h1:29400", "[fe80::1]:29400")),
    DoorAnswer(True, True, "", "", False, ()),
    wire.Eviction("silent for 2.1 s"),
    wire.Aborted(membership.Abort("", "w raised E: m"), PROOF),
    wire.Eviction("hung", hung=True),
    StragglerReport("", slow=True, ratio=0.4, waiting=0.55),
    Room(Demand(7, 2, 4), nodes=3, spares=1, newcomers=0, min_nodes=1, max_nodes=8, stragglers=("a", "ü-1")),
    Room(Demand(), nodes=1, spares=0, newcomers=0, min_nodes=1, max_nodes=10**6, stragglers=()),
    wire.Error("authentication", ""),
]


@pytest.mark.parametrize("message", FROM_WORKER, ids=lambda m: type(m).__name__)
def test_message_of_a_worker_comes_back_as_it_was(message):
    line = wire.encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert wire.decode_from_worker(line[:-1]) == message


@pytest.mark.parametrize("claim", ["000000007-" + "0f" * 15 + "..", "../000007-" + "0f" * 16, "000000007-", "x" * 42])
def test_claim_with_a_name_of_another_form_raises_a_protocol_error(claim):
    line = wire.encode(membership.Claim("", Bid(CLAIM, ("a",))))[:-1].replace(CLAIM.encode(), claim.encode())
    with pytest.raises(ProtocolError, match="claim"):
        wire.decode_from_coordinator(line)


def test_number_that_no_float_can_hold_raises_a_protocol_error():
    line = wire.encode(FROM_COORDINATOR[1])[:-1]
    assert b":2.0," in line
    with pytest.raises(ProtocolError, match=r"welcome\.heartbeat_timeout_s"):
        wire.decode_from_coordinator(line.replace(b":2.0,", b":1" + b"0" * 400 + b","))


@pytest.mark.parametrize("message", FROM_COORDINATOR, ids=lambda m: type(m).__name__)
def test_message_of_the_coordinator_comes_back_as_it_was(message):
    assert wire.decode_from_coordinator(wire.encode(message)[:-1]) == message


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"v":13,"t":"ready"}x',
        b'{"v":13,"t":"ready"}',
        b'{"v":true,"t":"ready"}',
        b'{"t":"ready"}',
        b'{"v":13}',
        b'{"v":13,"t":["ready"]}',
        b'{"v":13,"t":"welcome","warm_up":true,"heartbeat_timeout_s":2.0,"proof":"00"}',
        b'{"v":13,"t":"ready","more":1}',
        b'{"v":13,"t":"ready","v":13}',
        b'{"v":13,"t":"heartbeat"}',
        b'{"v":13,"t":"heartbeat","watermark":null,"progress":[]}',
        b'{"v":13,"t":"heartbeat","watermark":null,"progress":[1,-2,true,"step",0,0,0,0,0,0,0,false]}',
        b'{"v":13,"t":"heartbeat","watermark":null,"progress":[1,1,1,"step",0,0,0,0,0,0,0,false]}',
        b'{"v":13,"t":"heartbeat","watermark":null,"progress":[1,1,true,"nap",0,0,0,0,0,0,0,false]}',
        b'{"v":13,"t":"heartbeat","watermark":null,"progress":[1,1,true,"step",-1,0,0,0,0,0,0,false]}',
        b'{"v":13,"t":"heartbeat","watermark":null,"progress":[1,1,true,"step",1e999,0,0,0,0,0,0,false]}',
        b'{"v":13,"t":"heartbeat","watermark":[],"progress":null}',
        b'{"v":13,"t":"heartbeat","watermark":[1,2,[]],"progress":null}',
        b'{"v":13,"t":"heartbeat","watermark":[1,-2,[],1],"progress":null}',
        b'{"v":13,"t":"heartbeat","watermark":[1,2,null,1],"progress":null}',
        b'{"v":13,"t":"heartbeat","watermark":[1,2,[0.5],1],"progress":null}',
        b'{"v":13,"t":"heartbeat","watermark":[1,2,[],0],"progress":null}',
        b'{"v":13,"t":"heartbeat","watermark":[1,2,[' + b"0," * 1000 + b'0],1],"progress":null}',
        b'{"v":13,"t":"watermark","watermark":[1,2,[],1]}',
        b'{"v":13,"t":"suspect"}',
        b'{"v":13,"t":"suspect","generation":-1}',
        b'{"v":13,"t":"suspect","generation":true}',
        b'{"v":13,"t":"suspect","generation":1.0}',
        b'{"v":13,"t":"suspect","generation":NaN}',
        b'{"v":13,"t":"suspect","generation":1' + b"0" * 5000 + b"}",
        b'{"v":13,"t":"want"}',
        b'{"v":13,"t":"want","demand":2}',
        b'{"v":13,"t":"want","demand":[1,1]}',
        b'{"v":13,"t":"want","demand":[1,1,-1]}',
        b'{"v":13,"t":"want","demand":[1,1,2.5]}',
        b'{"v":13,"t":"want","demand":[1,true,2]}',
        b'{"v":13,"t":"want","demand":[500000001,1,2]}',
        b'{"v":13,"t":"relay","generation":1,"key":"","value":""}',
        b'{"v":13,"t":"relay","generation":1,"key":"k","value":"*"}',
        b'{"v":13,"t":"relay","generation":1,"key":"k","value":"YQ"}',
        b'{"v":13,"t":"relay","generation":1,"key":"a\\nb","value":""}',
        b'{"v":13,"t":"relay","generation":1,"key":"\\ud800","value":""}',
    ],
    ids=lambda line: line[:60].decode("latin1"),
)
def test_decode_malformed_line_raises_protocol_error(line):
    with pytest.raises(ProtocolError):
        wire.decode_from_worker(line)


@pytest.mark.parametrize(
    "member",
    [
        ["a", "n", "", 0, 1, 0],
        ["a", "n", "", 0, 0, 0, 0],
        ["a", "n", "", 1, 1, 0, 0],
        ["", "n", "", 0, 1, 0, 0],
        ["a" * 129, "n", "", 0, 1, 0, 0],
        ["a\x1b[31m", "n", "", 0, 1, 0, 0],
        ["a", 1, "", 0, 1, 0, 0],
        ["a", "n", "", 0, 1, 65536, 0],
        ["a", "n", "", 0, 1, 0, -1],
        ["a", "n", "h" * 64, 0, 1, 0, 0],
        ["a", "n", "a..b", 0, 1, 0, 0],
        ["a", "n", "../x", 0, 1, 0, 0],
        ["a", "n", "1.2.3.4:5", 0, 1, 0, 0],
        ["a", "n", "\u0130.com", 0, 1, 0, 0],
        {"id": "a"},
    ],
    ids=str,
)
def test_decode_hello_with_malformed_member_raises_protocol_error(member):
    record = {
        "v": wire.VERSION,
        "t": "hello",
        "member": member,
        "nonce": NONCE,
        "key": KEY,
        "proof": PROOF,
        "returning": False,
        "downlink": False,
    }
    with pytest.raises(ProtocolError, match=r"hello\.member"):
        wire.decode_from_worker(json.dumps(record).encode())


@pytest.mark.parametrize(
    "view",
    [
        [1, [["a", "n", "", 0, 1, 0, 0], [1, 1]], 0, False, False, "", [], 0, 0],
        [1, [["a", "n", "", 0, 1, 0]], 0, False, False, "", [], 0, 0],
        [1, [["a", "n", "", 1, 1, 0, 0]], 0, False, False, "", [], 0, 0],
        [1, [], 2, False, False, "", [], 0, 0],
        [1, [], 0, 0, False, "", [], 0, 0],
        [1, [], 0, False, 0, "", [], 0, 0],
        [1, [], 0, False, False, "\n", [], 0, 0],
        [1, {}, 0, False, False, "", [], 0, 0],
        [1, [], 0, False, False, "", [""], 0, 0],
        [1, [], 0, False, False, "", {}, 0, 0],
        [1, [], 0, False, False, "", [], 2, 0],
        [1, [], 0, False, False, "", [], 0, 65536],
        [1, [], 0, False, False, "", [], 0],
    ],
    ids=str,
)
def test_decode_malformed_view_raises_protocol_error(view):
    with pytest.raises(ProtocolError, match=r"view\.patch"):
        wire.decode_from_coordinator(_line_of_view(view))


def test_decode_view_of_which_the_malformed_ones_differ_gives_it():
    view = [1, [["a", "n", "", 0, 1, 0, 0]], 1, True, True, "", ["b"], 1, 65535]
    message = wire.decode_from_coordinator(_line_of_view(view))
    expected = View(
        1, (Member("a", "n", ""),), admitted_at=1, pending=True, hold=True, gone=("b",), base=1, issuer=65535
    )
    assert message.patch.onto(NO_VIEW) == expected


def _line_of_view(view) -> bytes:
    return json.dumps({"v": wire.VERSION, "t": "view", "before": 0, "patch": view}).encode()


def test_decode_other_version_says_so():
    with pytest.raises(ProtocolError, match="same elasticflow everywhere"):
        wire.decode_from_worker(b'{"v":109,"t":"ready"}')


def test_decode_long_line_raises_protocol_error():
    line = wire.encode(wire.Relay(1, "k", b"x" * wire.MAX_STRANGER_BYTES))[:-1]
    assert wire.decode_from_worker(line)
    with pytest.raises(ProtocolError, match="less than 4096 bytes"):
        wire.decode_from_worker(line, max_bytes=wire.MAX_STRANGER_BYTES)


@pytest.mark.parametrize("address", ["a", "a:b", "[a:1", "a..b:1", "a:65536", ":1", "\u0130:1"])
def test_decode_redirect_to_what_is_no_address_raises_protocol_error(address):
    record = {"v": wire.VERSION, "t": "redirect", "address": address, "proof": PROOF}
    with pytest.raises(ProtocolError, match=r"redirect\.address"):
        wire.decode_from_coordinator(json.dumps(record).encode())


@pytest.mark.parametrize("field", ["promised", "received"])
def test_decode_return_after_which_no_view_could_follow_raises_protocol_error(field):
    record = json.loads(wire.encode(FROM_WORKER[1]))
    if field == "promised":
        record[field] = 5 * 10**8 + 1  # claims have generations of nine digits
    else:
        record[field][1][0] = 5 * 10**8 + 1
    with pytest.raises(ProtocolError, match=rf"return\.{field}"):
        wire.decode_from_worker(json.dumps(record).encode())


def test_decode_watermark_of_a_job_that_is_null_raises_protocol_error():
    with pytest.raises(ProtocolError, match=r"watermark\.watermark"):
        wire.decode_from_coordinator(b'{"v":13,"t":"watermark","watermark":null}')


@pytest.mark.parametrize(
    "change",
    [
        {"demand": None},
        {"demand": [1, 1]},
        {"nodes": -1},
        {"spares": 1.0},
        {"max_nodes": None},
        {"stragglers": "a"},
        {"stragglers": [""]},
        {"stragglers": ["a\nb"]},
    ],
    ids=str,
)
def test_decode_malformed_room_raises_protocol_error(change):
    record = json.loads(wire.encode(Room(Demand(7, 2, 4), 3, 1, 0, 1, 8, ("a",)))) | change
    with pytest.raises(ProtocolError, match=rf"room\.{next(iter(change))}"):
        wire.decode_from_coordinator(json.dumps(record).encode())


def test_encode_longest_watermark_is_decoded():
    heartbeat = wire.Heartbeat(Watermark(2**53, 2**53, (2**53,) * fields.MAX_RETURNED))
    assert wire.decode_from_worker(wire.encode(heartbeat)[:-1]) == heartbeat


def test_encode_long_message_raises_protocol_error():
    with pytest.raises(ProtocolError, match="fit into"):
        wire.encode(wire.Relay(1, "k", b"x" * wire.MAX_LINE_BYTES))


def test_encode_largest_hello_fits_the_bound_of_a_stranger():
    name = "\U0001f4a5" * fields.MAX_NAME_CHARS
    hello = wire.Hello(
        Member(name, name, ".".join(["h" * 63] * 4), 2**53 - 1, 2**53), NONCE, KEY, PROOF, returning=False
    )
    line = wire.encode(hello)[:-1]
    assert wire.decode_from_worker(line, max_bytes=wire.MAX_STRANGER_BYTES) == hello


def test_encode_long_reason_is_cut():
    line = wire.encode(wire.NewView(0, ViewPatch(View(1, (), reason="r" * 50_000), ())))
    assert len(wire.decode_from_coordinator(line[:-1]).patch.rest.reason) == fields.MAX_REASON_CHARS


def test_encode_failure_is_cut_and_printable_and_fits_the_bound_of_a_stranger():
    line = wire.encode(wire.Aborted(membership.Abort("", "\U0001f4a5\n" * 1000), PROOF))[:-1]
    failed = wire.decode_from_coordinator(line, max_bytes=wire.MAX_STRANGER_BYTES)
    assert failed.abort.why == "\U0001f4a5 " * (fields.MAX_FAILURE_CHARS // 2)


@given(st.binary(max_size=200))
def test_decode_of_any_bytes_raises_nothing_but_protocol_error(line):
    with contextlib.suppress(ProtocolError):
        wire.decode_from_worker(line)
    with contextlib.suppress(ProtocolError):
        wire.decode_from_coordinator(line)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(st.data())
def test_decode_of_any_json_in_any_field_raises_nothing_but_protocol_error(data):
    message = data.draw(st.sampled_from(FROM_WORKER + FROM_COORDINATOR))
    record = json.loads(wire.encode(message))
    record[data.draw(st.sampled_from(list(record)))] = data.draw(JSON)
    line = json.dumps(record).encode()
    with contextlib.suppress(ProtocolError):
        wire.decode_from_worker(line)
    with contextlib.suppress(ProtocolError):
        wire.decode_from_coordinator(line)


def test_members_that_are_lost_one_by_one_are_named_once():
    members = tuple(
        Member(f"node-{index:03}.cluster-{index:08x}", f"node-{index:03}.cluster", "10.0.0.1", standby=29400)
        for index in range(700)
    )
    views = tuple(
        View(5 + lost, members[lost:], gone=tuple(member.id for member in members[:lost]), reason="x" * 200)
        for lost in range(600)
    )
    line = wire.encode(wire.Told(views))
    assert len(line) < wire.MAX_LINE_BYTES // 4
    assert wire.decode_from_worker(line[:-1]) == wire.Told(views)


@given(st.data())
def test_views_that_a_worker_tells_come_back_as_they_were_whatever_changes(data):
    members = st.lists(st.integers(0, 6), unique=True).map(lambda ids: tuple(Member(f"w{i}", "n", "") for i in ids))
    gone = st.lists(st.integers(0, 6), unique=True).map(lambda ids: tuple(f"w{index}" for index in ids))
    found = data.draw(st.lists(st.tuples(members, gone), max_size=6))
    views = tuple(View(3 + index, some, gone=lost) for index, (some, lost) in enumerate(found))
    assert wire.decode_from_worker(wire.encode(wire.Told(views))[:-1]) == wire.Told(views)


def test_view_that_names_a_member_twice_raises_protocol_error():
    with pytest.raises(ProtocolError, match="different ids"):
        ViewPatch(View(8, ()), (Span(0, 2), MEMBERS[1])).onto(VIEWS[0])


@pytest.mark.parametrize(
    "parts", [[[0, 4]], [[2, 2]], [[3, 3]], [[-1, 2]], [[0, True]], [[0, 1], [0, 1]], [[1]], ["a"]]
)
def test_view_that_refers_to_what_is_not_there_raises_protocol_error(parts):
    record = json.loads(wire.encode(wire.Told(VIEWS)))
    record["views"][1][1] = parts
    with pytest.raises(ProtocolError, match=r"told\.views"):
        wire.decode_from_worker(json.dumps(record).encode())


def test_views_with_more_members_than_anybody_has_raise_protocol_error():
    members = tuple(Member(f"w{index}", "n", "") for index in range(1000))
    line = wire.encode(wire.Told(tuple(View(5 + index, members) for index in range(1100))))
    assert len(line) < wire.MAX_LINE_BYTES // 4
    with pytest.raises(ProtocolError, match="all together"):
        wire.decode_from_worker(line[:-1])


def test_too_many_views_raise_protocol_error():
    views = tuple(View(index, (Member("a", "n", ""),)) for index in range(6, fields.MAX_LINKS + 7))
    assert wire.decode_from_worker(wire.encode(wire.Told(views[1:]))[:-1])
    with pytest.raises(ProtocolError, match=r"told\.views.*at most 2048 views"):
        wire.decode_from_worker(wire.encode(wire.Told(views))[:-1])


def test_decode_return_with_too_many_views_raises_protocol_error():
    names = tuple(ViewName(index, NONCE, over=False, agreed=False) for index in range(6, fields.MAX_LINKS + 7))
    message = wire.Return(Returned(NOBODY, Phase.MEMBER, 5000, 5), names)
    assert wire.decode_from_worker(wire.encode(replace(message, received=names[1:]))[:-1])
    with pytest.raises(ProtocolError, match=r"return\.received.*at most 2048 views"):
        wire.decode_from_worker(wire.encode(message)[:-1])


def test_decode_return_with_views_in_another_order_raises_protocol_error():
    message = wire.Return(Returned(NOBODY, Phase.MEMBER, 9, 7), NAMES[::-1])
    with pytest.raises(ProtocolError, match=r"return\.received.*growing generations"):
        wire.decode_from_worker(wire.encode(message)[:-1])


def test_digest_of_a_view_tells_all_that_it_says():
    changed = [
        replace(VIEWS[0], **change)
        for change in (
            {"members": MEMBERS[:2]},
            {"members": MEMBERS[::-1]},
            {"members": (*MEMBERS[:2], replace(MEMBERS[2], liveness_port=9))},
            {"admitted_at": 4},
            {"pending": True},
            {"hold": True},
            {"reason": "another one"},
            {"gone": ()},
            {"base": 5},
            {"issuer": 5},
            {"generation": 8},
        )
    ]
    digests = {fields.digest_of_view(view) for view in (VIEWS[0], *changed)}
    assert len(digests) == 1 + len(changed)
    (told,) = wire.decode_from_worker(wire.encode(wire.Told(VIEWS[:1]))[:-1]).views
    assert fields.digest_of_view(told) == fields.digest_of_view(VIEWS[0])
