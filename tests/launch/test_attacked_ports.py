"""The table of attacked ports in the guide to security is that of the tests, and has every port at which we listen."""

from __future__ import annotations

import re
from pathlib import Path

from tests.launch.test_strangers import ATTACKS, PORTS, TAKEN_OVER

ROOT = Path(__file__).parents[2]
TITLES = {
    "garbage": "Garbage",
    "half_a_greeting": "Half a greeting",
    "frame_of_2_gib": "A frame of 2 GiB",
    "a_thousand_idle_connections": "1,000 idle connections",
    "replayed_bytes": "Replayed bytes",
    "connection_taken_over_after_the_greeting": "A connection taken over",
}
NOTICES = "tests/horovod/test_notices.py::"
RENDEZVOUS = "tests/horovod/test_rendezvous.py::"
PAGE = "tests/kubernetes/test_failed_threads.py::"
ELSEWHERE = {
    "notices of horovodrun": {
        "garbage": NOTICES + "test_stranger_is_not_heard",
        "half_a_greeting": NOTICES + "test_stranger_is_not_heard",
        "frame_of_2_gib": NOTICES + "test_request_of_2_gib_is_not_read",
        "a_thousand_idle_connections": NOTICES + "test_driver_is_understood_while_strangers_say_nothing",
        "replayed_bytes": NOTICES + "test_notice_that_is_replayed_is_no_more_than_one_more",
    },
    "Horovod's rendezvous, on the loopback interface": {
        "garbage": RENDEZVOUS + "test_strangers_keep_no_value_from_horovod",
        "half_a_greeting": RENDEZVOUS + "test_strangers_keep_no_value_from_horovod",
        "frame_of_2_gib": RENDEZVOUS + "test_value_without_a_length_that_is_one_is_refused",
        "a_thousand_idle_connections": RENDEZVOUS + "test_strangers_that_say_nothing_cost_few_threads_and_end_no_wait",
        "replayed_bytes": RENDEZVOUS + "test_strangers_keep_no_value_from_horovod",
    },
    "page of the controller of Kubernetes": {
        "garbage": PAGE + "test_probe_is_answered_whatever_strangers_say",
        "half_a_greeting": PAGE + "test_probe_is_answered_whatever_strangers_say",
        "frame_of_2_gib": PAGE + "test_probe_is_answered_whatever_strangers_say",
        "a_thousand_idle_connections": PAGE + "test_probe_is_answered_while_strangers_say_nothing",
        "replayed_bytes": PAGE + "test_probe_is_answered_whatever_strangers_say",
    },
}
"""Ports that a job of `elasticflow run` does not have, with the tests that attack them."""
LISTENS = re.compile(
    r"(?<!def )\blisten\((?!\))|create_server\(|(?<!departure)\.listen\(|^\s*class \w+\(.*(HTTP|TCP)Server\)",
    re.MULTILINE,
)
LISTENERS = {
    "ef_common/collectives/peer_connections.py": (
        "liveness port; peer connections between nodes",
        "peer connections within a node",
    ),
    "ef_common/control/client.py": ("liveness port; peer connections between nodes",),
    "ef_common/control/coordinator.py": ("coordinator", "standby"),
    "ef_common/control/sockets.py": (),  # by which the others listen
    "ef_common/horovod/notices.py": ("notices of horovodrun",),
    "ef_common/horovod/rendezvous.py": ("Horovod's rendezvous, on the loopback interface",),
    "ef_common/kubernetes/metrics.py": ("page of the controller of Kubernetes",),
    "ef_common/launch/port_page.py": ("metrics of a worker",),
    "ef_common/report/serve.py": ("live page",),
    "ef_common/testing/ports.py": (),  # which only looks for free ones
}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n").split("|")]


def attacked(port: str, attack: str) -> str:
    """What the table says of it."""
    if attack == "connection_taken_over_after_the_greeting":
        return "with TLS" if port in TAKEN_OVER else "–"
    return "✓" if port in PORTS or attack in ELSEWHERE[port] else "–"


def test_table_of_attacked_ports_is_that_of_the_tests() -> None:
    text = (ROOT / "docs" / "guides" / "security.md").read_text()
    section = text.partition("### A stranger at every port\n")[2].partition("\n#")[0]
    head, _, *rows = [cells(line) for line in section.splitlines() if line.startswith("|")]
    attacks = [attack.__name__ for attack in ATTACKS]
    assert head == ["Port", *(TITLES[attack] for attack in attacks)]
    assert rows == [[port, *(attacked(port, attack) for attack in attacks)] for port in (*PORTS, *ELSEWHERE)]


def test_tests_of_the_other_ports_are_there() -> None:
    for witness in {*TAKEN_OVER.values(), *(one for tests in ELSEWHERE.values() for one in tests.values())}:
        file, _, name = witness.partition("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text()


def test_every_port_at_which_we_listen_is_in_the_table() -> None:
    packages = [file for name in ("ef_common", "ef_keras", "ef_lightning") for file in (ROOT / name).rglob("*.py")]
    found = {str(file.relative_to(ROOT)) for file in packages if LISTENS.search(file.read_text())}
    assert found == set(LISTENERS)
    assert {port for ports in LISTENERS.values() for port in ports} == {*PORTS, *ELSEWHERE}
