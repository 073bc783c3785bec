"""`elasticflow yarn` against a server that behaves as YARN's published REST API of services says."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result

from ef_common.cli import main
from ef_common.launch import yarn as yarn_module
from ef_common.launch.run import parser

SERVICES = "/app/v1/services"


class Yarn:
    """A ResourceManager with services, none of whose containers runs anything.

    Attributes:
        services: By name, as GET shows them.
        refuses: Status and body of the next answers; None for those of the specification.
    """

    def __init__(self) -> None:
        self.services: dict[str, dict[str, Any]] = {}
        self.refuses: tuple[int, str] | None = None
        self.users: set[str] = set()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Status and body."""
        name, _, component = path.removeprefix(SERVICES).strip("/").partition("/components/")
        if method == "POST" and not name:
            return self._create(body)
        service = self.services.get(name)
        if service is None:
            return 404, {"diagnostics": f"Service {name} not found"}
        if method == "GET":
            return 200, service
        if method == "PUT" and component:
            (found,) = (one for one in service["components"] if one["name"] == component)
            if found["restart_policy"] != "ALWAYS":
                return 400, {"diagnostics": f"Flex is not supported for {component}"}
            return 200, {"diagnostics": self._flex(found, body["number_of_containers"])}
        if method == "PUT" and set(body) == {"state"}:
            service["state"] = body["state"]
            return 200, {"diagnostics": f"Service {name} has {body['state'].lower()}"}
        return 405, {"diagnostics": "not supported"}

    def _create(self, service: dict[str, Any]) -> tuple[int, Any]:
        missing = {"name", "version"} - set(service)
        if missing or "state" in service:
            return 400, {"diagnostics": f"invalid service definition: {missing}"}
        if self.services.get(service["name"], {"state": "STOPPED"})["state"] != "STOPPED":
            return 400, {"diagnostics": f"Service name {service['name']} is already taken"}
        for component in service["components"]:
            if not component.get("launch_command") or not isinstance(component["resource"]["memory"], str):
                return 400, {"diagnostics": "invalid component"}
            self._flex(component, component["number_of_containers"])
        self.services[service["name"]] = {**service, "state": "STABLE", "id": "application_1_0002", "lifetime": -1}
        return 202, {"diagnostics": "Application ID: application_1_0002"}

    def _flex(self, component: dict[str, Any], number: int) -> str:
        before = component.get("number_of_containers")
        component["number_of_containers"] = number
        component["containers"] = [
            {
                "id": f"container_{i}",
                "bare_host": f"host{i}",
                "state": "READY",
                "component_instance_name": f"worker-{i}",
            }
            for i in range(number)
        ]
        return f"Updating component ({component['name']}) size from {before} to {number}"


@pytest.fixture
def yarn() -> Iterator[tuple[Yarn, str]]:
    served = Yarn()

    class Handler(BaseHTTPRequestHandler):
        protocol_version: ClassVar[str] = "HTTP/1.1"

        def _answer(self) -> None:
            path, _, query = self.path.partition("?")
            served.users.add(query)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, said = served.refuses or served.answer(self.command, path, body)
            content = said.encode() if isinstance(said, str) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield served, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTICFLOW_TOKEN", raising=False)
    monkeypatch.setenv("HADOOP_USER_NAME", "ann")
    (tmp_path / "train.py").touch()


def elasticflow(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["yarn", *arguments])


def submit(url: str, *arguments: str) -> Result:
    return elasticflow("submit", f"--url={url}", "--run-dir=run", *arguments)


def test_service_is_submitted_shown_flexed_and_stopped(yarn: tuple[Yarn, str]) -> None:
    served, url = yarn
    done = submit(url, "--nodes=1:8", "--containers=2", "--gpus=1", "--queue=ml", "--max-restarts=7", "train.py", "--x")
    assert done.exit_code == 0, done.output
    (component,) = served.services["train"]["components"]
    assert component["resource"] == {
        "cpus": 1,
        "memory": "4096",
        "additional": {"yarn.io/gpu": {"value": 1, "unit": ""}},
    }
    assert served.services["train"]["queue"] == "ml"
    first, *others = done.output.splitlines()
    assert first == "Service train starts with 2 containers. What next:"
    commands = {line.split("  ")[1] for line in others}
    assert {"elasticflow yarn status run", "elasticflow yarn scale run CONTAINERS"} <= commands
    assert elasticflow("status", "run").output == "train: STABLE, 2 of 2 containers: host0, host1\n"
    assert elasticflow("scale", "run", "5").exit_code == 0
    assert elasticflow("status", "run").output.startswith("train: STABLE, 5 of 5 containers")
    assert elasticflow("stop", "run").exit_code == 0
    assert elasticflow("status", "run").output.startswith("train: STOPPED")
    assert served.users == {"user.name=ann"}


