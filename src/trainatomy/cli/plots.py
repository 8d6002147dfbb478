"""Where charts are written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from trainatomy.cli.output import note
from trainatomy.errors import MissingLibrary
from trainatomy.results.comparison import Comparison

FORMATS = ("svg", "png", "pdf")
DEFAULT_FORMATS = ("svg", "png")
DEFAULT_NAME = "comparison"


def check_plots(files: Sequence[Path]) -> tuple[Path, ...]:
    """The files, once it is sure that they can be drawn, which is better said before hours of measuring.

    Raises a usage error for an ending that cannot be drawn, ``MissingLibrary`` without matplotlib.
    """
    for file in files:
        if file.suffix.lower().removeprefix(".") not in FORMATS:
            raise typer.BadParameter(f"--plot {file}: the ending must be one of .{', .'.join(FORMATS)}")
        if not file.absolute().parent.is_dir():
            raise typer.BadParameter(f"--plot {file}: there is no folder {file.parent}")
    if files:
        _charts()
    return tuple(files)


def write_plots(comparison: Comparison, files: Sequence[Path]) -> None:
    """Draw into ``files``, each in the format that its ending names."""
    for file in files:
        file.write_bytes(_drawn(comparison, file.suffix.lower().removeprefix(".")))
        note(f"drawn: {file}")


def write_default_plots(comparison: Comparison, folder: str) -> None:
    """Draw beside the records of the comparison: ``FOLDER/GROUP/comparison.svg`` and ``.png``.

    Raises ``MissingLibrary`` without matplotlib, ``TrainatomyError`` where the folder cannot be written.
    """
    from trainatomy.records.place import Place

    place = Place(f"{folder.rstrip('/')}/{comparison.group}", {})
    for ending in DEFAULT_FORMATS:
        note(f"drawn: {place.write(f'{DEFAULT_NAME}.{ending}', _drawn(comparison, ending))}")


def _drawn(comparison: Comparison, ending: str) -> bytes:
    _charts()
    from trainatomy.reporters.charts.comparison import draw

    return draw(comparison, ending)


def _charts() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingLibrary("charts are drawn by matplotlib: pip install 'trainatomy[plot]'") from None
