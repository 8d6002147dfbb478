"""``trainatomy fit``: find the settings that fit a GPU and train fastest.

``trainatomy fit --script``: search over the flags of the user's own script.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from rich.console import RenderableType

from trainatomy import api
from trainatomy.catalog.gpus import find_gpu
from trainatomy.cli.exits import stop_after
from trainatomy.cli.options import (
    DEBUG,
    FILE,
    JSON,
    PRICE,
    command_line,
    refuse_others,
    refuse_together,
    several_gpus,
)
from trainatomy.cli.output import note, progress, quiet_libraries, show, show_json, show_result
from trainatomy.cli.progress import ComparisonProgress, SearchProgress
from trainatomy.cli.report import HTML, OPEN, check_plots, check_report, draw_into, write_report
from trainatomy.cli.run import DEFAULT_GPU
from trainatomy.cli.unused_imports import skip_unused_imports
from trainatomy.cli.workloads import one_workload, workload_command
from trainatomy.errors import DoesNotFit, TrainatomyError
from trainatomy.measurement.measure import task_of
from trainatomy.measurement.process.job import Job as MeasuringJob
from trainatomy.measurement.process.pool import Processes
from trainatomy.option import in_output, option, output_file
from trainatomy.reporters.export import workload_yaml
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.fit import fit_page, shortage_page
from trainatomy.reporters.text.gpus import gpus_fit_page
from trainatomy.reporters.text.script import script_fit_page
from trainatomy.requests.comparing import CompareRequest
from trainatomy.requests.fitting import GOALS, MANY_CANDIDATES, PERMISSIONS, FitRequest, Wanted
from trainatomy.requests.measuring import RECORDS
from trainatomy.requests.predicting import Training
from trainatomy.results.fit import Fit, FitAcross, ScriptFit, Shortage
from trainatomy.runs.pools import start_importing
from trainatomy.scripts import launch
from trainatomy.scripts.command import Command, check_gpu, read_command
from trainatomy.scripts.fitting import largest_flag, read_flags, search_flags
from trainatomy.scripts.job import Job, Outcome
from trainatomy.search.axes import AXES
from trainatomy.workload.dialects.answer import answer_in, rewritten
from trainatomy.workload.dialects.translation import Origin
from trainatomy.workload.document import refuse_unknown
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    Found = Fit | FitAcross | Shortage


SCHEMA = "trainatomy/script-fit/1"
MANY_PROCESSORS = 8
"""Processors from which on the processes that measure import the libraries while the search goes on."""


def fit_script(script: str, request: FitCommand) -> None:
    """Run a script with each combination of the values of its flags, and show which fit."""
    gpu = request.flags.get("gpu")
    if several_gpus(gpu) is not None:
        raise typer.BadParameter(f"--gpu {gpu}: the flags of a script are searched for one GPU")
    command, is_maximized = read_command(shlex.split(script)), request.maximize != "throughput"
    refuse_together({"--flag": bool(request.flag), "--maximize": is_maximized})
    wanted = () if is_maximized else read_flags(request.flag)
    if gpu is None:
        check_gpu(command, DEFAULT_GPU, "trainatomy fit --gpu {gpu} --script '{script}'")
    card = find_gpu(gpu or DEFAULT_GPU)

    def run(one: Command) -> Outcome:
        return launch.run_script(Job(one, (card.id,)))[0]

    with progress(f"running {command.name} without a GPU") as tell:
        if is_maximized:
            found = largest_flag(command, Wanted.of(request.maximize), card.id, run, tell)
        else:
            found = search_flags(command, wanted, card.id, run, tell)
    show_result(script_fit_to_json, script_fit_page, found, json=request.json)
    if found.candidates and len(found.failed) == len(found.candidates):
        error = TrainatomyError(found.failed[0].message)
        error.exit_code = found.failed[0].exit_code
        raise error
    if request.check and found.best is None:
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
    said = {"maximized": found.maximized} if found.maximized else {}
    return {"schema": SCHEMA, "name": found.name, "gpu": found.gpu, "best": best, **said, "candidates": candidates}


_EXCLUSIVE = (
    ("--maximize", "--why-oom", "--measure", "several GPUs or --price"),
    ("--maximize", "--why-oom", "--exhaustive"),
    ("--maximize", "--why-oom", "several GPUs or --price", "--try-compile"),
    ("--why-oom", "--allow"),
    ("--why-oom", "--effective-batch-size"),
)
"""Options of which only one can be given."""
_VARIED = ("peft", "bitsandbytes")
"""Libraries of settings that a search tries, if only for the price list."""
_WITH_SCRIPT = frozenset({"script", "flag", "maximize", "gpu", "json", "check", "debug"})
"""Parameters that a search over the flags of a script uses."""


@dataclass(frozen=True, slots=True)
class FitCommand(FitRequest):
    """A search that is shown."""

    FIRST = (
        *("script", "flag", "effective_batch_size", "allow", "keep", "headroom", "maximize", "price", "measure"),
        *("time_limit", "why_oom", "try_compile", "exhaustive"),
    )

    file: str | None = option(None, FILE)
    script: str | None = option(
        None, "Search over the flags of this script instead of a workload's settings.", metavar="COMMAND"
    )
    flag: tuple[str, ...] = option(
        (),
        "With --script: a flag of the script with the values to try; `…` continues the series (repeatable).",
        metavar="NAME=1,2,4,…",
    )
    price: Mapping[str, float] = option({}, PRICE)
    time_limit: int | None = option(
        None, "Stop after this many seconds and show the best so far (exit code 124).", metavar="SECONDS", min=1
    )
    why_oom: bool = option(
        False, "Show what holds the memory of this training as it is, and list the changes that would make it fit."
    )
    plot: tuple[Path, ...] = output_file(
        (), "Write a chart of memory against throughput to this file; repeatable.", metavar="FILE.svg|FILE.png"
    )
    html: Path | None = option(None, HTML)
    open_report: bool = option(False, OPEN)
    output: Path | None = output_file(
        None, "Write the best settings to this file, as the training was given.", metavar="FILE.yaml"
    )
    records: str | None = option(None, RECORDS)
    check: bool = in_output(False, "Exit with code 8 if nothing fits.")
    json: bool = option(False, JSON)
    debug: bool = option(False, DEBUG)
    flags: Mapping[str, Any] = field(default_factory=dict)
    context: typer.Context | None = None


class _Outputs(NamedTuple):
    """Destinations of a search's outcome: charts, a report that may be opened, a workload file, and JSON or text."""

    plots: tuple[Path, ...]
    page: Path | None
    is_opened: bool
    workload_file: Path | None
    json: bool

    def write(self, found: Found, origin: Origin | None) -> None:
        """Write the files, and print the outcome; settings in the configuration that the workload was read from."""
        write_report(self.page, found, is_opened=self.is_opened)
        if self.json:
            show_json(to_json(found))
        else:
            show(_page(found, origin))
        for plot in self.plots:
            draw_into(plot, found)
        if self.workload_file is None:
            return
        if isinstance(found, Fit) and found.best is not None:
            text = workload_yaml(found.best)
            if origin is not None:
                text = rewritten(origin, answer_in(origin, found.workload, found.best.workload))
            self.workload_file.write_text(text, encoding="utf-8")
            note(f"best settings written to {self.workload_file}")
        else:
            note(f"nothing written to {self.workload_file}: there are no best settings")


