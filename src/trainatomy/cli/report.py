"""``--html``, ``--open``, ``--trace`` and ``--snapshot``: results as files for browsers and other tools."""

from __future__ import annotations

import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainatomy.cli.options import command_line, in_output, output_file
from trainatomy.cli.output import note
from trainatomy.errors import TrainatomyError

if TYPE_CHECKING:
    from trainatomy.reporters.html import Reported
    from trainatomy.results.detail import Detail
    from trainatomy.results.prediction import Prediction

Trace = Annotated[
    Path | None,
    output_file("--trace", "Write the predicted step as a trace for Perfetto (ui.perfetto.dev).", "FILE.json"),
]
Snapshot = Annotated[
    Path | None,
    output_file(
        "--snapshot",
        "Write every allocation as a memory snapshot of PyTorch (for pytorch.org/memory_viz).",
        "FILE.pickle",
    ),
]
_SUFFIXES = (".html", ".htm")

Html = Annotated[
    Path | None,
    output_file("--html", "Write a report to this file: charts and tables, without a network.", "FILE.html"),
]
Open = Annotated[bool, in_output("--open", "Open the report in the browser; without --html, a temporary file.")]


def check_report(html: Path | None, is_opened: bool) -> Path | None:
    """Return the file of the report, None for none; raise ``BadParameter`` if its suffix is not that of HTML."""
    if html is None:
        return Path(tempfile.mkdtemp(prefix="trainatomy-")) / "report.html" if is_opened else None
    if html.suffix.lower() not in _SUFFIXES:
        raise typer.BadParameter(f"--html {html}: the suffix must be .html")
    return html


def write_report(
    file: Path | None,
    value: Reported,
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
    from trainatomy.reporters.html import to_html

    write(file, to_html(value, detail=detail, prediction=prediction, command=command_line()).encode(), "report")
    if is_opened and not webbrowser.open(file.absolute().as_uri()):
        note(f"no browser was found; open {file} in one")


def write_exports(prediction: Prediction, detail: Detail, trace: Path | None, snapshot: Path | None) -> None:
    """Write the predicted step in the formats of other tools."""
    if trace is not None:
        from trainatomy.reporters.step_trace import step_trace

        write(trace, step_trace(prediction, detail), "trace")
    if snapshot is not None:
        from trainatomy.reporters.memory_snapshot import memory_snapshot

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
