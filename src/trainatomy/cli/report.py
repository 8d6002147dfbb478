"""``--html``, ``--open``, ``--trace`` and ``--snapshot``: results as files for browsers and other tools.

Charts of a comparison or a search, written to files.
"""

from __future__ import annotations

import tempfile
import webbrowser
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import typer

from trainatomy.cli.options import command_line
from trainatomy.cli.output import note
from trainatomy.errors import MissingLibrary, TrainatomyError
from trainatomy.libraries import version_of
from trainatomy.option import Option
from trainatomy.records.store import Folder
from trainatomy.reporters import charts, html
from trainatomy.reporters.viewers import memory_snapshot, step_trace
from trainatomy.results.comparison import Comparison
from trainatomy.results.fit import Fit, FitAcross, Shortage
from trainatomy.results.prediction import Prediction
from trainatomy.results.trace import Detail

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
    ending = file.suffix.lower().removeprefix(".")
    if isinstance(found, Shortage):
        note(f"nothing drawn into {file}: --why-oom has no chart")
        return
    file.write_bytes(charts.draw_fit(found, ending) if isinstance(found, Fit) else charts.draw_gpus(found, ending))
    note(f"chart written to {file}")


def draw_lengths(file: Path, prediction: Prediction) -> None:
    """Draw the epochs of samples of different lengths into a file, in the format of its suffix."""
    if prediction.lengths is None or not prediction.lengths.orders:
        note(f"nothing drawn into {file}: all batches have one length (data.lengths)")
        return
    file.write_bytes(charts.draw_lengths(prediction, file.suffix.lower().removeprefix(".")))
    note(f"chart written to {file}")


def write_default_plots(comparison: Comparison, folder: str) -> None:
    """Draw beside the records of a comparison: ``FOLDER/GROUP/comparison.svg`` and ``.png``.

    Raises:
        MissingLibrary: matplotlib is not installed.
        TrainatomyError: The folder cannot be written.
    """
    place = Folder(f"{folder.rstrip('/')}/{comparison.group}", {})
    for ending in DEFAULT_FORMATS:
        note(f"chart written to {place.write(f'{DEFAULT_NAME}.{ending}', _render(comparison, ending))}")


def _render(comparison: Comparison, ending: str) -> bytes:
    _require_matplotlib()
    return charts.draw_comparison(comparison, ending)


def _require_matplotlib() -> None:
    if version_of("matplotlib") is None:
        raise MissingLibrary("charts need matplotlib: pip install 'trainatomy[plot]'", library="matplotlib")


_written = partial(Option, panel="Output", writes=True)
TRACE = _written("Write the predicted step as a trace for Perfetto (ui.perfetto.dev).", metavar="FILE.json")
SNAPSHOT = _written(
    "Write every allocation as a memory snapshot of PyTorch (for pytorch.org/memory_viz).", metavar="FILE.pickle"
)
HTML = _written("Write a report to this file: charts and tables, without a network.", metavar="FILE.html")
OPEN = Option("Open the report in the browser; without --html, a temporary file.", name="--open", panel="Output")
_SUFFIXES = (".html", ".htm")


def check_report(file: Path | None, is_opened: bool) -> Path | None:
    """Return the file of the report, None for none; raise ``BadParameter`` if its suffix is not that of HTML."""
    if file is None:
        return Path(tempfile.mkdtemp(prefix="trainatomy-")) / "report.html" if is_opened else None
    if file.suffix.lower() not in _SUFFIXES:
        raise typer.BadParameter(f"--html {file}: the suffix must be .html")
    return file


def write_report(
    file: Path | None,
    value: html.Reported,
    *,
    is_opened: bool,
    detail: Detail | None = None,
    prediction: Prediction | None = None,
) -> None:
    """Write the report of a result into ``file``, unless that is None, and open it if that was asked for.

    Raises:
        TrainatomyError: The file cannot be written.
    """
    if file is None:
        return
    write(file, html.to_html(value, detail=detail, prediction=prediction, command=command_line()).encode(), "report")
    if is_opened and not webbrowser.open(file.absolute().as_uri()):
        note(f"no browser was found; open {file} in one")


def write_exports(prediction: Prediction, detail: Detail, trace: Path | None, snapshot: Path | None) -> None:
    """Write the predicted step in the formats of other tools."""
    if trace is not None:
        write(trace, step_trace(prediction, detail), "trace")
    if snapshot is not None:
        write(snapshot, memory_snapshot(detail), "memory snapshot")


def write(file: Path, content: bytes, what: str) -> None:
    """Write a file and say so.

    Raises:
        TrainatomyError: It cannot be written.
    """
    try:
        file.write_bytes(content)
    except OSError as error:
        raise TrainatomyError(f"{file}: the {what} cannot be written: {error.strerror or error}") from None
    note(f"{what} written to {file}")
