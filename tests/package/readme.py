"""The README and the metadata as the package index shows them.

The index shows the README without the files beside it, so links to them have to be absolute. Where the repository is
published is known only to whoever publishes it, and is no part of the sources.
"""

from __future__ import annotations

import re

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:|#")


def for_index(readme: str, *, repository: str | None, tag: str) -> str:
    """The README with absolute links into the repository at a tag.

    Args:
        readme: Markdown, with links relative to the root of the repository.
        repository: Its URL, as https://example.org/team/project; without one, links become plain text and images are
            left out.
        tag: Of the release, as "v0.1.0".
    """

    def absolute(link: re.Match[str]) -> str:
        image, text, target = link["image"], link["text"], link["target"]
        if _ABSOLUTE.match(target):
            return link[0]
        if repository is None:
            return "" if image else text
        return f"{image}[{text}]({repository}/{'raw' if image else 'blob'}/{tag}/{target})"

    parts = _CODE.split(readme)  # code at the odd places
    return "".join(part if place % 2 else _LINK.sub(absolute, part) for place, part in enumerate(parts))


def urls(repository: str, *, tag: str) -> str:
    """The table ``[project.urls]`` of pyproject.toml."""
    links = {
        "Homepage": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    return "\n[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in links.items())
