"""Charts of a comparison or a search, written to files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from trainatomy.cli.output import note
from trainatomy.errors import MissingLibrary
from trainatomy.results.comparison import Comparison
from trainatomy.results.fit import Fit, FitAcross, Shortage
from trainatomy.results.prediction import Prediction

FORMATS = ("svg", "png", "pdf")
DEFAULT_FORMATS = ("svg", "png")
DEFAULT_NAME = "comparison"


def check_plots(files: Sequence[Path]) -> tuple[Path, ...]:
    """Return the files, after checking before hours of measuring that they can be drawn.

    Raises:
        typer.BadParameter: The format is unknown.
        MissingLibrary: matplotlib is not installed.
    """
    for file in files:
        if file.suffix.lower().removeprefix(".") not in FORMATS:
            raise typer.BadParameter(f"--plot {file}: the suffix must be one of .{', .'.join(FORMATS)}")
    if files:
        _require_matplotlib()
    return tuple(files)


def write_plots(comparison: Comparison, files: Sequence[Path]) -> None:
    """Draw a comparison into ``files``, in the format of their suffixes."""
    for file in files:
        file.write_bytes(_render(comparison, file.suffix.lower().removeprefix(".")))
        note(f"chart written to {file}")


def draw_into(file: Path, found: Fit | FitAcross | Shortage) -> None:
    """Draw the outcome of a search into a file, in the format of its suffix."""
    from trainatomy.reporters.charts.fit import draw, draw_gpus

    ending = file.suffix.lower().removeprefix(".")
    if isinstance(found, Shortage):
        note(f"nothing drawn into {file}: --why-oom has no chart")
        return
    file.write_bytes(draw(found, ending) if isinstance(found, Fit) else draw_gpus(found, ending))
    note(f"chart written to {file}")


def draw_lengths(file: Path, prediction: Prediction) -> None:
    """Draw the epochs of samples of different lengths into a file, in the format of its suffix."""
    from trainatomy.reporters.charts.lengths import draw

    if prediction.lengths is None or not prediction.lengths.orders:
        note(f"nothing drawn into {file}: all batches have one length (data.lengths)")
        return
    file.write_bytes(draw(prediction, file.suffix.lower().removeprefix(".")))
    note(f"chart written to {file}")


def write_default_plots(comparison: Comparison, folder: str) -> None:
    """Draw beside the records of a comparison: ``FOLDER/GROUP/comparison.svg`` and ``.png``.

    Raises:
        MissingLibrary: matplotlib is not installed.
        TrainatomyError: The folder cannot be written.
    """
    from trainatomy.records.folder import Folder

    place = Folder(f"{folder.rstrip('/')}/{comparison.group}", {})
    for ending in DEFAULT_FORMATS:
        note(f"chart written to {place.write(f'{DEFAULT_NAME}.{ending}', _render(comparison, ending))}")


def _render(comparison: Comparison, ending: str) -> bytes:
    _require_matplotlib()
    from trainatomy.reporters.charts.comparison import draw

    return draw(comparison, ending)


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingLibrary("charts need matplotlib: pip install 'trainatomy[plot]'", library="matplotlib") from None
