"""Nodes with addresses of their own: a token, a node that is lost, one that joins."""

from __future__ import annotations

from pathlib import Path

import pytest

from ef_common.testing.harness_torchrun import TorchrunJob
from tests.faults import networks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

TRAIN = Path(__file__).parents[2] / "examples" / "01-lightning-digits" / "train.py"


@pytest.mark.skipif(networks.why_not() is not None, reason=str(networks.why_not()))
@pytest.mark.thorough
def test_nodes_on_a_network_lose_one_and_gain_one(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("not for others\n")
    conf = f"--rdzv-conf=token_file={token},last_call_timeout=30"
    arguments = ("--epochs", "15", "--step-seconds", "0.05")
    with networks.nodes(3), TorchrunJob(tmp_path / "run", TRAIN, endpoint=f"{networks.address(1)}:29400") as job:
        first, second = (
            job.start("--nnodes=2:3", conf, script_args=arguments, prefix=networks.inside(node)) for node in (1, 2)
        )
        job.wait_for("step", step=1)
        third = job.start("--nnodes=2:3", conf, script_args=arguments, prefix=networks.inside(3))
        job.wait_for("view", world_size=3)
        job.wait_for("step", world_size=3)
        second.kill()
        assert first.wait() == 0
        assert third.wait() == 0
        job.audit()
        newest = max(job.events("view"), key=lambda event: int(event["generation"]))
        assert newest["world_size"] == 2
        assert "not for others" not in job.tails()
