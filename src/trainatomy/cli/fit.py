"""``trainatomy fit``: find the settings that fit a GPU and train fastest."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainatomy.cli.options import (
    CalibrationFile,
    Debug,
    Jobs,
    Json,
    Records,
    TrustRemoteCode,
    in_output,
    in_run,
    one_workload,
    with_workload_options,
)
from trainatomy.cli.output import note, quiet_libraries, show, show_json
from trainatomy.cli.plots import check_plots, draw_into
from trainatomy.cli.predict import MANY_CANDIDATES, File
from trainatomy.cli.progress import ComparisonProgress, SearchProgress
from trainatomy.errors import DoesNotFit, WorkloadError
from trainatomy.reporters.export import workload_yaml
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.fit import fit_page, gpus_fit_page, shortage_page
from trainatomy.runs.options import PredictOptions, RunOptions
from trainatomy.runs.predicting import jobs_for

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainatomy.results.fit import Fit
    from trainatomy.workload.schema import Workload

EVERY_GPU = "all"

EffectiveBatchSize = Annotated[
    int | None,
    in_run(
        "--effective-batch-size",
        "Samples per optimizer step (batch size × accumulation), which stays the same (default: the workload's).",
        metavar="N",
    ),
]
Allow = Annotated[
    list[str] | None,
    in_run(
        "--allow",
        "Let the search change what is trained: precision, optimizer, lora, sequence-length; several with commas.",
        metavar="CHANGE,…",
    ),
]
Keep = Annotated[
    list[str] | None,
    in_run(
        "--keep",
        "Do not vary these settings, such as gradient_checkpointing, attention or allocator; several with commas.",
        metavar="SETTING,…",
    ),
]
Headroom = Annotated[
    str, in_run("--headroom", "Share of the GPU's memory that must stay free (default: 5%).", metavar="PERCENT")
]
Maximize = Annotated[
    str | None,
    in_run(
        "--maximize",
        "Find the largest one that fits instead of the fastest.",
        metavar="batch|sequence-length|model-size",
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
Measure = Annotated[
    int, in_run("--measure", "Run the best N on this machine's GPU, one by one in fresh processes.", metavar="N", min=0)
]
WhyOom = Annotated[
    bool,
    in_run("--why-oom", "Say what holds the memory of this very training, and list the changes that make it fit."),
]
Exhaustive = Annotated[
    bool, in_run("--exhaustive", "Execute every candidate; takes long, and tells whether the search missed one.")
]
Plot = Annotated[
    list[Path] | None,
    in_output(
        "--plot",
        "Write a chart of memory against throughput to this file; repeatable.",
        metavar="FILE.svg|FILE.png",
        dir_okay=False,
    ),
]
Output = Annotated[
    Path | None,
    in_output("--output", "Write the best settings to this workload file.", metavar="FILE.yaml", dir_okay=False),
]
Check = Annotated[bool, in_output("--check", "Exit with code 8 if nothing fits.")]


@with_workload_options
def fit(
    file: File = None,
    effective_batch_size: EffectiveBatchSize = None,
    allow: Allow = None,
    keep: Keep = None,
    headroom: Headroom = "5%",
    maximize: Maximize = None,
    price: Price = None,
    measure: Measure = 0,
    why_oom: WhyOom = False,
    exhaustive: Exhaustive = False,
    jobs: Jobs = None,
    plot: Plot = None,
    output: Output = None,
    records: Records = None,
    check: Check = False,
    calibration: CalibrationFile = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
    **flags: Any,
) -> None:
    """Find the settings that fit a GPU and train fastest, by executing candidates without a GPU.

    The effective batch size, the model, the optimizer and the length of sequences stay as they are: nothing that
    changes what is trained is touched unless `--allow` names it. `--gpu all`, or several names with commas, searches on
    each GPU.
    """
    plots = check_plots(plot or ())
    gpus = _several_gpus(flags, price)
    _refuse_together(
        {
            "--maximize": maximize is not None,
            "--why-oom": why_oom,
            "--measure": measure > 0,
            "several GPUs or --price": gpus is not None,
        }
    )
    if measure and flags.get("gpu") is None:
        flags["gpu"] = _this_gpu()
    workload = one_workload(file, {name: value for name, value in flags.items() if gpus is None or name != "gpu"})
    search = _Search(
        workload,
        {
            "effective_batch_size": effective_batch_size,
            "allow": _names(allow),
            "keep": _keys(keep),
            "headroom": share(headroom),
            "calibration": calibration,
            "trust_remote_code": trust_remote_code,
            "jobs": jobs or jobs_for(MANY_CANDIDATES),
        },
        debug,
    )
    if why_oom:
        found: Any = search.run("why_out_of_memory", leave_out=("allow", "effective_batch_size"))
        page, fits, yaml = shortage_page(found), found.missing_bytes <= 0, None
    elif gpus is not None:
        found = search.run("fit_gpus", gpus=gpus or None, costs_per_hour=_prices(price))
        page, fits, yaml = gpus_fit_page(found), any(option.fit.best for option in found.options), None
    else:
        found = search.run("fit", maximize=maximize or "throughput", exhaustive=exhaustive)
        if measure:
            found = _measure(found, measure, records, search)
        page, fits, yaml = fit_page(found, _command()), found.best is not None, _yaml_of(found)
    _show(found, page, json=json)
    _write(found, plots, output, yaml)
    if found.interrupted:
        raise KeyboardInterrupt
    if check and not fits:
        raise DoesNotFit(f"nothing fits for {workload.display_name}")


class _Search:
    """A search with its progress on stderr."""

    def __init__(self, workload: Workload, options: Mapping[str, Any], debug: bool) -> None:
        self.workload = workload
        self.options = options
        self.debug = debug

    def run(self, verb: str, *, leave_out: Sequence[str] = (), **more: Any) -> Any:
        """Call a function of the library with the options of the command."""
        options = {name: value for name, value in self.options.items() if name not in leave_out}
        if unused := [name for name in leave_out if self.options.get(name)]:
            raise typer.BadParameter(f"--{unused[0].replace('_', '-')} cannot be combined with --why-oom")
        with self.quiet(), SearchProgress(self.workload.display_name) as progress:
            from trainatomy import api

            function: Callable[..., Any] = getattr(api, verb)
            return function(self.workload, progress=progress, **options, **more)

    def quiet(self) -> AbstractContextManager[None]:
        """Return a context in which libraries print to stderr."""
        return quiet_libraries(debug=self.debug)


def _measure(found: Fit, count: int, records: str | None, search: _Search) -> Fit:
    """Run the best candidates on this machine's GPU."""
    if found.best is None:
        return found
    with search.quiet(), ComparisonProgress() as observer:
        from trainatomy import api

        predict_options = PredictOptions(
            trust_remote_code=search.options["trust_remote_code"], calibration=search.options["calibration"]
        )
        run_options = RunOptions(store=records, title="fit", command=shlex.join(_command_line()))
        return api.measure_fit(found, count, predict_options, run_options, progress=observer)


