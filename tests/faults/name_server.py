"""``python -m tests.faults.name_server ADDRESS FILE``: a DNS server of the names, and addresses, of a JSON file."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dnslib import QTYPE, RCODE, RR, A, DNSRecord
from dnslib.server import BaseResolver, DNSHandler, DNSServer

from tests.faults import networks
from tests.waiting import poll_until

_GUARD_S = 60.0


class Names(BaseResolver):
    """Answers with the addresses that a name has now, in any order, as those of a cluster do.

    Args:
        path: Of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def resolve(self, request: DNSRecord, handler: DNSHandler) -> DNSRecord:
        """The answer to a question."""
        reply = request.reply()
        addresses = json.loads(self._path.read_text()).get(str(request.q.qname).rstrip("."), [])
        if not addresses:
            reply.header.rcode = RCODE.NXDOMAIN
        elif request.q.qtype == QTYPE.A:
            for address in random.sample(addresses, len(addresses)):
                reply.add_answer(RR(request.q.qname, QTYPE.A, ttl=0, rdata=A(address)))
        return reply


@contextlib.contextmanager
def on_network(node: int, path: Path) -> Iterator[None]:
    """A name server at the address of a node of a network."""
    command = (sys.executable, "-m", "tests.faults.name_server", networks.address(node), str(path))
    server = subprocess.Popen(("setpriv", "--pdeathsig", "KILL", *networks.inside(node), *command))
    try:
        listens = (*networks.inside(node), "ss", "-Hlun", "sport", "=", ":53")
        poll_until(lambda: bool(subprocess.run(listens, capture_output=True).stdout), guard_s=_GUARD_S)
        yield
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    DNSServer(Names(Path(sys.argv[2])), address=sys.argv[1], port=53).start_thread()
    while True:
        time.sleep(3600)