@workload_command
def fit(request: FitCommand) -> None:
    """Find the settings that fit a GPU and train fastest, by executing candidates without a GPU.

    The effective batch size, the model, the optimizer and the length of sequences stay as they are: nothing that
    changes what is trained is touched unless `--allow` names it. `--gpu all`, or several names with commas, searches on
    each GPU.
    """
    if request.script is not None:
        if request.context is not None:
            refuse_others(request.context, _WITH_SCRIPT, "with --script, which varies the script's own flags")
        fit_script(request.script, request)
        return
    if request.flag:
        raise typer.BadParameter("--flag names a flag of a script, which --script gives")
    if request.maximize != "throughput" and "." not in request.maximize:
        refuse_unknown("--maximize", [request.maximize], (*GOALS, "a key such as data.image_size"))
    if request.time_limit is not None:
        stop_after(request.time_limit)
    page = check_report(request.html, request.open_report)
    outputs = _Outputs(check_plots(request.plot), page, request.open_report, request.output, request.json)
    flags = dict(request.flags)
    gpus = several_gpus(flags.get("gpu"), request.price)
    _refuse_contradictions(request, is_across=gpus is not None)
    if gpus is not None:
        flags.pop("gpu", None)
    elif request.measure and "gpu" not in flags:
        flags["gpu"] = api.this_gpu()
    refuse_unknown("--allow", request.allow, PERMISSIONS)
    refuse_unknown("--keep", request.keep, AXES)
    workload = one_workload(request.file, flags)
    with Processes() as processes:
        if request.measure and (os.cpu_count() or 1) >= MANY_PROCESSORS:
            processes.expect(task_of(MeasuringJob(workload.to_mapping())))
        found = _search(workload, request, gpus)
        interrupted = found.interrupted
        if request.measure and isinstance(found, Fit) and not interrupted:
            found, interrupted = _measure(found, request, processes)
    outputs.write(found, workload.origin)
    if interrupted:
        raise KeyboardInterrupt
    if request.check and not _fits(found):
        raise DoesNotFit(f"nothing fits for {workload.display_name}")


