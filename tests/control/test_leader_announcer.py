"""The threads that tell other coordinators who leads."""

from __future__ import annotations

import threading

from ef_common.control.leader_announcer import LeaderAnnouncer
from ef_common.core.membership import Serving, Settings
from ef_common.core.progress import Limits
from ef_common.core.view import Member, View
from ef_common.protocol import wire
from ef_common.protocol.announcer import Announcer
from ef_common.protocol.endpoint_announcer import EndpointAnnouncer
from ef_common.protocol.server import CoordinatorServer

GUARD_S = 30.0
ENDPOINT, SILENT = ("10.0.0.1", 29400), Member("s", "s", "10.0.0.2", standby=1)


def test_endpoint_is_told_again_and_again_while_a_standby_does_not_answer(monkeypatch):
    tried, told, released = threading.Event(), threading.Semaphore(0), threading.Event()

    class Conversation:
        def __init__(self, address, *args, **kwargs):
            if address != ENDPOINT:
                tried.set()
                assert released.wait(GUARD_S)
                raise TimeoutError

        def send(self, news):
            assert news == wire.Follow(7, leads=True)
            told.release()

        def close(self):
            pass

    monkeypatch.setattr("ef_common.control.leader_announcer.Conversation", Conversation)
    server = CoordinatorServer(0.0, token=None, settings=Settings(), heartbeat_timeout_s=4.0, limits=Limits())
    server.state = Serving(generation=1, view=View(1, (SILENT,)), contested_at=0.0)
    server.standbys.note((SILENT,), {}, server.state)
    announcers = Announcer(port=7, endpoints=[ENDPOINT]), EndpointAnnouncer(port=7, endpoints=[ENDPOINT])
    announcer = LeaderAnnouncer("leader", server, None, *announcers)
    announcer.start()
    try:
        assert tried.wait(GUARD_S)
        assert told.acquire(timeout=GUARD_S)
        assert told.acquire(timeout=GUARD_S)
    finally:
        announcer.stop()
        released.set()
