"""``trainatomy compare``: several trainings side by side, predicted or measured too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trainatomy.errors import MissingLibrary
from trainatomy.faces.cli.asked import published, several_workloads
from trainatomy.faces.cli.campaign import Asked, Outcome, advice, measured
from trainatomy.faces.cli.options import Debug, Json, TrustRemoteCode, with_workload_options
from trainatomy.faces.cli.output import note, progress, show, show_json
from trainatomy.faces.cli.plots import check_plots, write_default_plots, write_plots
from trainatomy.faces.cli.quiet import quiet_libraries
from trainatomy.faces.json import comparison_to_json
from trainatomy.faces.text import comparison_page
from trainatomy.results.comparison import Comparison
from trainatomy.workload.sweep import sweep as swept

_RUN, _OUTPUT = "Run", "Output"

Files = Annotated[
    list[str],
    typer.Argument(
        metavar="notebook | notebook-fp16 | WORKLOAD.yaml…",
        help="Files (one may hold several rows), the notebook's nine trainings, or its table of fp16 by batch size.",
    ),
]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Run each on the GPU of this machine too, one after the other, each in a fresh process.",
        rich_help_panel=_RUN,
    ),
]
Repeat = Annotated[
    int,
    typer.Option(
        "--repeat",
        metavar="N",
        min=1,
        help="With --measure: run each so often; median and spread are shown.",
        rich_help_panel=_RUN,
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="KEY=V1,V2…",
        help="Once for each value of any setting; several sweeps are combined.",
        rich_help_panel=_RUN,
    ),
]
Plot = Annotated[
    list[Path] | None,
    typer.Option(
        "--plot",
        metavar="FILE.svg|FILE.png",
        help="Draw the comparison into this file; may be repeated. With --measure: drawn beside the records anyway.",
        rich_help_panel=_OUTPUT,
        dir_okay=False,
    ),
]
Records = Annotated[
    str | None,
    typer.Option(
        "--records",
        metavar="FOLDER",
        help="With --measure: where records are kept (default: TRAINATOMY_RECORDS, or ./trainatomy-records).",
        rich_help_panel=_OUTPUT,
    ),
]
Group = Annotated[
    str | None,
    typer.Option(
        "--group",
        metavar="NAME",
        help="With --measure: the name that the records share, and under which an interrupted comparison goes on.",
        rich_help_panel=_OUTPUT,
    ),
]
Fresh = Annotated[
    bool,
    typer.Option("--fresh", help="With --measure: run everything anew, whatever is on record.", rich_help_panel=_RUN),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="With --measure: give a run up after so many seconds.",
        rich_help_panel=_RUN,
    ),
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
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
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
        files, overrides, sweep or (), repeat, records, group, fresh, time_limit, trust_remote_code=trust_remote_code
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
    from trainatomy.campaign.gather import gather

    workloads = swept(several_workloads(asked.files, asked.overrides), asked.sweeps)
    with progress(f"executing {len(workloads)} trainings on tensors without data"):
        predictions = compared(workloads, trust_remote_code=asked.trust_remote_code)
    known = published(asked.files, workloads)
    return gather(
        workloads, predictions, (), known.rows, source=known.source, remark=known.remark, samples=known.samples
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