def _refuse_contradictions(request: FitCommand, *, is_across: bool) -> None:
    """Raise ``BadParameter`` for two modes of a search, and for an option that a mode would ignore."""
    given = {
        "--maximize": request.maximize != "throughput",
        "--why-oom": request.why_oom,
        "--measure": request.measure > 0,
        "several GPUs or --price": is_across,
        "--exhaustive": request.exhaustive,
        "--try-compile": request.try_compile,
        "--allow": bool(request.allow),
        "--effective-batch-size": request.effective_batch_size is not None,
    }
    for group in _EXCLUSIVE:
        refuse_together({name: given[name] for name in group})


def _search(workload: Workload, request: FitCommand, gpus: Sequence[str] | None) -> Found:
    """Search for what the options ask for."""
    count = request.jobs if request.jobs or request.executor else api.jobs_for(MANY_CANDIDATES)
    request = replace(request, jobs=count)
    with quiet_libraries(debug=request.debug), SearchProgress(workload.display_name) as observer:
        if request.executor is None:
            trust = request.trust_remote_code
            hidden = skip_unused_imports([workload], trust_remote_code=trust, also_needed=_VARIED)
            start_importing(count, hidden, deepspeed=workload.train.deepspeed is not None)
        if request.why_oom:
            return api.why_out_of_memory(workload, request=request, progress=observer)
        if gpus is not None:
            costs = request.price
            return api.fit_gpus(workload, gpus or None, costs_per_hour=costs, request=request, progress=observer)
        return api.search_settings(Training(workload), request, observer)


def _measure(found: Fit, request: FitCommand, processes: Processes) -> tuple[Fit, bool]:
    """Run the best candidates on this machine's GPU; also return whether Ctrl-C or the time limit ended that."""
    if found.best is None:
        return found, False
    runs = CompareRequest(
        store=request.records,
        title="fit",
        command=command_line(),
        calibration=request.calibration,
        trust_remote_code=request.trust_remote_code,
    )
    with quiet_libraries(debug=request.debug), ComparisonProgress() as observer:
        try:
            return api.measure_fit(found, request.measure, runs, observer, processes), False
        except api.ComparisonInterrupted as interrupt:
            return replace(found, measured=interrupt.comparison), True
        except KeyboardInterrupt:
            return found, True


def _page(found: Found, origin: Origin | None) -> RenderableType:
    if isinstance(found, Fit):
        return fit_page(found, command_line(), origin)
    return gpus_fit_page(found) if isinstance(found, FitAcross) else shortage_page(found, origin)


def _fits(found: Found) -> bool:
    if isinstance(found, Fit):
        return found.best is not None
    if isinstance(found, FitAcross):
        return any(option.fit.best for option in found.options)
    return found.missing_bytes <= 0
