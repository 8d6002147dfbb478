"""``trainatomy fit``: find the settings that fit a GPU and train fastest.

``trainatomy fit --script``: search over the flags of the user's own script.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer

from trainatomy.catalog.calibrations import resolve_calibration
from trainatomy.catalog.gpus import find_gpu
from trainatomy.cli.exits import stop_after
from trainatomy.cli.options import (
    CalibrationFile,
    Debug,
    Executor,
    File,
    Jobs,
    Json,
    Price,
    Records,
    TrustRemoteCode,
    check_option,
    command_line,
    in_run,
    keys,
    names,
    output_file,
    plot_option,
    prices,
    refuse_others,
    refuse_together,
    refuse_unknown,
    several_gpus,
    share,
    time_limit_option,
)
from trainatomy.cli.output import note, progress, quiet_libraries, show, show_json
from trainatomy.cli.predict import MANY_CANDIDATES
from trainatomy.cli.progress import ComparisonProgress, SearchProgress
from trainatomy.cli.report import Html, Open, check_plots, check_report, draw_into, write_report
from trainatomy.cli.run import DEFAULT_GPU
from trainatomy.cli.unused_imports import skip_unused_imports
from trainatomy.cli.workloads import one_workload, with_workload_options
from trainatomy.errors import DoesNotFit, TrainatomyError
from trainatomy.measurement.measure import task_of
from trainatomy.measurement.process.job import Job as MeasuringJob
from trainatomy.measurement.process.pool import Processes
from trainatomy.reporters.export import workload_yaml
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.fit import fit_page, shortage_page
from trainatomy.reporters.text.gpus import gpus_fit_page
from trainatomy.reporters.text.script import script_fit_page
from trainatomy.results.fit import Fit, FitAcross, Goal, Permission, ScriptFit, Shortage
from trainatomy.runs.options import PredictOptions, RunOptions
from trainatomy.runs.pools import start_importing
from trainatomy.runs.predicting import jobs_for
from trainatomy.scripts.command import Command, check_gpu, read_command
from trainatomy.scripts.fitting import read_flags, search_flags
from trainatomy.scripts.job import Job, Outcome
from trainatomy.search.axes import AXES, PERMISSIONS
from trainatomy.search.maximize import GOALS
from trainatomy.search.options import SearchOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainatomy.api import SearchRequest

    Found = Fit | FitAcross | Shortage


SCHEMA = "trainatomy/script-fit/1"
MANY_PROCESSORS = 8
"""Processors from which on the processes that measure import the libraries while the search goes on."""


def fit_script(script: str, flags: Sequence[str], gpu: str | None, *, json: bool, check: bool) -> None:
    """Run a script with each combination of the values of its flags, and show which fit."""
    if several_gpus({"gpu": gpu}, None) is not None:
        raise typer.BadParameter(f"--gpu {gpu}: the flags of a script are searched for one GPU")
    from trainatomy.scripts.launch import run_script

    command, wanted = read_command(shlex.split(script)), read_flags(flags)
    if gpu is None:
        check_gpu(command, DEFAULT_GPU, "trainatomy fit --gpu {gpu} --script '{script}'")
    card = find_gpu(gpu or DEFAULT_GPU)

    def run(one: Command) -> Outcome:
        return run_script(Job(one, (card.id,)))[0]

    with progress(f"running {command.name} without a GPU") as tell:
        found = search_flags(command, wanted, card.id, run, tell)
    if json:
        show_json(script_fit_to_json(found))
    else:
        show(script_fit_page(found))
    if found.candidates and len(found.failed) == len(found.candidates):
        error = TrainatomyError(found.failed[0].message)
        error.exit_code = found.failed[0].exit_code
        raise error
    if check and found.best is None:
        raise DoesNotFit(f"nothing fits for {command.name}")


def script_fit_to_json(found: ScriptFit) -> dict[str, Any]:
    """Return a search over flags as JSON."""
    candidates = [
        {
            "flags": dict(each.flags),
            "command": list(each.command),
            "message": each.message,
            "failed": each.failed,
            "prediction": each.prediction and to_json(each.prediction),
        }
        for each in found.candidates
    ]
    best = None if found.best is None else found.candidates.index(found.best)
    return {"schema": SCHEMA, "name": found.name, "gpu": found.gpu, "best": best, "candidates": candidates}


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
        f"Let the search change what is trained, or how it is evaluated: {', '.join(PERMISSIONS)}; several with "
        "commas.",
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
Measure = Annotated[
    int, in_run("--measure", "Run the best N on this machine's GPU, one by one in fresh processes.", metavar="N", min=0)
]
TimeLimit = Annotated[
    int | None,
    time_limit_option("Stop after this many seconds and show the best so far (exit code 124).", min=1),
]
WhyOom = Annotated[
    bool,
    in_run(
        "--why-oom",
        "Show what holds the memory of this training as it is, and list the changes that would make it fit.",
    ),
]
Exhaustive = Annotated[
    bool, in_run("--exhaustive", "Execute every candidate, which takes long and shows whether the search missed one.")
]
Plot = Annotated[
    list[Path] | None,
    plot_option("Write a chart of memory against throughput to this file; repeatable."),
]
Output = Annotated[
    Path | None,
    output_file("--output", "Write the best settings to this workload file.", "FILE.yaml"),
]
Check = Annotated[bool, check_option("nothing fits")]

_EXCLUSIVE = (
    ("--maximize", "--why-oom", "--measure", "several GPUs or --price"),
    ("--maximize", "--why-oom", "--exhaustive"),
    ("--why-oom", "--allow"),
    ("--why-oom", "--effective-batch-size"),
)
"""Options of which only one can be given."""
_VARIED = ("peft", "bitsandbytes")
"""Libraries of settings that a search tries, if only for the price list."""
_WITH_SCRIPT = frozenset({"script", "flag", "gpu", "json", "check", "debug"})
"""Parameters that a search over the flags of a script uses."""


Script = Annotated[
    str | None,
    in_run("--script", "Search over the flags of this script instead of a workload's settings.", metavar="COMMAND"),
]
ScriptFlags = Annotated[
    list[str] | None,
    in_run(
        "--flag",
        "With --script: a flag of the script with the values to try; `…` continues the series (repeatable).",
        metavar="NAME=1,2,4,…",
    ),
]


class _Outputs(NamedTuple):
    """Destinations of a search's outcome: charts, a report that may be opened, a workload file, and JSON or text."""

    plots: tuple[Path, ...]
    page: Path | None
    is_opened: bool
    workload_file: Path | None
    json: bool

    def write(self, found: Found) -> None:
        """Write the files, and print the outcome."""
        write_report(self.page, found, is_opened=self.is_opened)
        if self.json:
            show_json(to_json(found))
        else:
            show(_page(found))
        for plot in self.plots:
            draw_into(plot, found)
        if self.workload_file is None:
            return
        if isinstance(found, Fit) and found.best is not None:
            self.workload_file.write_text(workload_yaml(found.best), encoding="utf-8")
            note(f"best settings written to {self.workload_file}")
        else:
            note(f"nothing written to {self.workload_file}: there are no best settings")


