"""Which provisioner a worker has, and that orders of a local job are those of `elasticflow scale`."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ef_common.core.autoscale import Autoscale
from ef_common.data.provisioners import Orders
from ef_common.errors import UsageError
from ef_common.launch import environment, run_directory
from ef_common.launch.environment import read_environment
from ef_common.launch.hosts import folder
from ef_common.launch.hosts.folder import read_wish
from ef_common.launch.provisioning import LocalJob, provisioner_for
from ef_common.launch.run import Options
from ef_common.launch.run_directory import Launcher, read_order, this_launcher, write_launcher


def launcher(directory: Path, *, local: bool = True, max_workers: int = 4) -> Launcher:
    made = this_launcher(["train.py"], max_workers=max_workers, local=local)
    write_launcher(directory, made)
    return made


def ordered(directory: Path) -> int | None:
    order = read_order(directory)
    return None if order is None else order.num_workers


def test_local_job_is_scaled_by_its_launcher(tmp_path: Path) -> None:
    launcher(tmp_path)
    found = provisioner_for(read_environment({"ELASTICFLOW_RUN_DIR": str(tmp_path)}))
    assert isinstance(found, Orders)
    assert found.repeats
    found.scale_to(3, present=2)
    while (thread := found._thread) is not None:
        thread.join(10)
    assert ordered(tmp_path) == 3
    assert found.most is None


def test_local_job_may_have_a_spare_beyond_its_limit_and_no_more(tmp_path: Path) -> None:
    launcher(tmp_path)
    place = LocalJob(tmp_path)
    place.provide(5, present=4)
    assert ordered(tmp_path) == 5
    with pytest.raises(UsageError, match="1 to 4 workers"):
        place.provide(6, present=4)
    with pytest.raises(UsageError, match="1 to 4 workers"):
        run_directory.order(tmp_path, 5)  # what people order is members


def test_launcher_that_has_ended_gives_nothing(tmp_path: Path) -> None:
    write_launcher(tmp_path, replace(launcher(tmp_path), state="ended"))
    with pytest.raises(UsageError, match="no `elasticflow run` is at work"):
        LocalJob(tmp_path).provide(2, present=1)


@pytest.mark.parametrize("local", [None, False])
def test_job_of_several_machines_has_no_provisioner_of_its_own(tmp_path: Path, local: bool | None) -> None:
    if local is not None:
        launcher(tmp_path, local=local)
    assert provisioner_for(read_environment({"ELASTICFLOW_RUN_DIR": str(tmp_path)})) is None
    assert provisioner_for(read_environment({})) is None


def test_command_comes_before_the_launcher(tmp_path: Path) -> None:
    launcher(tmp_path)
    named = {"ELASTICFLOW_RUN_DIR": str(tmp_path), "ELASTICFLOW_SCALE_COMMAND": "./more.sh"}
    found = provisioner_for(read_environment(named))
    assert isinstance(found, Orders)
    assert not found.repeats


def test_options_become_variables_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.AUTOSCALE, raising=False)
    made = Options.parse(["--autoscale=max=3,every_steps=50", "--scale-command=./more.sh -q", "train.py"])
    assert made.variables == {environment.AUTOSCALE: "max=3,every_steps=50", environment.SCALE_COMMAND: "./more.sh -q"}
    assert read_environment(made.variables).autoscale == Autoscale(max=3, every_steps=50)
    assert Options.parse(["train.py"]).variables == {}
    assert environment.AUTOSCALE not in os.environ


@pytest.mark.parametrize("text", ["min=3,max=2", "threshold=2", "policy=best", "max=many", "8", "max=4,max=5"])
def test_options_that_are_wrong_are_refused_before_a_worker_is_started(text: str) -> None:
    with pytest.raises(UsageError, match="--autoscale"):
        Options.parse([f"--autoscale={text}", "train.py"])


def test_job_on_listed_hosts_tells_their_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICFLOW_HOST", "node1")
    found = provisioner_for(read_environment({"ELASTICFLOW_RUN_DIR": str(tmp_path)}))
    assert found is not None
    assert read_wish(tmp_path) is None
    for number, nodes in ((1, 3), (2, 3), (3, 2)):  # an order that is given again is one more wish
        found.scale_to(nodes, present=1)
        while (thread := getattr(found, "_thread")) is not None:  # noqa: B009
            thread.join(10)
        assert read_wish(tmp_path) == (number, nodes)


def test_controller_of_a_cluster_reads_what_is_wanted_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICFLOW_CONTROLLER", "1")
    launcher(tmp_path, local=False)
    found = provisioner_for(read_environment({"ELASTICFLOW_RUN_DIR": str(tmp_path)}))
    assert isinstance(found, Orders)
    assert found.repeats
    found.scale_to(3, present=1)
    while (thread := found._thread) is not None:
        thread.join(10)
    assert found.most is None


def test_controller_of_a_cluster_gives_no_more_pods_than_the_job_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ELASTICFLOW_CONTROLLER", "1")
    variables = {"ELASTICFLOW_RUN_DIR": str(tmp_path), "ELASTICFLOW_AUTOSCALE": "min=1,max=3"}
    found = provisioner_for(read_environment(variables))
    assert isinstance(found, Orders)
    for nodes, most in ((3, None), (4, 3)):
        found.scale_to(nodes, present=3)
        while (thread := found._thread) is not None:
            thread.join(10)
        assert found.most == most
    assert "at most 3 pods (maxWorkers)" in capfd.readouterr().err


def test_service_of_yarn_is_flexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr("ef_common.launch.yarn.scale", lambda job, nodes: asked.append((job.name, nodes)))
    run_directory.write_json(tmp_path / "yarn.json", {"url": "http://rm:8088", "name": "train", "max_nodes": 4})
    found = provisioner_for(read_environment({"ELASTICFLOW_RUN_DIR": str(tmp_path)}))
    assert found is not None
    found.scale_to(3, present=1)
    while (thread := getattr(found, "_thread")) is not None:  # noqa: B009
        thread.join(10)
    assert asked == [("train", 3)]


def test_wishes_of_two_workers_at_once_have_a_number_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may change while the one before still gives an order."""
    reads, both = folder.read_wish, threading.Barrier(2)

    def read(run_dir: Path) -> tuple[int, int] | None:
        found = reads(run_dir)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # each one has read before the other one writes, if that is possible
        return found

    monkeypatch.setattr(folder, "read_wish", read)
    others = [threading.Thread(target=folder.wish_for, args=(tmp_path, nodes)) for nodes in (2, 3)]
    for one in others:
        one.start()
    for one in others:
        one.join()
    wish = reads(tmp_path)
    assert wish is not None
    assert wish[0] == 2
