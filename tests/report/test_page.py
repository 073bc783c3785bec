"""The page holds all it needs, and nothing that a run says becomes part of the program."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ef_common.cli import main
from ef_common.report.page import embedded, page
from ef_common.report.timeline import snapshot_of
from tests.report.generated import Generated, small

WORKER = "<img src=x onerror=alert(1)></script>"
HOSTILE = "</script><script>alert(1)</script><!--<script><img src=x onerror=alert(1)>@script@ \\u003c \u2028 \ud800"


class Reader(HTMLParser):
    """What a browser makes of a page: its elements, and the texts of its scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script":
            self.scripts[-1] += data


def hostile(run_dir: Path) -> Generated:
    """A run whose worker, host, reasons and warnings are markup."""
    run = Generated(run_dir)
    workers = [*run.start(2), WORKER]
    run.log(WORKER, "start", pid=1, host=HOSTILE)
    run.view(workers, HOSTILE)
    run.train(3)
    run.log(workers[0], "fault", what=HOSTILE, message=HOSTILE)
    run.lose(WORKER, why=HOSTILE)
    run.train(3)
    run.write()
    return run


def shown(run_dir: Path) -> dict[str, Any]:
    return snapshot_of(run_dir, unaudited="It is not needed here.")


def test_page_asks_no_network_for_anything(tmp_path: Path) -> None:
    small(tmp_path)
    html = page(shown(tmp_path))
    for tag, attributes in Reader(html).elements:
        assert not {"src", "href", "action", "data", "srcset"} & attributes.keys(), tag
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html
    assert "connect-src" not in html
    assert "connect-src 'self'" in page(shown(tmp_path), live=True)


def test_page_holds_the_licence_of_what_it_copies(tmp_path: Path) -> None:
    small(tmp_path)
    assert "Copyright (c) 2022 Leon Sorokin" in Reader(page(shown(tmp_path))).scripts[1]


def test_what_a_run_says_stays_data(tmp_path: Path) -> None:
    hostile(tmp_path)
    snapshot = shown(tmp_path)
    html = page(snapshot)
    read = Reader(html)
    assert [tag for tag, _ in read.elements].count("script") == 2
    assert "img" not in [tag for tag, _ in read.elements]
    assert json.loads(read.scripts[0]) == snapshot
    assert (WORKER, HOSTILE) in {(lane["worker"], lane["host"]) for lane in snapshot["lanes"]}


def test_scripts_never_write_markup() -> None:
    folder = Path(main.callback.__code__.co_filename).parents[1] / "report" / "web"
    sources = {path.name: path.read_text() for path in folder.glob("*.js")}
    assert len(sources) == 4
    for name, source in sources.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", source), (
            name
        )


def test_data_is_ascii_without_angle_brackets() -> None:
    text = embedded({"a": HOSTILE, "b": float("nan")})
    assert text.isascii()
    assert "<" not in text
    assert json.loads(text) == {"a": HOSTILE, "b": None}


def test_report_is_written_into_the_run(tmp_path: Path) -> None:
    small(tmp_path)
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.output == f"The report is in {tmp_path / 'report.html'}\n"
    data = json.loads(Reader((tmp_path / "report.html").read_text()).scripts[0])
    assert [one["name"] for one in data["audit"]["properties"]] == [
        "samples",
        "updates",
        "weights",
        "views",
        "evaluation",
    ]


def test_report_elsewhere_without_an_audit_and_as_json(tmp_path: Path) -> None:
    small(tmp_path)
    target = tmp_path / "other.html"
    assert CliRunner().invoke(main, ["report", str(tmp_path), "-o", str(target), "--no-audit"]).exit_code == 0
    assert json.loads(Reader(target.read_text()).scripts[0])["audit"]["ok"] is None
    result = CliRunner().invoke(main, ["report", str(tmp_path), "--json"])
    assert json.loads(result.output)["figures"]["num_changes"] == 3
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("arguments", [[], ["--no-audit"]])
def test_report_of_no_log_exits_2(tmp_path: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(main, ["report", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert result.output.startswith("elasticflow report: ")
    assert not (tmp_path / "report.html").exists()


def test_report_in_the_run_replaces_a_link_and_one_elsewhere_follows_it(tmp_path: Path) -> None:
    small(tmp_path)
    target, link = tmp_path / "target", tmp_path / "report.html"
    target.write_text("another's")
    link.symlink_to(target)
    assert CliRunner().invoke(main, ["report", str(tmp_path), "--no-audit"]).exit_code == 0
    assert not link.is_symlink()
    assert target.read_text() == "another's"
    link.unlink()
    link.symlink_to(target)
    assert CliRunner().invoke(main, ["report", str(tmp_path), "--no-audit", "-o", str(link)]).exit_code == 0
    assert link.is_symlink()
    assert target.read_text().startswith("<!doctype html>")


def test_report_that_cannot_be_written_exits_2(tmp_path: Path) -> None:
    small(tmp_path)
    result = CliRunner().invoke(main, ["report", str(tmp_path), "-o", str(tmp_path / "no" / "such.html")])
    assert result.exit_code == 2
    assert "cannot write the file" in result.output


def test_server_that_is_not_installed_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(tmp_path)
    monkeypatch.delitem(sys.modules, "ef_common.report.serve", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(main, ["status", str(tmp_path), "--serve"])
    assert result.exit_code == 2
    assert "pip install 'elasticflow-training[live]'" in result.output
