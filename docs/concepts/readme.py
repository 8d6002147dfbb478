"""Command output in README.md: each marked block holds the output of the command above it."""

from __future__ import annotations

import io
import os
import re
import shlex
from contextlib import redirect_stdout

from concepts.page import ROOT
from trainatomy.cli import main

WIDTH = 80
"""Columns of the output in README.md."""
_BLOCK = re.compile(
    r"```console\n\$ trainatomy (?P<command>[^`]+?)\n```\n\n"
    r"<!-- output: (?P<paragraphs>\d+) paragraphs, written by `make docs` -->\n\n```text\n(?P<output>[^`]*)```"
)


def readme() -> str:
    """Return README.md with the first paragraphs of each command's current output."""
    return _BLOCK.sub(_with_output, (ROOT / "README.md").read_text("utf-8"))


def _with_output(block: re.Match[str]) -> str:
    shown = "\n\n".join(_output(block["command"]).split("\n\n")[: int(block["paragraphs"])])
    before = block[0][: block.start("output") - block.start()]
    return f"{before}{shown.rstrip()}\n```"


def _output(command: str) -> str:
    before, captured = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = str(WIDTH)
    try:
        with redirect_stdout(captured):
            main(shlex.split(command.replace("\\\n", "")))
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return captured.getvalue()