@with_workload_options
def fit(
    context: typer.Context,
    file: File = None,
    script: Script = None,
    flag: ScriptFlags = None,
    effective_batch_size: EffectiveBatchSize = None,
    allow: Allow = None,
    keep: Keep = None,
    headroom: Headroom = "5%",
    maximize: Maximize = None,
    price: Price = None,
    measure: Measure = 0,
    time_limit: TimeLimit = None,
    why_oom: WhyOom = False,
    exhaustive: Exhaustive = False,
    jobs: Jobs = None,
    executor: Executor = None,
    plot: Plot = None,
    html: Html = None,
    open_report: Open = False,
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
    if script is not None:
        refuse_others(context, _WITH_SCRIPT, "with --script, which varies the script's own flags")
        fit_script(script, flag or (), flags.get("gpu"), json=json, check=check)
        return
    if flag:
        raise typer.BadParameter("--flag names a flag of a script, which --script gives")
    if time_limit is not None:
        stop_after(time_limit)
    outputs = _Outputs(check_plots(plot or ()), check_report(html, open_report), open_report, output, json)
    gpus = several_gpus(flags, price)
    _refuse_contradictions(
        {
            "--maximize": maximize is not None,
            "--why-oom": why_oom,
            "--measure": measure > 0,
            "several GPUs or --price": gpus is not None,
            "--exhaustive": exhaustive,
            "--allow": bool(allow),
            "--effective-batch-size": effective_batch_size is not None,
        }
    )
    if gpus is not None:
        flags.pop("gpu", None)
    elif measure and "gpu" not in flags:
        flags["gpu"] = _this_gpu()
    refuse_unknown("--allow", names(allow), PERMISSIONS)
    refuse_unknown("--keep", keys(keep), AXES)
    refuse_unknown("--maximize", names([maximize] if maximize else None), GOALS)
    workload = one_workload(file, flags)
    allowed = cast("tuple[Permission, ...]", names(allow))
    options = SearchOptions(effective_batch_size, share(headroom), allowed, keys(keep), exhaustive)
    predict_options = PredictOptions(trust_remote_code=trust_remote_code, calibration=resolve_calibration(calibration))
    count = jobs if jobs or executor else jobs_for(MANY_CANDIDATES)
    with Processes() as processes:
        if measure and (os.cpu_count() or 1) >= MANY_PROCESSORS:
            processes.expect(task_of(MeasuringJob(workload.to_mapping())))
        with quiet_libraries(debug=debug), SearchProgress(workload.display_name) as progress:
            if executor is None:
                unused = skip_unused_imports([workload], trust_remote_code=trust_remote_code, also_needed=_VARIED)
                start_importing(count, unused)
            from trainatomy import api

            request = api.SearchRequest(
                workload, options, predict_options, jobs=count, observer=progress, executor=executor
            )
            found = _search(request, maximize, gpus, prices(price), why_oom=why_oom)
        interrupted = found.interrupted
        if measure and isinstance(found, Fit) and not interrupted:
            found, interrupted = _measure(found, measure, records, predict_options, processes, debug=debug)
    outputs.write(found)
    if interrupted:
        raise KeyboardInterrupt
    if check and not _fits(found):
        raise DoesNotFit(f"nothing fits for {workload.display_name}")


def _refuse_contradictions(given: Mapping[str, bool]) -> None:
    """Raise ``BadParameter`` for two modes of a search, and for an option that a mode would ignore."""
    for group in _EXCLUSIVE:
        refuse_together({name: given[name] for name in group})


def _search(
    request: SearchRequest,
    goal: str | None,
    gpus: Sequence[str] | None,
    costs_per_hour: Mapping[str, float],
    *,
    why_oom: bool,
) -> Found:
    """Search for what the options ask for."""
    from trainatomy import api

    if why_oom:
        return api.search_remedies(request)
    if gpus is not None:
        return api.search_gpus(request, gpus or None, costs_per_hour)
    return api.search_settings(request, cast("Goal", goal or "throughput"))


def _measure(
    found: Fit,
    count: int,
    records: str | None,
    predict_options: PredictOptions,
    processes: Processes,
    *,
    debug: bool,
) -> tuple[Fit, bool]:
    """Run the best candidates on this machine's GPU; also return whether Ctrl-C or the time limit ended that."""
    from trainatomy.runs.comparison import ComparisonInterrupted

    if found.best is None:
        return found, False
    with quiet_libraries(debug=debug), ComparisonProgress() as observer:
        from trainatomy import api

        run_options = RunOptions(store=records, title="fit", command=command_line())
        try:
            return api.measure_fit(
                found, count, predict_options, run_options, progress=observer, processes=processes
            ), False
        except ComparisonInterrupted as interrupt:
            return replace(found, measured=interrupt.comparison), True
        except KeyboardInterrupt:
            return found, True


def _this_gpu() -> str:
    from trainatomy.api import this_gpu

    return this_gpu()


def _page(found: Found) -> RenderableType:
    if isinstance(found, Fit):
        return fit_page(found, command_line())
    return gpus_fit_page(found) if isinstance(found, FitAcross) else shortage_page(found)


def _fits(found: Found) -> bool:
    if isinstance(found, Fit):
        return found.best is not None
    if isinstance(found, FitAcross):
        return any(option.fit.best for option in found.options)
    return found.missing_bytes <= 0
