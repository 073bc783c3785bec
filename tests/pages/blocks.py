"""The code of the documentation, block by block: what is fenced in pages, and the examples in docstrings."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
SOURCES = [file for name in ("elasticflow", "ef_*") for file in sorted(ROOT.glob(f"{name}/**/*.py"))]
_EXAMPLE = re.compile(r"^( *)Example::\n\n((?:\1    .*\n|\n)+)", re.MULTILINE)
_FENCE = re.compile(r"^( *)(`{3,}|~{3,})(.*)$")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        page: Path of its page from the root of the repository.
        heading: The heading that it stands under, without its marks.
        number: 1 for the first block under that heading.
        language: What follows the fence: "python", "sh", or "" for output.
        line: Number of its first line of code in the page, from 1.
        code: Its lines, without the indentation of a list that it may be in.
    """

    page: str
    heading: str
    number: int
    language: str
    line: int
    code: str

    @property
    def name(self) -> str:
        """Names it in a table, whatever is written above it."""
        return f"{self.page}: {self.heading}" + (f" ({self.number})" if self.number > 1 else "")

    @property
    def commands(self) -> list[str]:
        """Those of a block of the shell, without comments."""
        lines = self.code.replace("\\\n", " ").splitlines()
        commands = [one.strip() for line in lines for one in re.sub(r"(^|\s)#.*", "", line).split(" && ")]
        return [re.sub(r"\s+", " ", command) for command in commands if command]


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    """The blocks of a page in these languages; without any, all but directives of the site such as `{toctree}`."""
    heading, counts = "", Counter[str]()
    lines = iter(enumerate(page.read_text().splitlines(), start=2))  # number of the line that follows
    for next_line, line in lines:
        if found := _FENCE.match(line):
            indent, fence, language = found.groups()
            code = []
            for _, inner in lines:
                if inner.strip() == fence:
                    break
                code.append(inner.removeprefix(indent))
            counts[heading] += 1
            name = str(page.relative_to(ROOT))
            block = Block(name, heading, counts[heading], language, next_line, "\n".join(code))
            if language in languages or not (languages or language.startswith("{")):
                yield block
        elif line.startswith("#"):
            heading = line.lstrip("#").strip()


def examples(file: Path) -> Iterator[Block]:
    """The blocks of Python below `Example::` in docstrings of a module."""
    text = file.read_text()
    for number, found in enumerate(_EXAMPLE.finditer(text), start=1):
        line = text.count("\n", 0, found.start(2)) + 1
        yield Block(str(file.relative_to(ROOT)), "Example", number, "python", line, textwrap.dedent(found[2]).rstrip())


def programs() -> list[Block]:
    """All blocks of Python."""
    return [*all_blocks("python"), *(block for file in SOURCES for block in examples(file))]


def all_blocks(*languages: str) -> list[Block]:
    """Those of all pages."""
    return [block for page in PAGES for block in blocks(page, *languages)]
