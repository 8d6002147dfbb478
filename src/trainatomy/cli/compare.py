"""``trainatomy compare``: compare several training runs, predicted or measured."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, NamedTuple, TypedDict

import typer

from trainatomy.catalog.calibrations import resolve_calibration
from trainatomy.cli.options import (
    CalibrationFile,
    Debug,
    Executor,
    Jobs,
    Json,
    Price,
    Records,
    TrustRemoteCode,
    command_line,
    in_output,
    in_run,
    plot_option,
    prices,
    refuse_together,
    several_gpus,
    time_limit_option,
)
from trainatomy.cli.output import note, progress, quiet_libraries, show, show_json
from trainatomy.cli.progress import ComparisonProgress
from trainatomy.cli.report import Html, Open, check_plots, check_report, write_default_plots, write_plots, write_report
from trainatomy.cli.unused_imports import skip_unused_imports
from trainatomy.cli.workloads import note_many_steps, samples_of, several_workloads, with_workload_options
from trainatomy.errors import MissingLibrary
from trainatomy.records.store import Store
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.comparison import comparison_page
from trainatomy.results.comparison import Comparison
from trainatomy.runs.options import PredictOptions, RunOptions
from trainatomy.runs.pools import hidden_in_workers
from trainatomy.runs.predicting import jobs_for
from trainatomy.units import many
from trainatomy.workload.schema import Workload
from trainatomy.workload.sweep import sweep as sweep_workloads
from trainatomy.workload.sweep import with_effective_batch_size

Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[notebook | notebook-fp16 | parallel | WORKLOAD.yaml…]",
        help="Workload files (several rows each), or a built-in comparison. Without one, options name the model.",
        show_default=False,
    ),
]
Measure = Annotated[
    bool,
    in_run("--measure", "Also run each training on this machine's GPU, one by one in fresh processes."),
]
Repeat = Annotated[
    int, in_run("--repeat", "With --measure: runs per training; median and spread are shown.", metavar="N", min=1)
]
Sweep = Annotated[
    list[str] | None,
    in_run(
        "--sweep",
        "Vary a setting: one row for each value. Several sweeps are combined.",
        metavar="KEY=V1,V2…",
    ),
]
EffectiveBatchSize = Annotated[
    int | None,
    in_run(
        "--effective-batch-size",
        "Samples per optimizer step on all GPUs, the same in all rows: sets the accumulation steps.",
        metavar="N",
        min=1,
    ),
]
Plot = Annotated[
    list[Path] | None,
    plot_option("Write a chart to this file; repeatable. With --measure, charts are also written beside the records."),
]
Group = Annotated[
    str | None,
    in_output(
        "--group",
        "With --measure: name that the records share, under which an interrupted comparison continues.",
        metavar="NAME",
    ),
]
Fresh = Annotated[bool, in_run("--fresh", "With --measure: run everything again, whatever is on record.")]
TimeLimit = Annotated[
    float | None,
    time_limit_option("With --measure: stop a run after this many seconds."),
]


Keep = Annotated[
    str | None,
    in_run(
        "--keep",
        "Keep each prediction in this folder or URL as soon as it is made; an interrupted comparison continues there.",
        metavar="PLACE",
    ),
]


MANY_GPUS = 16
"""More training runs than a process should predict alone, where the number of GPUs is not counted yet."""


class _Where(TypedDict):
    jobs: int | None
    executor: str | None
    keep: str | None


class Charts(NamedTuple):
    """The files that show a comparison: charts, and a report that may be opened."""

    plots: tuple[Path, ...]
    page: Path | None
    is_opened: bool

    def write(self, comparison: Comparison) -> None:
        """Write all of them."""
        write_report(self.page, comparison, is_opened=self.is_opened)
        write_plots(comparison, self.plots)


@with_workload_options
def compare(
    files: Files = None,
    measure: Measure = False,
    repeat: Repeat = 1,
    sweep: Sweep = None,
    effective_batch_size: EffectiveBatchSize = None,
    plot: Plot = None,
    html: Html = None,
    open_report: Open = False,
    records: Records = None,
    group: Group = None,
    fresh: Fresh = False,
    time_limit: TimeLimit = None,
    calibration: CalibrationFile = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
    jobs: Jobs = None,
    executor: Executor = None,
    keep: Keep = None,
    price: Price = None,
    debug: Debug = False,
    **flags: Any,
) -> None:
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
    files = files or []
    charts = Charts(check_plots(plot or ()), check_report(html, open_report), open_report)
    gpus = several_gpus(flags, price)
    if gpus is not None:
        flags.pop("gpu", None)
        refuse_together({"several GPUs or --price": True, "--measure": measure, "--sweep": bool(sweep)})
    workloads = _rows(several_workloads(files, flags, today=measure), sweep or (), effective_batch_size)
    predict_options = PredictOptions(trust_remote_code=trust_remote_code, calibration=resolve_calibration(calibration))
    run_options = RunOptions(
        repeat=repeat,
        store=records,
        group=group,
        fresh=fresh,
        time_limit=time_limit,
        keep_gpus=flags.get("gpu") is not None or any(each.startswith("gpu=") for each in sweep or ()),
        title="-".join(dict.fromkeys(PurePath(file).stem for file in files)) or workloads[0].display_name,
        samples=samples_of(files),
        command=command_line(),
    )
    count = jobs if executor else jobs_for(len(workloads) if gpus is None else MANY_GPUS, jobs)
    where: _Where = {"jobs": count, "executor": executor, "keep": keep}
    if gpus is not None:
        _refuse_run_options(run_options)
        _across_gpus(workloads, gpus, predict_options, price, charts, where, json=json, debug=debug)
        return
    if measure:
        _measure(workloads, predict_options, run_options, charts, where, records=records, json=json, debug=debug)
        return
    _refuse_run_options(run_options)
    _predict(workloads, predict_options, charts, where, json=json, debug=debug)


def _rows(workloads: Sequence[Workload], sweeps: Sequence[str], effective_batch_size: int | None) -> Sequence[Workload]:
    """Return the training runs to compare: every value of every sweep, with one effective batch size if it is given."""
    rows = sweep_workloads(workloads, sweeps)
    if effective_batch_size is not None:
        rows = with_effective_batch_size(rows, effective_batch_size)
    note_many_steps(rows)
    return rows


def _predict(
    workloads: Sequence[Workload],
    options: PredictOptions,
    charts: Charts,
    where: _Where,
    *,
    json: bool,
    debug: bool,
) -> None:
    """Predict and show a comparison."""
    hidden = skip_unused_imports(workloads, trust_remote_code=options.trust_remote_code)
    with quiet_libraries(debug=debug), progress(f"simulating {many(len(workloads), 'training run')}"):
        from trainatomy import api

        with hidden_in_workers(hidden):
            comparison = api.predict_comparison(workloads, options, **where)
    _show(comparison, json=json)
    _note_falling_memory(comparison)
    charts.write(comparison)


def _across_gpus(
    workloads: Sequence[Workload],
    gpus: Sequence[str],
    options: PredictOptions,
    price: Sequence[str] | None,
    charts: Charts,
    where: _Where,
    *,
    json: bool,
    debug: bool,
) -> None:
    """Show one training on GPUs of several kinds; an empty list stands for all."""
    if len(workloads) != 1:
        raise typer.BadParameter(
            f"several GPUs or --price: found {len(workloads)} training runs; GPUs are compared for one"
        )
    with quiet_libraries(debug=debug), progress(f"simulating {workloads[0].display_name} on several GPUs"):
        from trainatomy import api

        comparison = api.predict_gpus(workloads[0], gpus or None, options, prices(price), **where)
    _show(comparison, json=json)
    charts.write(comparison)


def _refuse_run_options(options: RunOptions) -> None:
    """Raise ``BadParameter`` for options that only a measurement can follow."""
    if changed := options.changed():
        names = ", ".join(f"--{'records' if name == 'store' else name.replace('_', '-')}" for name in changed)
        raise typer.BadParameter(f"{names} needs --measure: a prediction is the same every time")


def _measure(
    workloads: Sequence[Workload],
    predict_options: PredictOptions,
    run_options: RunOptions,
    charts: Charts,
    where: _Where,
    *,
    records: str | None,
    json: bool,
    debug: bool,
) -> None:
    """Measure and show a comparison; after Ctrl-C show the finished runs."""
    from trainatomy.runs.comparison import ComparisonInterrupted

    with quiet_libraries(debug=debug), ComparisonProgress() as observer:
        from trainatomy import api

        try:
            comparison = api.measure_comparison(workloads, predict_options, run_options, **where, progress=observer)
            is_interrupted = False
        except ComparisonInterrupted as interrupt:
            comparison, is_interrupted = interrupt.comparison, True
    folder = Store(records).path
    if is_interrupted:
        if comparison.measured:
            _show(comparison, json=json)
        note(_how_to_continue(comparison, observer, run_options, folder))
        raise KeyboardInterrupt
    _show(comparison, json=json)
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


def _how_to_continue(comparison: Comparison, observer: ComparisonProgress, options: RunOptions, folder: str) -> str:
    """Return the number of recorded runs after Ctrl-C, and how to continue."""
    done, total = len(observer.finished_runs), len(comparison.rows) * options.repeat
    named = f" with --group {comparison.group} instead of --fresh" if options.fresh else ""
    return (
        f"stopped after {done} of {many(total, 'run')}; their measurements are in {folder}. "
        f"The same command{named} continues from there."
    )


def _show(comparison: Comparison, *, json: bool) -> None:
    if json:
        show_json(to_json(comparison))
    else:
        show(comparison_page(comparison))


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
