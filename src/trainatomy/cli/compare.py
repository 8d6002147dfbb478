"""``trainatomy compare``: compare several training runs, predicted or measured."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import typer

from trainatomy import api
from trainatomy.cli.options import DEBUG, JSON, PRICE, command_line, refuse_together, several_gpus
from trainatomy.cli.output import note, progress, quiet_libraries, show_result
from trainatomy.cli.progress import ComparisonProgress
from trainatomy.cli.report import (
    HTML,
    OPEN,
    check_plots,
    check_report,
    write_default_plots,
    write_plots,
    write_report,
)
from trainatomy.cli.unused_imports import skip_unused_imports
from trainatomy.cli.workloads import note_many_steps, samples_of, several_workloads, workload_command
from trainatomy.errors import MissingLibrary
from trainatomy.option import option, output_file
from trainatomy.records.store import store_of
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.comparison import comparison_page
from trainatomy.requests.comparing import CompareRequest
from trainatomy.results.comparison import Comparison
from trainatomy.runs.pools import hidden_in_workers
from trainatomy.units import many
from trainatomy.workload.schema import Workload
from trainatomy.workload.sweep import sweep as sweep_workloads
from trainatomy.workload.sweep import with_effective_batch_size

MANY_GPUS = 16
"""More training runs than a process should predict alone, where the number of GPUs is not counted yet."""


@dataclass(frozen=True, slots=True)
class CompareCommand(CompareRequest):
    """A comparison that is shown."""

    FIRST = ("measure", "repeat", "sweep", "plot", "html", "open_report")

    files: tuple[str, ...] = option(
        (),
        "Workload files (several rows each), or a built-in comparison. Without one, options name the model.",
        name="",
        metavar="[notebook | notebook-fp16 | parallel | WORKLOAD.yaml…]",
    )
    sweep: tuple[str, ...] = option(
        (), "Vary a setting: one row for each value. Several sweeps are combined.", metavar="KEY=V1,V2…"
    )
    plot: tuple[Path, ...] = output_file(
        (),
        "Write a chart to this file; repeatable. With --measure, charts are also written beside the records.",
        metavar="FILE.svg|FILE.png",
    )
    html: Path | None = option(None, HTML)
    open_report: bool = option(False, OPEN)
    json: bool = option(False, JSON)
    price: Mapping[str, float] = option({}, PRICE)
    debug: bool = option(False, DEBUG)
    flags: Mapping[str, Any] = field(default_factory=dict)


class Charts(NamedTuple):
    """The files that show a comparison: charts, and a report that may be opened."""

    plots: tuple[Path, ...]
    page: Path | None
    is_opened: bool

    def write(self, comparison: Comparison) -> None:
        """Write all of them."""
        write_report(self.page, comparison, is_opened=self.is_opened)
        write_plots(comparison, self.plots)


@workload_command
def compare(request: CompareCommand) -> None:
    """Predict several training runs and show them side by side, with the difference to the first.

    With `--measure`, run them too. Options apply to all of them.

    Training runs on several GPUs (`--sweep gpus=1,2,4,8`, `--sweep strategy=ddp,fsdp2`) are compared by their total
    throughput and by how it scales; `--effective-batch-size` keeps the samples of an optimizer step constant.

    `--gpu all`, or several names with commas, compares one training as it is on GPUs of several kinds: memory, time
    and, with `--price`, cost. `trainatomy fit --gpu all` also searches the best settings for each.

    `notebook` stands for the nine training runs of BERT-large in Hugging Face's guide of January 2022: with the
    libraries and the GPU of that time, beside the published figures, or with today's libraries on the GPU that `--gpu`
    names.
    `notebook-fp16` is the guide's second table: fp16 against fp32 at batch sizes 8 to 64 on BERT-base.

    `parallel` is the guide's experiment on two GPUs: DataParallel, DDP, and DDP through host memory instead of NVLink.

    With `--measure` every run is recorded when it ends; an interrupted comparison continues where it stopped.
    """
    files, flags = request.files, dict(request.flags)
    page = check_report(request.html, request.open_report)
    charts = Charts(check_plots(request.plot), page, request.open_report)
    gpus = several_gpus(flags.get("gpu"), request.price)
    if gpus is not None:
        flags.pop("gpu", None)
        refuse_together({"several GPUs or --price": True, "--measure": request.measure, "--sweep": bool(request.sweep)})
    workloads = _rows(
        several_workloads(files, flags, today=request.measure), request.sweep, request.effective_batch_size
    )
    count = len(workloads) if gpus is None else MANY_GPUS
    request = replace(
        request,
        jobs=request.jobs if request.executor else api.jobs_for(count, request.jobs),
        keep_gpus=flags.get("gpu") is not None or any(each.startswith("gpu=") for each in request.sweep),
        title="-".join(dict.fromkeys(PurePath(file).stem for file in files)) or workloads[0].display_name,
        samples=samples_of(files),
        command=command_line(),
        layouts=True if request.json or page is not None or request.keep is not None else "scarce",
    )
    if request.measure and gpus is None:
        _measure(workloads, request, charts)
        return
    _refuse_run_options(request)
    if gpus is not None:
        _across_gpus(workloads, gpus, request, charts)
    else:
        _predict(workloads, request, charts)


def _rows(workloads: Sequence[Workload], sweeps: Sequence[str], effective_batch_size: int | None) -> Sequence[Workload]:
    """Return the training runs to compare: every value of every sweep, with one effective batch size if it is given."""
    rows = sweep_workloads(workloads, sweeps)
    if effective_batch_size is not None:
        rows = with_effective_batch_size(rows, effective_batch_size)
    note_many_steps(rows)
    return rows


def _predict(workloads: Sequence[Workload], request: CompareCommand, charts: Charts) -> None:
    """Predict and show a comparison."""
    hidden = skip_unused_imports(workloads, trust_remote_code=request.trust_remote_code)
    doing = f"simulating {many(len(workloads), 'training run')}"
    with quiet_libraries(debug=request.debug), progress(doing), hidden_in_workers(hidden):
        comparison = api.predict_comparison(workloads, request)
    _show(comparison, json=request.json)
    _note_falling_memory(comparison)
    charts.write(comparison)


def _across_gpus(workloads: Sequence[Workload], gpus: Sequence[str], request: CompareCommand, charts: Charts) -> None:
    """Show one training on GPUs of several kinds; an empty list stands for all."""
    if len(workloads) != 1:
        raise typer.BadParameter(
            f"several GPUs or --price: found {len(workloads)} training runs; GPUs are compared for one"
        )
    hidden = skip_unused_imports(workloads, trust_remote_code=request.trust_remote_code)
    doing = f"simulating {workloads[0].display_name} on several GPUs"
    with quiet_libraries(debug=request.debug), progress(doing), hidden_in_workers(hidden):
        asked = replace(request, effective_batch_size=None)  # the workload has it already
        comparison = api.compare_gpus(workloads[0], gpus or None, request=asked, costs_per_hour=request.price)
    _show(comparison, json=request.json)
    charts.write(comparison)


def _refuse_run_options(request: CompareRequest) -> None:
    """Raise ``BadParameter`` for options that only a measurement can follow."""
    if changed := request.changed():
        names = ", ".join(f"--{'records' if name == 'store' else name.replace('_', '-')}" for name in changed)
        raise typer.BadParameter(f"{names} needs --measure: a prediction is the same every time")


def _measure(workloads: Sequence[Workload], request: CompareCommand, charts: Charts) -> None:
    """Measure and show a comparison; after Ctrl-C show the finished runs."""
    with quiet_libraries(debug=request.debug), ComparisonProgress() as observer:
        try:
            comparison = api.measure_comparison(workloads, request, observer)
            is_interrupted = False
        except api.ComparisonInterrupted as interrupt:
            comparison, is_interrupted = interrupt.comparison, True
    folder = store_of(request.store).path
    if is_interrupted:
        if comparison.measured:
            _show(comparison, json=request.json)
        note(_how_to_continue(comparison, observer, request, folder))
        raise KeyboardInterrupt
    _show(comparison, json=request.json)
    charts.write(comparison)
    try:
        write_default_plots(comparison, folder)
    except MissingLibrary as error:
        note(f"no charts beside the records: {error}")
    if code := _exit_code(observer):
        raise typer.Exit(code)


def _exit_code(observer: ComparisonProgress) -> int:
    """Return the code of the first run that failed, 1 if a record could not be written, else 0."""
    for run in observer.finished_runs:
        if run.error is not None:
            return run.error.exit_code
    return int(any(run.unsaved for run in observer.finished_runs))


def _how_to_continue(comparison: Comparison, observer: ComparisonProgress, request: CompareRequest, folder: str) -> str:
    """Return the number of recorded runs after Ctrl-C, and how to continue."""
    done, total = len(observer.finished_runs), len(comparison.rows) * request.repeat
    named = f" with --group {comparison.group} instead of --fresh" if request.fresh else ""
    return (
        f"stopped after {done} of {many(total, 'run')}; their measurements are in {folder}. "
        f"The same command{named} continues from there."
    )


def _show(comparison: Comparison, *, json: bool) -> None:
    show_result(to_json, comparison_page, comparison, json=json)


def _note_falling_memory(comparison: Comparison) -> None:
    """Print a note where a larger batch reserves less memory than a smaller one, which misleads a bisection."""
    by_rest: dict[str, list[tuple[int, int]]] = {}
    for row in comparison.rows:
        if row.prediction is not None:
            train = dict(row.workload.get("train", {}))  # type: ignore[call-overload]
            size = train.pop("per_device_train_batch_size", 8)
            rest = repr({**row.workload, "train": train, "name": None})
            by_rest.setdefault(rest, []).append((size, row.prediction.memory.peak_reserved_bytes))
    for points in by_rest.values():
        points.sort()
        for (small, more), (large, less) in itertools.pairwise(points):
            if less < more and large > small:
                note(
                    f"batch size {large} reserves less memory than {small}: the allocator splits cached blocks "
                    "differently, so check every batch size instead of bisecting"
                )
                return
