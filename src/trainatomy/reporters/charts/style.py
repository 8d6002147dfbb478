"""One look for all charts: colours by component, fonts, and how a figure becomes the bytes of a file."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER, ALARM = "#1f2933", "#66707d", "#e4e7eb", "#ffffff", "#c0392b"
THROUGHPUT = "#3d6fa5"

COLOURS = {
    "weights": "#2f5d8c",
    "optimizer_states": "#7c5aa6",
    "gradients": "#3aa6a0",
    "activations": "#6cae5c",
    "temporary": "#e9b44c",
    "functionality": "#d9775f",
    "cache": "#c3cad3",
    "context": "#8d97a5",
}
"""By the names of ``Components``: what belongs to the model in full colours, what the allocator and the driver keep
besides in greys."""

_SETTINGS: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "hatch.linewidth": 0.8,
    "svg.hashsalt": "trainatomy",  # the same value gives the same file
}
PIXELS_PER_INCH = 160


@contextmanager
def drawing() -> Iterator[None]:
    """While this is entered, figures look as ours do, whatever the user's own settings of matplotlib."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def as_bytes(figure: Figure, ending: str) -> bytes:
    """The figure as a file of that kind (svg, png, pdf), without the time at which it was drawn."""
    paper = io.BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(ending)
    figure.savefig(paper, format=ending, dpi=PIXELS_PER_INCH, metadata=metadata)
    return paper.getvalue()
