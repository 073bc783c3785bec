"""The report page: one HTML file that contains everything it needs and loads nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from ef_common.events import finite

_SCRIPTS = ("vendor/uPlot.iife.min.js", "web/format.js", "web/charts.js", "web/lanes.js", "web/page.js")
_STYLES = ("vendor/uPlot.min.css", "web/page.css")


def page(snapshot: dict[str, Any], *, live: bool = False) -> str:
    """The page of a run.

    Nothing that a run says becomes markup: it stands in the page as JSON, and scripts show it as text. The policy in
    the page allows these scripts and styles alone.

    Args:
        snapshot: The data that it shows, from `Timeline.snapshot`.
        live: Whether it asks the server that it comes from for news.
    """
    script = f"/*\n{_text('vendor/LICENSE')}*/\n{_text(*_SCRIPTS)}"  # which each copy of uPlot is to hold
    style = _text(*_STYLES)
    policy = [
        "default-src 'none'",
        f"script-src {_hash(script)}",
        f"style-src {_hash(style)}",
        "img-src data:",
        *(["connect-src 'self'"] if live else []),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    values = {"policy": "; ".join(policy), "style": style, "script": script, "data": embedded(snapshot)}
    html = _text("web/page.html")
    if live:
        html = html.replace('<html lang="en">', '<html lang="en" data-live="yes">')
    return re.sub("@(policy|style|script|data)@", lambda found: values[found[1]], html)


def embedded(snapshot: dict[str, Any]) -> str:
    """JSON that no HTML parser takes for anything else."""
    return json.dumps(finite(snapshot), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


@cache
def _text(*names: str) -> str:
    return "\n".join(files("ef_common.report").joinpath(name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
