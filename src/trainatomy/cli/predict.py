"""``trainatomy predict``: predict the memory and the time of one training step.

``trainatomy ops``: break a training step down into its operations.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import BadParameter

from trainatomy.catalog.gpus import find_gpu
from trainatomy.cli.options import (
    CalibrationFile,
    Debug,
    File,
    Json,
    Price,
    Sources,
    TrustRemoteCode,
    check_option,
    in_output,
    in_run,
    plot_option,
    prices,
    whole_numbers,
)
from trainatomy.cli.output import note, progress, quiet_libraries, show, show_json
from trainatomy.cli.report import (
    Html,
    Open,
    Snapshot,
    Trace,
    check_plots,
    check_report,
    draw_lengths,
    write_exports,
    write_report,
)
from trainatomy.cli.unused_imports import skip_collections, skip_unused_imports
from trainatomy.cli.workloads import one_workload, refuse_misspelt, with_workload_options
from trainatomy.errors import DoesNotFit
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.operations import operations_page
from trainatomy.reporters.text.prediction import prediction_page, verdict_line
from trainatomy.reporters.text.rendering import render
from trainatomy.workload.builtin import ENCODER_LAYER, encoder_layer
from trainatomy.workload.overrides import merge

if TYPE_CHECKING:
    from trainatomy.results.fit import Shortage
    from trainatomy.results.prediction import Prediction
    from trainatomy.workload.schema import Workload


MANY_CANDIDATES = 100
"""About as many training runs as a search executes, for the number of processes."""

Check = Annotated[bool, check_option("the training does not fit")]
WhyOom = Annotated[
    bool,
    in_run("--why-oom", "If the training does not fit, also list the changes that would make it fit."),
]
Timeline = Annotated[bool, in_output("--timeline", "Show memory by component over the step.")]
Ranks = Annotated[
    str | None,
    in_run("--ranks", "On several GPUs, also execute these ranks, such as `1,7`, for their memory.", metavar="N,N"),
]
Plot = Annotated[
    Path | None,
    plot_option("With data.lengths: draw reserved memory over the steps of some orders."),
]
JsonVersion = Annotated[
    int, in_output("--json-version", "Version of the JSON; 2 is a draft.", min=1, max=2, hidden=True)
]


@with_workload_options
def predict(
    file: File = None,
    check: Check = False,
    why_oom: WhyOom = False,
    timeline: Timeline = False,
    sources: Sources = False,
    ranks: Ranks = None,
    price: Price = None,
    plot: Plot = None,
    html: Html = None,
    open_report: Open = False,
    trace: Trace = None,
    snapshot: Snapshot = None,
    calibration: CalibrationFile = None,
    json: Json = False,
    json_version: JsonVersion = 1,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
    **flags: Any,
) -> None:
    """Predict what a training step holds in GPU memory at its peak, whether it fits on the GPU, and how long it takes.

    Describe the training by a file, by options, or by both; options override the file. Options have the names of
    TrainingArguments, with hyphens or underscores.
    """
    skip_collections()
    workload = one_workload(file, flags)
    cost_per_hour = _cost_per_hour(workload, price)
    if not why_oom:
        skip_unused_imports([workload], trust_remote_code=trust_remote_code)
    files, page = check_plots([plot] if plot is not None else []), check_report(html, open_report)
    with progress(f"simulating {workload.display_name}") as tell, quiet_libraries(debug=debug):
        from trainatomy import api

        keywords: dict[str, Any] = {
            "timeline": timeline or why_oom,
            "trust_remote_code": trust_remote_code,
            "calibration": calibration,
            "ranks": whole_numbers("--ranks", ranks) or _of_another_gpu(workload),
            "on_progress": tell,
        }
        if page or trace or snapshot:
            prediction, detail = api.predict_in_detail(workload, **keywords)
        else:
            prediction, detail = api.predict(workload, **keywords), None
    whole, prediction = prediction, prediction if timeline else replace(prediction, timeline=())
    for chart in files:
        draw_lengths(chart, prediction)
    write_report(page, prediction, is_opened=open_report, detail=detail)
    if detail is not None:
        write_exports(prediction, detail, trace, snapshot)
    refused = shortage = None
    if not prediction.fits:
        from trainatomy.search.options import refusal

        refused = refusal(workload)
    if why_oom and not prediction.fits and refused is None:
        shortage = _shortage(workload, whole, calibration, trust_remote_code, debug)
    if json:
        from trainatomy.reporters.json import to_json

        found = to_json(prediction, version=json_version)
        show_json(found if shortage is None else {**found, "shortage": to_json(shortage)})
    else:
        show(prediction_page(prediction, cost_per_hour, with_sources=sources))
        if shortage is not None:
            from trainatomy.reporters.text.fit import shortage_page

            show(shortage_page(shortage))
        elif not prediction.fits and refused is None:
            note(hint(workload))
    if why_oom and refused is not None:
        note(f"--why-oom: nothing was varied: {refused}")
    if check and not all(rank.fits for rank in prediction.ranks.values()):
        raise DoesNotFit(render(verdict_line(prediction), width=1000).strip())


def _cost_per_hour(workload: Workload, price: list[str] | None) -> float | None:
    """Return the price of all GPUs of a training, None without one; refuse prices of others."""
    costs = {find_gpu(name).id: cost for name, cost in prices(price).items()}
    if not costs:
        return None
    gpu = workload.resolve_gpu().id
    if gpu not in costs:
        raise BadParameter(f"--price: names {', '.join(costs)}, and the prediction is for {gpu}")
    return costs[gpu] * workload.parallel.world_size


def hint(workload: Workload) -> str:
    """Return which commands say what would fit, as they work for a training."""
    from trainatomy.search.options import unsupported_precision

    allowed = "" if unsupported_precision(workload) is None else " --allow precision"
    return (
        f"`trainatomy fit{allowed}` finds settings that fit; --why-oom lists every change that would make this one fit"
    )


def _of_another_gpu(workload: Workload) -> tuple[int, ...]:
    """Return a GPU whose memory is shown unasked: with DataParallel, the others are not like the first."""
    return (1,) if workload.parallel.devices > 1 else ()


def _shortage(
    workload: Workload, prediction: Prediction, calibration: Path | None, trust_remote_code: bool, debug: bool
) -> Shortage:
    """Return what would make a training fit that was predicted."""
    from trainatomy.cli.progress import SearchProgress
    from trainatomy.runs.predicting import jobs_for

    with quiet_libraries(debug=debug), SearchProgress(workload.display_name) as observer:
        from trainatomy import api

        return api.why_out_of_memory(
            workload,
            prediction=prediction,
            calibration=calibration,
            trust_remote_code=trust_remote_code,
            jobs=jobs_for(MANY_CANDIDATES),
            progress=observer,
        )


FileOrLayer = Annotated[
    str | None,
    typer.Argument(
        metavar="encoder-layer | WORKLOAD.yaml",
        help="A file that describes the training, or the built-in encoder layer of BERT-large.",
        show_default=False,
    ),
]
Top = Annotated[
    int,
    in_output("--top", "How many of the heaviest operations and modules to show (default: 15).", metavar="N", min=1),
]
Measure = Annotated[bool, in_run("--measure", "Add a profile of this machine's GPU.")]


@with_workload_options
def ops(
    file: FileOrLayer = None,
    top: Top = 15,
    measure: Measure = False,
    html: Html = None,
    open_report: Open = False,
    calibration: CalibrationFile = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
    **flags: Any,
) -> None:
    """Break a training step down into its operations: tensor contractions, normalisations, element-wise operators.

    For each group and phase: FLOP, bytes moved, time, and memory at the peak; then the heaviest operations, and shapes
    that use the GPU badly. `encoder-layer` is the layer of BERT-large whose operators were published in "Data Movement
    Is All You Need" (batch 8, sequence 512, fp16).
    """
    skip_collections()
    if file is not None:
        refuse_misspelt(file, (ENCODER_LAYER,))
    workload = merge(encoder_layer(), flags) if file == ENCODER_LAYER else one_workload(file, flags)
    if not measure:
        skip_unused_imports([workload], trust_remote_code=trust_remote_code)
    page = check_report(html, open_report)
    with progress(f"simulating {workload.display_name}"), quiet_libraries(debug=debug):
        from trainatomy import api

        anatomy = api.ops(
            workload, top=top, measured=measure, trust_remote_code=trust_remote_code, calibration=calibration
        )
    write_report(page, anatomy, is_opened=open_report)
    if json:
        show_json(to_json(anatomy))
    else:
        show(operations_page(anatomy))