def _this_gpu() -> str:
    from trainatomy.api import this_gpu

    return this_gpu()


def _show(found: Any, page: RenderableType, *, json: bool) -> None:
    if json:
        show_json(to_json(found))
    else:
        show(page)


def _write(found: Any, plots: Sequence[Path], output: Path | None, yaml: str | None) -> None:
    """Write charts, and the best settings as a workload file."""
    for plot in plots:
        draw_into(plot, found)
    if output is not None and yaml is not None:
        output.write_text(yaml, encoding="utf-8")
        note(f"best settings written to {output}")
    elif output is not None:
        note(f"nothing written to {output}: there are no best settings")


def _yaml_of(found: Fit) -> str | None:
    return workload_yaml(found.best) if found.best is not None else None


def _several_gpus(flags: Mapping[str, Any], price: Sequence[str] | None) -> list[str] | None:
    """Return the names in ``--gpu`` if several are asked for (an empty list: all), else ``None``."""
    text = flags.get("gpu")
    names = [name.strip() for name in str(text).split(",") if name.strip()] if text is not None else []
    if names == [EVERY_GPU]:
        return []
    if len(names) > 1:
        return names
    return (names or list(_prices(price))) if price else None


def _prices(texts: Sequence[str] | None) -> dict[str, float]:
    """Return the prices in ``--price``."""
    prices: dict[str, float] = {}
    for text in (part for each in texts or () for part in each.split(",")):
        name, _, number = text.partition("=")
        try:
            prices[name.strip()] = float(number)
        except ValueError:
            raise typer.BadParameter(f"--price must look like h100=2.9 (a price per hour), found {text!r}") from None
        if prices[name.strip()] <= 0:
            raise typer.BadParameter(f"--price {text}: a price must be above 0")
    return prices


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


def _names(texts: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip().replace("_", "-") for text in texts or () for name in text.split(",")))


def _keys(texts: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(name.replace("-", "_") for name in _names(texts))


def _refuse_together(given: Mapping[str, bool]) -> None:
    """Raise ``BadParameter`` if more than one of several modes is asked for."""
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise typer.BadParameter(f"{names[0]} and {names[1]} cannot be combined")


def _command_line() -> list[str]:
    return ["trainatomy", *sys.argv[1:]]


def _command() -> str:
    """Return the command line, for the hint how to measure ties."""
    return shlex.join(_command_line())
