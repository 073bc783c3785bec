"""Scripts that build from Debian's packages ask apt for those of one release, and change nothing of the system's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = """\
Types: deb
URIs: http://one.example/debian
Suites: any

Types: deb
URIs: http://two.example/security
"""
APT_GET = """\
#!/bin/bash
printf '%s\\n' "$@" > "$CALL"
exit 100
"""


@pytest.mark.parametrize(
    ("script", "types", "suites"), [("build.sh", "deb deb-src", "bookworm"), ("build_definitions.sh", "deb", "sid")]
)
def test_script_asks_apt_for_packages_of_one_release_and_ends_if_there_are_none(
    tmp_path: Path, script: str, types: str, suites: str
) -> None:
    (tmp_path / "system.sources").write_text(SOURCES)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "apt-get").write_text(APT_GET)
    (tmp_path / "bin" / "apt-get").chmod(0o755)
    environ = {
        "PATH": os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]]),
        "DEBIAN_SOURCES": str(tmp_path / "system.sources"),
        "CALL": str(tmp_path / "call"),
    }
    done = subprocess.run(
        [f"./{script}", str(tmp_path / "built")], cwd=HERE, env=environ, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (100, "")
    work = tmp_path / "built.work"
    *options, _, command = (tmp_path / "call").read_text().splitlines()
    assert command == "update"
    assert {
        f"Dir::Etc::sourceparts={work}/sources",
        f"Dir::State::lists={work}/lists",
        f"Dir::Cache={work}/cache",
    } <= set(options)
    assert (work / "lists" / "partial").is_dir()
    assert dict(line.split(": ") for line in (work / "sources" / "source.sources").read_text().splitlines()) == {
        "Types": types,
        "URIs": "http://one.example/debian",
        "Suites": suites,
        "Components": "main",
        "Signed-By": "/usr/share/keyrings/debian-archive-keyring.gpg",
    }
