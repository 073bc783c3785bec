"""Directives of pages that are made of the code when the site is built, so that they cannot differ from it.

``{settings}``, ``{run-options}``, ``{events}``, ``{error-tree}`` and ``{glossary-of-code}`` take no arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tables
from docutils import nodes
from docutils.frontend import get_default_settings
from docutils.parsers.rst import Parser
from docutils.utils import new_document
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Generated(SphinxDirective):
    """A directive whose content is reStructuredText that the code gives."""

    def lines(self) -> Iterator[str]:
        """The lines of that text."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        """Parse it; a page in Markdown has another parser of its own."""
        settings = get_default_settings(Parser)
        settings.env = self.env
        document = new_document(self.get_source_info()[0], settings)
        Parser().parse("\n".join([".. default-role:: code", "", *self.lines()]), document)
        return list(document.children)


class Settings(Generated):
    """All settings, with all places where each can be set."""

    def lines(self) -> Iterator[str]:
        rows = [
            ("\n".join(f"| {place}" for place in one.places), one.default, one.meaning) for one in tables.settings()
        ]
        yield from list_table(("Where it is set", "Default", "Meaning"), rows, "34 14 52")


class RunOptions(Generated):
    """The options that `elasticflow run` adds to those of torchrun."""

    def lines(self) -> Iterator[str]:
        rows = [(f"``{option}``", meaning) for option, meaning in tables.run_options()]
        yield from list_table(("Option", "Meaning"), rows, "30 70")


class Events(Generated):
    """Each kind of event with its fields."""

    def lines(self) -> Iterator[str]:
        yield from list_table(("Kind", "Meaning", "Fields"), list(tables.events()), "16 44 40")


class ErrorTree(Generated):
    """The tree that stands at the top of ef_common/errors.py."""

    def lines(self) -> Iterator[str]:
        yield from ("::", "", tables.error_tree())


class Glossary(Generated):
    """The terms that ef_common/__init__.py defines."""

    def lines(self) -> Iterator[str]:
        for term, meaning in tables.glossary():
            yield from (term, f"   {meaning}", "")


def list_table(header: Sequence[str], rows: Sequence[Sequence[str]], widths: str) -> Iterator[str]:
    """A table, in reStructuredText."""
    yield from (".. list-table::", "   :header-rows: 1", f"   :widths: {widths}", "")
    for row in (header, *rows):
        for number, cell in enumerate(row):
            first, *others = cell.splitlines() or [""]
            yield f"   {'*' if number == 0 else ' '} - {first}".rstrip()
            yield from (f"       {line}" for line in others)
    yield ""


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("settings", Settings)
    app.add_directive("run-options", RunOptions)
    app.add_directive("events", Events)
    app.add_directive("error-tree", ErrorTree)
    app.add_directive("glossary-of-code", Glossary)
    return {"parallel_read_safe": True}
