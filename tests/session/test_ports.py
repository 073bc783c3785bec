from __future__ import annotations

import random
import socket
from pathlib import Path

from ef_common.testing.ports import free_ports, reserve_port


def test_ports_are_free_and_none_that_the_system_gives_to_others() -> None:
    found = free_ports(20)
    assert len(set(found)) == 20
    assert max(found) < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in found:
        socket.create_server(("127.0.0.1", port)).close()


def test_ports_of_processes_with_equal_seeds_differ() -> None:
    random.seed(0)
    first = free_ports(5)
    random.seed(0)
    assert free_ports(5) != first


def test_server_can_listen_on_a_port_that_is_reserved() -> None:
    with reserve_port() as reserved:
        address = reserved.getsockname()
        with socket.create_server(address) as server, socket.create_connection(address):
            server.accept()[0].close()
