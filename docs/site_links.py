"""Hook of mkdocs.yml: point links that leave docs/ at the repository, where a reader of the site finds the file."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_UPWARDS = re.compile(r"\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace each link to a FILE outside docs/ with its address in the repository."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def address(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        return link[0] if target.startswith("docs/") else f"]({config.extra['repository']}/blob/main/{target})"

    return _UPWARDS.sub(address, markdown)
