"""The look of all charts, and the conversion of a figure to a file.  Colours are in ``reporters.labels``."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from trainatomy.reporters.labels import GRID, INK, MUTED, PAPER

_SETTINGS: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a name is no formula
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
    "svg.hashsalt": "trainatomy",  # equal values give equal files
}
PIXELS_PER_INCH = 160


@contextmanager
def drawing() -> Iterator[None]:
    """Apply our settings within the context, whatever the user's settings of matplotlib are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def as_bytes(figure: Figure, ending: str) -> bytes:
    """Return the figure as a file of the format ``ending`` (svg, png, pdf), without a creation date."""
    paper = io.BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(ending)
    figure.savefig(paper, format=ending, dpi=PIXELS_PER_INCH, metadata=metadata)
    return paper.getvalue()