def test_nothing_secret_is_in_the_service(yarn: tuple[Yarn, str]) -> None:
    served, url = yarn
    assert submit(url, "train.py").exit_code == 0
    token = Path("run/token")
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert token.read_text().strip() not in json.dumps(served.services)
    assert token.read_text().strip() not in Path("run/node.sh").read_text()


def test_token_of_the_shell_is_that_of_the_nodes(yarn: tuple[Yarn, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICFLOW_TOKEN", "of the shell")
    assert submit(yarn[1], "train.py").exit_code == 0
    assert Path("run/token").read_text() == "of the shell\n"


@pytest.mark.parametrize(("status", "stops"), [(0, True), (1, True), (75, False), (137, False)])
def test_node_that_has_seen_the_end_stops_the_service(
    yarn: tuple[Yarn, str], tmp_path: Path, status: int, stops: bool
) -> None:
    assert submit(yarn[1], "--max-restarts=7", "train.py", "a b").exit_code == 0
    command = tmp_path / "bin" / "elasticflow"
    command.parent.mkdir()
    command.write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$@" >> {tmp_path}/calls\n[ "$1" = run ] && exit {status}\nexit 0\n'
    )
    command.chmod(0o755)
    script = Path("run/node.sh").read_text().replace("export PATH=", f"export PATH={command.parent}:")
    done = subprocess.run(["bash", "-c", script], env={**os.environ, "PATH": os.environ["PATH"]})
    assert done.returncode == status
    calls = Path("calls").read_text().splitlines()
    assert ("yarn" in calls) == stops
    options = calls[1 : calls.index("yarn")] if stops else calls[1:]
    parsed = parser().parse_args(options)
    assert (parsed.nnodes, parsed.max_restarts, parsed.rdzv_endpoint) == ("1:8", 7, f"file://{tmp_path}/run")
    assert (parsed.training_script, parsed.training_script_args) == ("train.py", ["a b"])


def test_dry_run_prints_the_service() -> None:
    done = elasticflow("submit", "--dry-run", "--nodes=2:4", "train.py")
    assert json.loads(done.output)["components"][0]["number_of_containers"] == 4
    assert not Path("elasticflow-runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("missing.py",), "Received: missing.py"),
        ((), "Received: no script"),
        (("--nodes=0:2", "train.py"), "Received: --nodes=0:2"),
        (("--containers=9", "train.py"), "this service can have 1 to 8 containers. Received: 9"),
        (("--name=Big_One", "train.py"), "Received: Big_One"),
        (("--url=rm:8088", "train.py"), "Received: --url=rm:8088"),
        (("--url=http://127.0.0.1:9", "train.py"), "no ResourceManager answers"),
    ],
)
def test_wrong_submission_is_one_line_and_leaves_nothing(arguments: tuple[str, ...], words: str) -> None:
    done = elasticflow("submit", *arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(Path().glob("elasticflow-runs/*"))


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((400, '{"diagnostics": "no such queue"}'), "YARN refuses that with status 400: no such queue"),
        ((401, ""), "status 401: Unauthorized (Kerberos is not supported here)"),
        ((500, "<html>oops</html>"), "status 500: <html>oops</html>"),
    ],
)
def test_refusal_is_said_in_yarns_own_words(yarn: tuple[Yarn, str], refusal: tuple[int, str], words: str) -> None:
    served, url = yarn
    served.refuses = refusal
    done = submit(url, "train.py")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert words in done.stderr
    accepted = refusal[0] >= 500  # perhaps
    assert Path("run/yarn.json").exists() is accepted
    assert (
        "all the same: `elasticflow yarn status run` tells" in done.stderr.replace(str(Path.cwd()) + "/", "")
    ) is accepted


def test_resource_manager_that_is_not_there_has_accepted_nothing_and_one_that_is_silent_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(yarn_module, "_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "YARN may have accepted the service all the same" in submit(url, "train.py").stderr
        assert Path("run/node.sh").exists()
    shutil.rmtree("run")
    done = submit(url, "train.py")
    assert "no ResourceManager answers" in done.stderr
    assert not Path("run").exists()


def test_directory_of_a_service_that_runs_is_not_used_again(yarn: tuple[Yarn, str]) -> None:
    _, url = yarn
    assert submit(url, "train.py").exit_code == 0
    assert "service train trains there" in submit(url, "train.py").stderr
    assert elasticflow("stop", "run").exit_code == 0
    assert submit(url, "train.py").exit_code == 0


def test_answer_that_is_none_and_run_without_a_service_are_one_line(yarn: tuple[Yarn, str]) -> None:
    served, url = yarn
    assert submit(url, "train.py").exit_code == 0
    served.refuses = (200, "[]")
    assert "is none that its REST API describes" in elasticflow("status", "run").stderr
    Path("other").mkdir()
    assert "no service of YARN was submitted" in elasticflow("status", "other").stderr
