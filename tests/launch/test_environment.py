from __future__ import annotations

import os
from pathlib import Path

import pytest

from ef_common.core.autoscale import Autoscale
from ef_common.errors import UsageError
from ef_common.launch.environment import read_environment
from ef_common.launch.notice_sources import FileSource
from ef_common.protocol.auth import Token


def test_environment_full_is_read():
    env = read_environment(
        {
            "ELASTICFLOW_COORDINATOR": "[fe80::1]:29400",
            "ELASTICFLOW_TOKEN": " hunter2\n",
            "ELASTICFLOW_NODE": "node-1",
            "ELASTICFLOW_ADDRESS": "10.0.0.2",
            "ELASTICFLOW_RUN_DIR": "/runs/7",
            "ELASTICFLOW_CHECKPOINT": "/store",
            "ELASTICFLOW_CLAIMS": "etcd://me:hunter2@host/x",
            "ELASTICFLOW_AUDIT": "1",
            "ELASTICFLOW_NOTICE": "file:///run/go%20away",
            "ELASTICFLOW_GRACE": "60",
            "ELASTICFLOW_HEARTBEAT_TIMEOUT": "0.5",
            "ELASTICFLOW_HANG_TIMEOUT": "0",
            "LOCAL_RANK": "3",
            "LOCAL_WORLD_SIZE": "4",
        }
    )
    assert env.coordinator == ("fe80::1", 29400)
    assert env.token == Token("hunter2", "ELASTICFLOW_TOKEN")
    assert (env.node, env.address, env.local_rank, env.local_world_size) == ("node-1", "10.0.0.2", 3, 4)
    assert (env.run_dir, env.audit) == (Path("/runs/7"), True)
    assert (env.notice, env.grace_s) == (FileSource(Path("/run/go away")), 60.0)
    assert (env.heartbeat_timeout_s, env.hang_timeout_s) == (0.5, 0.0)
    assert (env.checkpoint, env.claims) == ("/store", "etcd://me:hunter2@host/x")
    assert "hunter2" not in repr(env)


def test_environment_empty_is_a_world_of_one():
    env = read_environment({})
    assert (env.coordinator, env.token, env.run_dir, env.audit) == (None, None, None, False)
    assert (env.local_rank, env.local_world_size, env.address) == (0, 1, "")
    assert (env.notice, env.grace_s, env.heartbeat_timeout_s, env.hang_timeout_s) == (None, 30.0, 5.0, None)
    assert (env.checkpoint, env.claims) == (None, None)
    assert env.node


def test_environment_members_differ():
    env = read_environment({"ELASTICFLOW_NODE": "n"})
    first, second = env.member(), env.member()
    assert first.id != second.id
    assert first.id.startswith(f"n-{os.getpid()}-")
    assert first.node == "n"


def test_environment_says_how_the_job_chooses_its_size():
    env = read_environment({"ELASTICFLOW_AUTOSCALE": "max=4", "ELASTICFLOW_SCALE_COMMAND": "./more.sh"})
    assert env.autoscale == Autoscale(max=4)
    assert (env.scale_command, env.scale_timeout_s) == ("./more.sh", 60.0)
    for nothing in ({}, {"ELASTICFLOW_AUTOSCALE": ""}, {"ELASTICFLOW_AUTOSCALE": "off"}):
        assert read_environment(nothing).autoscale is None
        assert read_environment(nothing).scale_command is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ELASTICFLOW_COORDINATOR", ""),
        ("ELASTICFLOW_COORDINATOR", "host"),
        ("ELASTICFLOW_COORDINATOR", "host:"),
        ("ELASTICFLOW_COORDINATOR", ":29400"),
        ("ELASTICFLOW_COORDINATOR", "host:0"),
        ("ELASTICFLOW_COORDINATOR", "host:65536"),
        ("ELASTICFLOW_COORDINATOR", "host:9" + "9" * 5000),
        ("ELASTICFLOW_COORDINATOR", "host:http"),
        ("ELASTICFLOW_COORDINATOR", "fe80::1:29400"),
        ("ELASTICFLOW_TOKEN", " "),
        ("ELASTICFLOW_NODE", "n" * 101),
        ("ELASTICFLOW_NODE", "n\x00"),
        ("ELASTICFLOW_AUDIT", "maybe"),
        ("ELASTICFLOW_NOTICE", "/run/notice"),
        ("ELASTICFLOW_NOTICE", "file://host/run/notice"),
        ("ELASTICFLOW_NOTICE", "http:///path"),
        ("ELASTICFLOW_NOTICE", "http://host:http/"),
        ("ELASTICFLOW_NOTICE", "ftp://host/notice"),
        ("ELASTICFLOW_HANG_TIMEOUT", "soon"),
        ("ELASTICFLOW_LOG_FORMAT", "xml"),
        ("ELASTICFLOW_HEARTBEAT_TIMEOUT", "0"),
        ("ELASTICFLOW_HEARTBEAT_TIMEOUT", "3601"),
        ("ELASTICFLOW_GRACE", "soon"),
        ("ELASTICFLOW_GRACE", "-1"),
        ("ELASTICFLOW_GRACE", "nan"),
        ("ELASTICFLOW_GRACE", "inf"),
        ("ELASTICFLOW_AUTOSCALE", "max=0"),
        ("ELASTICFLOW_AUTOSCALE", "3"),
        ("ELASTICFLOW_SCALE_TIMEOUT", "0"),
        ("LOCAL_WORLD_SIZE", "0"),
    ],
)
def test_environment_malformed_variable_is_named(name, value):
    with pytest.raises(UsageError, match=name):
        read_environment({name: value})


@pytest.mark.parametrize("value", ["one", "-1", "1"])
@pytest.mark.parametrize(
    "told", [{"LOCAL_WORLD_SIZE": "1"}, {"ELASTICFLOW_COORDINATOR": "h:1"}], ids=lambda told: next(iter(told))
)
def test_local_rank_of_a_worker_is_one_of_those_of_its_node(value, told):
    with pytest.raises(UsageError, match="LOCAL_RANK"):
        read_environment({"LOCAL_RANK": value, **told})


@pytest.mark.parametrize("value", ["3", "-1"])
def test_local_rank_of_whoever_is_no_worker_does_not_count(value):
    assert read_environment({"LOCAL_RANK": value}).local_rank == 0
