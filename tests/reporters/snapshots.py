"""Comparison of text pages with the files in ``pages/``.

``TRAINATOMY_WRITE_PAGES=1`` rewrites the files; review the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import RenderableType

from trainatomy.reporters.text.rendering import render

PAGES = Path(__file__).parent / "pages"


def compare(drawing: RenderableType, name: str) -> None:
    """Compare ``drawing`` at 80 and 120 columns with the files; no line may be longer than the page."""
    for width in (80, 120):
        text, file = render(drawing, width), PAGES / f"{name}-{width}.txt"
        assert max(map(len, text.splitlines())) <= width
        if os.environ.get("TRAINATOMY_WRITE_PAGES"):
            file.write_text(text, "utf-8")
        assert text == file.read_text("utf-8")
