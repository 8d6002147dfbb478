"""Output of shown commands in pages: each marked block holds output of the command above it."""

from __future__ import annotations

import io
import os
import re
import shlex
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from functools import cache, partial
from pathlib import Path

from concepts.page import ROOT
from trainatomy.cli import main

WIDTH = 80
"""Columns of the shown output."""
FOLDERS = (ROOT / "docs" / "guides", ROOT / "docs" / "tutorials")
"""Folders of pages, in which their commands run."""
_BLOCK = re.compile(
    r"```console\n\$ trainatomy (?P<command>[^`]+?)\n```\n\n"
    r"<!-- output: (?:(?P<paragraphs>\d+) paragraphs|(?P<starts>\"[^>]+\")), written by `make docs` -->\n\n"
    r"```text\n(?P<output>[^`]*)```"
)


def readme() -> str:
    """Return README.md with the first paragraphs of each command's current output."""
    return with_outputs(ROOT / "README.md", ROOT)


def guides() -> dict[str, Callable[[], str]]:
    """Return what makes the home page and each page of the guides and tutorials, by its path below docs/."""
    home = ROOT / "docs" / "index.md"
    pages = [(home, ROOT), *((file, folder) for folder in FOLDERS for file in sorted(folder.rglob("*.md")))]
    return {str(file.relative_to(ROOT / "docs")): partial(with_outputs, file, folder) for file, folder in pages}


def with_outputs(file: Path, folder: Path) -> str:
    """Return a page with the current output of its commands, which run in ``folder``."""
    return _BLOCK.sub(lambda block: _with_output(block, folder), file.read_text("utf-8"))


def _with_output(block: re.Match[str], folder: Path) -> str:
    paragraphs = _output(block["command"], folder).split("\n\n")
    if block["paragraphs"]:
        shown = paragraphs[: int(block["paragraphs"])]
    else:
        shown = [_starting(start, paragraphs) for start in re.findall(r'"([^"]+)"', block["starts"])]
    before = block[0][: block.start("output") - block.start()]
    text = "\n\n".join(shown).rstrip()
    return f"{before}{text}\n```"


def _starting(start: str, paragraphs: list[str]) -> str:
    """Return the paragraph whose first line contains ``start``."""
    for paragraph in paragraphs:
        if start in paragraph.partition("\n")[0]:
            return paragraph
    raise ValueError(f"no paragraph of the output starts with {start!r}: {[one[:40] for one in paragraphs]}")


@cache
def _output(command: str, folder: Path) -> str:
    before, captured = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = str(WIDTH)
    try:
        with chdir(folder), redirect_stdout(captured):
            words = shlex.split(command.replace("\\\n", ""))
            alone = ["--jobs", "1"] if words[0] == "compare" else []  # same output, no processes to start
            code = main([*words, *alone])
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    if code:
        raise RuntimeError(f"`trainatomy {command}` exited with {code}")
    return captured.getvalue()
