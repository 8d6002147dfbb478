"""Jupyter notebooks as scripts: their code cells, one after the other, without lines for IPython or a shell."""

from __future__ import annotations

import ast
import json
import linecache
import os
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from trainatomy.errors import WorkloadError

SUFFIX = ".ipynb"
_TIMED = ("%%time", "%%timeit", "%%capture", "%%prun")
"""Magics of a whole cell that run its code as Python."""
_MAGIC = re.compile(r"(?P<indent>\s*)(?:(?P<target>[\w\s,.\[\]]+=\s*)?[%!]|\?|[\w.]+\?{1,2}\s*$)")
"""A line for IPython: ``%matplotlib inline``, ``!pip install x``, ``files = !ls``, ``model?``."""


@dataclass(frozen=True, slots=True)
class Notebook:
    """The Python code of each cell by its number, from 1 among those with code, and the lines that were left out."""

    cells: dict[int, str]
    left_out: tuple[str, ...]


def read_notebook(path: Path) -> Notebook:
    """Read a notebook.

    Raises:
        WorkloadError: It is none, or its code is not Python.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise WorkloadError(
            f"{path.name} cannot be read as a notebook ({type(error).__name__}: {error}).\n"
            f"Convert it: jupyter nbconvert --to script {path.name}"
        ) from None
    language = content.get("metadata", {}).get("language_info", {}).get("name", "python")
    if language != "python":
        raise WorkloadError(f"{path.name} is a notebook of {language}; trainatomy runs Python")
    left_out: list[str] = []
    return Notebook(
        {number: _python_of(source, left_out) for number, source in enumerate(sources, start=1)}, tuple(left_out)
    )


def source_of(file: Path) -> str:
    """Return the text of a script, or the code of a notebook."""
    if file.suffix == SUFFIX:
        return "\n".join(read_notebook(file).cells.values())
    return file.read_text(encoding="utf-8", errors="replace")


def run_file(file: Path) -> None:
    """Run a script, or the cells of a notebook, as Python and Jupyter do."""
    with mock.patch.object(sys, "path", [str(file.parent), *sys.path]):
        if file.suffix == SUFFIX:
            _run_notebook(file)
        else:
            runpy.run_path(str(file), run_name="__main__")


def _run_notebook(file: Path) -> None:
    """Run the cells of a notebook, in its folder."""
    module, before = ModuleType("__main__"), os.getcwd()  # noqa: PTH109
    module.__dict__.update(display=print, get_ipython=_IPython)
    with mock.patch.dict(sys.modules, {"__main__": module}):
        os.chdir(file.parent)
        try:
            for number, code in read_notebook(file).cells.items():
                name = f"{file} cell {number}"
                linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
                exec(compile(code, name, "exec"), module.__dict__)
        finally:
            os.chdir(before)


class _IPython:
    """A shell that does nothing, for code that asks for one."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _python_of(source: str, left_out: list[str]) -> str:
    """Return a cell's code with as many lines as it has; those for IPython are added to ``left_out``."""
    lines = source.splitlines()
    first = next((at for at, line in enumerate(lines) if line.strip()), 0)
    if lines and lines[first].startswith("%%"):
        left_out.append(lines[first].strip())
        if not lines[first].startswith(_TIMED):
            return "\n" * (len(lines) - 1)
        lines[first] = ""
    for _ in range(len(lines)):  # where Python's grammar fails, and nowhere else: a line may begin with an operator
        try:
            ast.parse("\n".join(lines))
            break
        except SyntaxError as error:
            at = (error.lineno or 0) - 1
            if not 0 <= at < len(lines) or (match := _MAGIC.match(lines[at])) is None:
                break
        left_out.append(lines[at].strip())
        while lines[at].rstrip().endswith("\\") and at + 1 < len(lines):
            lines[at], at = "", at + 1
        lines[at] = match["indent"] + (f"{match['target'].strip()} []" if match["target"] else "pass")
    return "\n".join(lines)
