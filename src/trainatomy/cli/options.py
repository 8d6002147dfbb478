"""Options that several commands share.

Values of options that are more than a number or a name.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trainatomy.cli.exits import UsageError
from trainatomy.errors import WorkloadError
from trainatomy.workload.document import suggestion

EVERY_GPU = "all"


def several_gpus(flags: Mapping[str, Any], price: Sequence[str] | None) -> list[str] | None:
    """Return the names in ``--gpu`` if several are asked for (an empty list: all), else ``None``."""
    text = flags.get("gpu")
    listed = [name.strip() for name in str(text).split(",") if name.strip()] if text is not None else []
    if listed == [EVERY_GPU]:
        return []
    if len(listed) > 1:
        return listed
    return (listed or list(prices(price))) if price else None


def prices(texts: Sequence[str] | None) -> dict[str, float]:
    """Return the prices in ``--price``."""
    found: dict[str, float] = {}
    for text in (part for each in texts or () for part in each.split(",")):
        name, _, number = text.partition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError:
            raise typer.BadParameter(f"--price must look like h100=2.9 (a price per hour), found {text!r}") from None
        if found[name.strip()] <= 0:
            raise typer.BadParameter(f"--price {text}: a price must be above 0")
    return found


def share(text: str) -> float:
    """Return ``5%``, ``5 %`` or ``0.05`` as a share.

    Raises:
        WorkloadError: It is none, or not between 0 and 100 %.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%?)\s*", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value < 1:
        raise WorkloadError(f"--headroom {text}: must be a share of the GPU's memory such as 5% or 0.05, below 100%")
    return value


def whole_numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Return the numbers in ``1,7``.

    Raises:
        WorkloadError: One of them is no whole number.
    """
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if wrong := [part for part in parts if not part.isdigit()]:
        raise WorkloadError(f"{option} {text}: {wrong[0]!r} is not a whole number")
    return tuple(map(int, parts))


def names(texts: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names in a repeatable option, each of which may hold several with commas."""
    return tuple(dict.fromkeys(name.strip().replace("_", "-") for text in texts or () for name in text.split(",")))


def keys(texts: Sequence[str] | None) -> tuple[str, ...]:
    """Return the settings in a repeatable option, spelt as in a workload."""
    return tuple(name.replace("-", "_") for name in names(texts))


def refuse_unknown(option: str, given: Sequence[str], known: Collection[str]) -> None:
    """Raise ``WorkloadError`` for a value of an option that is none of those it takes."""
    for value in given:
        if value not in known:
            hint = suggestion(value, known) or f"; known: {', '.join(known)}"
            raise WorkloadError(f"{option}: unknown value {value!r}{hint}")


def refuse_together(given: Mapping[str, bool]) -> None:
    """Raise ``BadParameter`` if more than one of several options is given that exclude each other."""
    both = [name for name, is_given in given.items() if is_given]
    if len(both) > 1:
        raise typer.BadParameter(f"{both[0]} and {both[1]} cannot be combined")


def refuse_others(context: typer.Context, used: Collection[str], where: str) -> None:
    """Raise ``BadParameter`` if an option is given that a mode of the command does not use.

    Args:
        context: The command that runs.
        used: Parameters that the mode uses.
        where: The mode, as the message ends.
    """
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in used and source is not None and source.name == "COMMANDLINE":
            option = parameter.opts[0] if parameter.opts[0].startswith("-") else name.upper()
            raise typer.BadParameter(f"{option} cannot be used {where}")


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
