"""Whether what a page shows looks like what is printed, whatever the numbers, the names and the columns are."""

from __future__ import annotations

import re

_RULES = (
    (r"\b[A-Za-z][\w.]*(-[\w.]+)*-\d+-[0-9a-f]{4}\b", "WORKER"),
    (r"/\S+|\belasticflow-runs/\S+", "PLACE"),
    (r"\d[\d,.]*(e-\d+)?", "0"),
    (r"\b0 (ms|s|min|h) ago|\bnow\b", "0 ago"),
    (r"\b0 (ms|s|min|h)\b", "0 s"),
    (r"\b0 samples? (is|are)\b", "0 samples are"),
    (r"\b0 workers?\b", "0 workers"),
    (r", at most once in 0 cut short or unfinished", ""),
    (r"[━─]+", "━"),
    (r"\s+", " "),
)


def shape(line: str) -> str:
    """A line without what differs from run to run."""
    for pattern, general in _RULES:
        line = re.sub(pattern, general, line)
    return line.strip()


def unlike(shown: str, printed: str) -> list[str]:
    """Lines that a page shows and nobody has printed; "…" stands for others."""
    there = {shape(line) for line in printed.splitlines()}
    return [line for line in shown.splitlines() if line.strip() not in ("", "…") and shape(line) not in there]
