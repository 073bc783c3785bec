"""Agents of torchrun that are forked for the tests."""

from __future__ import annotations

import os
from pathlib import Path

from tests.launch import agents
from tests.waiting import poll_until


def test_output_of_an_agent_can_be_read_as_soon_as_it_is_started(tmp_path: Path) -> None:
    output = tmp_path / "agent.txt"
    agent = agents.start(["--help"], dict(os.environ), output)
    assert output.exists()
    poll_until(lambda: agent.poll() is not None)
    assert (agent.poll(), "--nnodes" in output.read_text()) == (0, True)
