"""Options that several commands share."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trainatomy.cli.exits import UsageError


def in_run(name: str, help: str, **more: Any) -> Any:
    """Return an option of the panel "Run": how a training is run or predicted."""
    return typer.Option(name, help=help, rich_help_panel="Run", show_default=False, **more)


def in_output(name: str, help: str, **more: Any) -> Any:
    """Return an option of the panel "Output": contents and destination."""
    return typer.Option(name, help=help, rich_help_panel="Output", show_default=False, **more)


def check_option(case: str) -> Any:
    """Return the option ``--check``, which turns ``case`` into an exit code."""
    return in_output("--check", f"Exit with code 8 if {case}.")


def output_file(name: str, help: str, metavar: str) -> Any:
    """Return an option that takes one or several files to write, which are checked before the work begins."""
    return in_output(name, help, metavar=metavar, callback=_writable)


def _writable(parameter: typer.CallbackParam, value: Any) -> Any:
    """Return the files of an option; raise ``UsageError`` if one cannot be written."""
    for file in value if isinstance(value, list) else [] if value is None else [value]:
        check_writable(parameter.opts[0], file)
    return value


def check_writable(option: str, file: Path) -> None:
    """Raise ``UsageError`` if a file cannot be written when the work is done."""
    folder = file.absolute().parent
    if file.is_dir():
        problem = "is a folder; name a file"
    elif not folder.is_dir():
        problem = f"{file.parent} is no folder" if folder.exists() else f"there is no folder {file.parent}"
    elif file.exists():
        problem = "" if os.access(file, os.W_OK) else "the file cannot be written"
    else:
        problem = "" if os.access(folder, os.W_OK | os.X_OK) else f"the folder {file.parent} cannot be written"
    if problem:
        raise UsageError(f"{option} {file}: {problem}")


def plot_option(help: str) -> Any:
    """Return the option ``--plot``."""
    return output_file("--plot", help, "FILE.svg|FILE.png")


def time_limit_option(help: str, *, min: int = 0) -> Any:
    """Return the option ``--time-limit``."""
    return in_run("--time-limit", help, metavar="SECONDS", min=min)


File = Annotated[
    str | None,
    typer.Argument(metavar="WORKLOAD.yaml", help="A file that describes the training.", show_default=False),
]
Debug = Annotated[bool, in_output("--debug", "Show tracebacks and all logs of the libraries.")]
Json = Annotated[bool, in_output("--json", "Print one JSON object and nothing else.")]
Sources = Annotated[bool, in_output("--sources", "Also list the inputs of the prediction and where they come from.")]
TrustRemoteCode = Annotated[bool, in_run("--trust-remote-code", "Run the code that comes with a model on the hub.")]
CalibrationFile = Annotated[
    Path | None,
    in_run(
        "--calibration",
        "Predict times with this file of `trainatomy calibrate` instead of what ships. It must come from the same GPU, "
        "or from one of the same compute capability.",
        metavar="FILE",
    ),
]
Records = Annotated[
    str | None,
    in_output(
        "--records",
        "Folder or URL for records of measured runs (default: TRAINATOMY_RECORDS, or ./trainatomy-records).",
        metavar="PATH",
    ),
]

Price = Annotated[
    list[str] | None,
    in_run(
        "--price",
        "Price of a GPU per hour, such as h100=2.9; repeatable. Adds the cost of training.",
        metavar="GPU=PRICE",
    ),
]
Jobs = Annotated[
    int | None,
    in_run("--jobs", "Processes that predict in parallel (default: one per core, up to 8).", metavar="N", min=1),
]
Executor = Annotated[
    str | None,
    in_run(
        "--executor",
        "Predict on Dask or Ray instead of local processes: started on this machine, or the cluster at an address.",
        metavar="dask|ray|dask://HOST:PORT|tcp://HOST:PORT|ray://HOST:PORT",
    ),
]


def command_line() -> str:
    """Return the command line of this process, for records and hints."""
    return shlex.join(["trainatomy", *sys.argv[1:]])
