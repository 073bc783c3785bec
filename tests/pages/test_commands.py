"""The commands of the documentation do what their pages say, and print what these show; see `tests.pages.rows`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from ef_common.cli import main
from tests.pages.blocks import ROOT, Block, all_blocks
from tests.pages.rows import ELSEWHERE, FOLLOWED, GIVEN, NOT_RUN, OF_THE_PAGE, SHOWN, followed, known
from tests.pages.shapes import unlike
from tests.pages.walk import Walk

SHELL = all_blocks("sh", "bash")
COMMANDS = {command: block.name for block in SHELL for command in block.commands}
ROWS = "tests/pages/rows.py"


def walks() -> dict[tuple[str, ...], list[str]]:
    """The pages with commands to follow; those with the same commands are one walk."""
    found: dict[tuple[str, ...], list[str]] = {}
    for page in dict.fromkeys(block.page for block in SHELL):
        commands = [command for block in of_page(page) for command in block.commands if followed(command)]
        if any(followed(command) != "export" for command in commands):
            found.setdefault((*GIVEN.get(page, ()), *commands), []).append(page)
    return found


def of_page(page: str) -> list[Block]:
    return [block for block in SHELL if block.page == page]


def test_every_command_has_a_row_and_every_row_a_command() -> None:
    missing = [f"{command} ({name})" for command, name in COMMANDS.items() if not known(command)]
    assert not missing, (
        f"{ROWS} does not say how to run these commands: {missing}. Add a row to FOLLOWED, ELSEWHERE or NOT_RUN"
    )
    for table in (FOLLOWED, ELSEWHERE, NOT_RUN):
        unused = [pattern for pattern in table if not any(re.fullmatch(pattern, command) for command in COMMANDS)]
        assert not unused, f"{ROWS} has rows of commands that are on no page: {unused}"
    assert all((ROOT / test).exists() for test in ELSEWHERE.values())


def test_every_block_of_output_has_a_row_and_every_row_a_block() -> None:
    names = {block.name for block in all_blocks() if block.language not in ("python", "sh", "bash")}
    missing = names - set(SHOWN)
    assert not missing, f"{ROWS} does not say what prints what these blocks show: {sorted(missing)}. Add rows to SHOWN"
    assert set(SHOWN) <= names, f"{ROWS} has rows of blocks that are gone: {sorted(set(SHOWN) - names)}"


def test_address_that_prometheus_reads_is_where_the_page_is_served() -> None:
    yaml = pytest.importorskip("yaml")
    all_shown = [yaml.safe_load(block.code) for block in all_blocks("yaml")]
    (shown,) = (one for one in all_shown if "scrape_configs" in one)
    (address,) = (option.default for option in main.commands["status"].params if option.name == "address")
    assert shown["scrape_configs"][0]["static_configs"] == [{"targets": [address]}]


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pages", walks().values(), ids=lambda pages: pages[0])
def test_commands_of_a_page_do_what_it_says(pages: list[str], tmp_path: Path) -> None:
    if any("--png" in block.code for block in of_page(pages[0])) and importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs the extra `plots`")
    walk = Walk(tmp_path)
    walk.follow(GIVEN.get(pages[0], ()), of_page(pages[0]))
    for block in all_blocks(""):
        if (block.page if SHOWN[block.name] == OF_THE_PAGE else SHOWN[block.name]) in pages:
            missing = unlike(block.code, walk.printed)
            assert not missing, f"{block.name} shows lines like which none was printed: {missing}\n{walk.printed}"
