"""What a coordinator answers to agents that look for their job."""

from __future__ import annotations

import pytest

from ef_common.control.leader_request import LeaderRequests
from ef_common.core.doors import COMMIT, LOOK, PROMISE, DoorAnswer
from ef_common.core.view import Member
from ef_common.errors import AuthenticationError
from ef_common.protocol.addresses import format_address
from ef_common.protocol.auth import Token
from tests.waiting import poll_until

DOOR = "h1:29400"


def ask(coordinator, wish=LOOK, *, node="n", door=DOOR, token=None):
    return LeaderRequests(Member(f"{node}-agent", node, ""), token).seek(coordinator.address, door=door, wish=wish)


def test_standby_that_knows_no_leader_says_so_and_supports_one_candidate(serve):
    standby = serve(standby=True)
    assert ask(standby, door="") == DoorAnswer()
    assert ask(standby, PROMISE) == DoorAnswer(promised=DOOR, granted=True, doors=(DOOR,))
    other = ask(standby, PROMISE, node="other", door="h2:29400")
    assert (other.granted, other.promised, other.leader) == (False, DOOR, "")
    assert ask(standby, COMMIT).granted
    other = ask(standby, COMMIT, node="other", door="h2:29400")
    assert (other.granted, other.leader) == (False, DOOR)


def test_standby_whose_agent_has_founded_the_job_leads_it(serve, join):
    standby = serve(standby=True)
    assert standby.lead()
    assert standby.leads
    assert ask(standby, PROMISE) == DoorAnswer(leads=True, doors=(DOOR,))
    assert join(standby, "w0").started().client.next_view(0).world_size == 1


def test_standby_names_the_leader_that_its_agent_follows(serve):
    leader, standby = serve(), serve(standby=True)
    standby.follow(leader.address)
    answer = ask(standby, PROMISE)
    assert (answer.leads, answer.leader, answer.granted) == (False, format_address(leader.address), False)


def test_leader_says_that_the_training_is_over(form):
    coordinator, workers = form(2)
    assert not ask(coordinator).over
    workers[0].client.send("close")
    poll_until(lambda: coordinator.is_over)
    answer = ask(coordinator)
    assert (answer.leads, answer.over) == (True, True)


@pytest.mark.parametrize("standby", [False, True])
def test_one_that_looks_for_another_job_is_told_so(serve, standby):
    found = serve(job="digits", standby=standby)
    member = Member("n-agent", "n", "")
    for job in ("", "digits"):
        assert LeaderRequests(member, None).seek(found.address, door="", wish=LOOK, job=job) is not None
    with pytest.raises(AuthenticationError, match="is another job's: it is of the job 'digits', and not of 'words'"):
        LeaderRequests(member, None).seek(found.address, door="", wish=PROMISE, job="words")
    assert LeaderRequests(member, None).seek(serve().address, door="", wish=LOOK, job="words") is not None


def test_one_with_another_token_is_refused(serve):
    with pytest.raises(AuthenticationError):
        ask(serve(), token=Token("hunter2"))


def test_nobody_is_there(serve):
    coordinator = serve()
    coordinator.stop()
    assert ask(coordinator) is None
