"""Rendering of the concept pages: Markdown templates with ``{{ name }}`` for numbers, tables and command output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from trainatomy.units import exact_bytes, human_bytes, percent

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MIB = 1024**2


def page(name: str, values: Mapping[str, Any]) -> str:
    """Render the template ``name``.

    Raises:
        jinja2.UndefinedError: The template names a value that is missing from ``values``.
    """
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    environment.filters |= {"human": human_bytes, "exact": exact_bytes, "mib": mib}
    mark = f"<!-- Written by `make docs` from docs/concepts/{name} and the data; change those. -->"
    return environment.from_string((HERE / name).read_text("utf-8")).render(mark=mark, **values)


def mib(count: int) -> str:
    """Format bytes as MiB: ``552402944`` -> ``526.8 MiB``."""
    return f"{count / MIB:,.1f} MiB"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """Format a Markdown table whose last ``numbers`` columns are right-aligned."""
    marks = ["---"] * (len(head) - numbers) + ["---:"] * numbers
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, marks, *rows))


def share(part: float, whole: float) -> str:
    """Format a share as a percentage: ``12.5 %``."""
    return percent(part, whole)
