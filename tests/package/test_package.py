import re
import sys
from pathlib import Path

import pytest

from tests.package import interpreters, readme
from tests.package.__main__ import ROOT

REPOSITORY = "https://example.org/team/project"
MARKDOWN = "![A kill](docs/a.svg) [Guides](docs/guides/index.md#top), [torch](https://pytorch.org), [here](#install)"


def test_links_into_the_repository_become_absolute():
    assert readme.for_index(MARKDOWN, repository=REPOSITORY, tag="v1") == (
        f"![A kill]({REPOSITORY}/raw/v1/docs/a.svg) [Guides]({REPOSITORY}/blob/v1/docs/guides/index.md#top), "
        "[torch](https://pytorch.org), [here](#install)"
    )


def test_without_a_repository_no_link_leads_nowhere():
    page = readme.for_index(MARKDOWN, repository=None, tag="v1")
    assert page == " Guides, [torch](https://pytorch.org), [here](#install)"


def test_code_is_left_alone():
    code = '`call["a"](b)` and\n\n```python\nparams["net"](x)\n```\n'
    assert readme.for_index(code, repository=REPOSITORY, tag="v1") == code


def test_no_relative_link_of_the_readme_is_left():
    page = readme.for_index((ROOT / "README.md").read_text(), repository=REPOSITORY, tag="v1")
    text = re.sub(r"```.*?```|`[^`]*`", "", page, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets
    assert not [target for target in targets if not target.startswith(("https://", "#"))]


def test_urls_are_a_table_of_the_project():
    tomllib = pytest.importorskip("tomllib", reason="it came with Python 3.11")
    project = tomllib.loads(readme.urls(REPOSITORY, tag="v1"))["project"]
    assert project["urls"]["Changelog"] == f"{REPOSITORY}/blob/v1/CHANGELOG.md"


def test_this_interpreter_is_found():
    version = "{}.{}".format(*sys.version_info)
    found = interpreters.find(version)
    assert found is not None
    assert Path(found).exists()


def test_a_version_that_is_not_here_is_not_found():
    assert interpreters.find("2.99") is None
