"""``trainatomy compare``: several trainings side by side, predicted or measured too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trainatomy.cli.asked import several_workloads
from trainatomy.cli.campaign import Asked, Outcome, advice, measured
from trainatomy.cli.options import (
    CalibrationFile,
    Debug,
    Json,
    Records,
    TrustRemoteCode,
    in_output,
    in_run,
    with_workload_options,
)
from trainatomy.cli.output import note, progress, show, show_json
from trainatomy.cli.plots import check_plots, write_default_plots, write_plots
from trainatomy.cli.quiet import quiet_libraries
from trainatomy.errors import MissingLibrary
from trainatomy.reporters.json import comparison_to_json
from trainatomy.reporters.text import comparison_page
from trainatomy.results.comparison import Comparison
from trainatomy.workload.sweep import sweep as swept

Files = Annotated[
    list[str],
    typer.Argument(
        metavar="notebook | notebook-fp16 | WORKLOAD.yaml…",
        help="Files (one may hold several rows), the notebook's nine trainings, or its table of fp16 by batch size.",
    ),
]
Measure = Annotated[
    bool,
    in_run("--measure", "Run each on the GPU of this machine too, one after the other, each in a fresh process."),
]
Repeat = Annotated[
    int, in_run("--repeat", "With --measure: run each so often; median and spread are shown.", metavar="N", min=1)
]
Sweep = Annotated[
    list[str] | None,
    in_run(
        "--sweep",
        "Once for each value of any setting; several sweeps are combined.",
        metavar="KEY=V1,V2…",
    ),
]
Plot = Annotated[
    list[Path] | None,
    in_output(
        "--plot",
        "Draw the comparison into this file; may be repeated. With --measure: drawn beside the records anyway.",
        metavar="FILE.svg|FILE.png",
        dir_okay=False,
    ),
]
Group = Annotated[
    str | None,
    in_output(
        "--group",
        "With --measure: the name that the records share, and under which an interrupted comparison goes on.",
        metavar="NAME",
    ),
]
Fresh = Annotated[bool, in_run("--fresh", "With --measure: run everything anew, whatever is on record.")]
TimeLimit = Annotated[
    float | None,
    in_run("--time-limit", "With --measure: give a run up after so many seconds.", metavar="SECONDS", min=0),
]
Jobs = Annotated[
    int | None,
    in_run("--jobs", "Processes that predict side by side (default: one a core, up to 8).", metavar="N", min=1),
]


@with_workload_options
def compare(
    files: Files,
    measure: Measure = False,
    repeat: Repeat = 1,
    sweep: Sweep = None,
    plot: Plot = None,
    records: Records = None,
    group: Group = None,
    fresh: Fresh = False,
    time_limit: TimeLimit = None,
    calibration: CalibrationFile = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
    jobs: Jobs = None,
    debug: Debug = False,
    **overrides: Any,
) -> None:
    """Predict several trainings and show them side by side, with the difference to the first; with --measure, run them
    too. Options apply to all of them.

    `notebook` stands for the nine trainings of BERT-large in Hugging Face's guide of January 2022: as they were then,
    beside the published figures, or with `--gpu` on another card with today's software. `notebook-fp16` is the guide's
    second table: fp16 against fp32 at batch sizes 8 to 64 on BERT-base.

    With `--measure` every run leaves a record when it ends; an interrupted comparison goes on where it stopped.
    """
    plots = check_plots(plot or ())
    asked = Asked(
        files, overrides, sweep or (), repeat, records, group, fresh, time_limit, calibration, trust_remote_code, jobs
    )
    if measure:
        _measured(asked, plots, json=json, debug=debug)
        return
    _refuse_without_measure(asked)
    with quiet_libraries(debug=debug):
        comparison = _predicted(asked)
    _show(comparison, json=json)
    write_plots(comparison, plots)


def _predicted(asked: Asked) -> Comparison:
    from trainatomy.api import compare as compared
    from trainatomy.runs.predicting import jobs_for

    workloads = swept(several_workloads(asked.files, asked.overrides), asked.sweeps)
    with progress(f"executing {len(workloads)} trainings on tensors without data"):
        return compared(
            workloads,
            calibration=asked.calibration,
            trust_remote_code=asked.trust_remote_code,
            jobs=jobs_for(len(workloads), asked.jobs),
        )


def _measured(asked: Asked, plots: tuple[Path, ...], *, json: bool, debug: bool) -> None:
    with quiet_libraries(debug=debug):
        outcome = measured(asked)
    if outcome.interrupted:
        if outcome.comparison.measured and not json:
            show(comparison_page(outcome.comparison))
        note(advice(outcome, asked))
        raise KeyboardInterrupt
    _show(outcome.comparison, json=json)
    _draw(outcome, plots)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


def _draw(outcome: Outcome, plots: tuple[Path, ...]) -> None:
    """Into the files that were named, and beside the records; there only where matplotlib is installed."""
    write_plots(outcome.comparison, plots)
    try:
        write_default_plots(outcome.comparison, outcome.folder)
    except MissingLibrary as error:
        note(f"not drawn: {error}")


def _show(comparison: Comparison, *, json: bool) -> None:
    if json:
        show_json(comparison_to_json(comparison))
    else:
        show(comparison_page(comparison))


def _refuse_without_measure(asked: Asked) -> None:
    """Options that would silently do nothing."""
    given = {
        "--repeat": asked.repeats > 1,
        "--records": asked.records is not None,
        "--group": asked.group is not None,
        "--fresh": asked.fresh,
        "--time-limit": asked.time_limit is not None,
    }
    if names := [name for name, is_given in given.items() if is_given]:
        raise typer.BadParameter(f"{', '.join(names)} needs --measure: a prediction is the same every time")
