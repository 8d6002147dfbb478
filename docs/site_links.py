"""Hook of mkdocs.yml: point links that leave docs/ at the repository, where a reader of the site finds the file."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Replace ``](../FILE)`` with the address of FILE in the repository."""
    return _OUTSIDE.sub(rf"]({config.extra['repository']}/blob/main/\1)", markdown)
