"""``trainatomy predict``: predict the memory and the time of one training step.

``trainatomy ops``: break a training step down into its operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainatomy import api
from trainatomy.catalog.instances import find_instance
from trainatomy.cli.options import DEBUG, FILE, JSON, PRICE, SOURCES, file_or_command
from trainatomy.cli.output import note, progress, quiet_libraries, show, show_json, show_result
from trainatomy.cli.prices import cost_per_hour
from trainatomy.cli.report import (
    HTML,
    OPEN,
    SNAPSHOT,
    TRACE,
    check_plots,
    check_report,
    draw_lengths,
    write_exports,
    write_report,
)
from trainatomy.cli.unused_imports import skip_collections, skip_unused_imports
from trainatomy.cli.workloads import one_workload, refuse_misspelt, workload_command
from trainatomy.errors import DoesNotFit
from trainatomy.option import in_output, option, output_file
from trainatomy.reporters.host_sentences import shortages
from trainatomy.reporters.json import cost_to_json, to_json
from trainatomy.reporters.text.fit import shortage_page
from trainatomy.reporters.text.operations import operations_page
from trainatomy.reporters.text.prediction import prediction_page, verdict_line
from trainatomy.reporters.text.rendering import render
from trainatomy.requests.fitting import MANY_CANDIDATES, FitRequest, refusal, unsupported_precision
from trainatomy.requests.predicting import OpsRequest, PredictRequest, Training
from trainatomy.results.fit import Shortage
from trainatomy.results.prediction import Prediction
from trainatomy.results.trace import Detail
from trainatomy.runs.pools import start_importing
from trainatomy.workload.builtin import ENCODER_LAYER, encoder_layer
from trainatomy.workload.overrides import merge
from trainatomy.workload.schema import Workload


@dataclass(frozen=True, slots=True)
class PredictCommand(PredictRequest):
    """A prediction that is shown."""

    FIRST = ("why_oom", "ranks", "price", "check")

    file: str | None = option(None, FILE)
    check: bool = in_output(False, "Exit with code 8 if the training does not fit on the GPU or the host.")
    why_oom: bool = option(
        False, "If the training does not fit, also list the changes that would make it fit; show the host's memory."
    )
    sources: bool = option(False, SOURCES)
    price: Mapping[str, float] = option({}, PRICE)
    plot: Path | None = output_file(
        None, "With data.lengths: draw reserved memory over the steps of some orders.", metavar="FILE.svg|FILE.png"
    )
    html: Path | None = option(None, HTML)
    open_report: bool = option(False, OPEN)
    trace: Path | None = option(None, TRACE)
    snapshot: Path | None = option(None, SNAPSHOT)
    json: bool = option(False, JSON)
    json_version: int = in_output(1, "Version of the JSON; 2 is a draft.", min=1, max=2, hidden=True)
    debug: bool = option(False, DEBUG)
    flags: Mapping[str, Any] = field(default_factory=dict)


@workload_command
def predict(request: PredictCommand) -> None:
    """Predict what a training step holds in GPU memory at its peak, whether it fits on the GPU, and how long it takes.

    Describe the training by a file, by options, or by both; options override the file. Options have the names of
    TrainingArguments, with hyphens or underscores.
    """
    skip_collections()
    workload = one_workload(request.file, request.flags)
    machine, parallel = None if workload.instance is None else find_instance(workload.instance), workload.parallel
    cost = cost_per_hour(request.price, workload.resolve_gpu().id, parallel.world_size, machine, parallel.nodes)
    if request.why_oom and refusal(workload) is None:
        start_importing(api.jobs_for(MANY_CANDIDATES), deepspeed=workload.train.deepspeed is not None)
    elif not request.why_oom:
        skip_unused_imports([workload], trust_remote_code=request.trust_remote_code)
    files = check_plots([request.plot] if request.plot is not None else [])
    page = check_report(request.html, request.open_report)
    prediction, detail = _predicted(workload, request, in_detail=bool(page or request.trace or request.snapshot))
    whole, prediction = prediction, prediction if request.timeline else replace(prediction, timeline=())
    for chart in files:
        draw_lengths(chart, prediction)
    write_report(page, prediction, is_opened=request.open_report, detail=detail)
    if detail is not None:
        write_exports(prediction, detail, request.trace, request.snapshot)
    refused = None if prediction.fits else refusal(workload)
    is_searched = request.why_oom and not prediction.fits and refused is None
    shortage = _shortage(workload, whole, request) if is_searched else None
    if request.json:
        found = to_json(prediction, version=request.json_version) | cost_to_json(prediction, cost[0])
        show_json(found if shortage is None else {**found, "shortage": to_json(shortage)})
    else:
        show(prediction_page(prediction, *cost, with_sources=request.sources, with_host=request.why_oom))
        if shortage is not None:
            show(shortage_page(shortage, workload.origin))
        elif not prediction.fits and refused is None:
            note(hint(workload))
    if request.why_oom and refused is not None:
        note(f"--why-oom: nothing was varied: {refused}")
    if request.check and not all(rank.fits for rank in prediction.ranks.values()):
        raise DoesNotFit(render(verdict_line(prediction), width=1000).strip())
    if request.check and prediction.host_bill is not None and prediction.host_bill.shortages:
        raise DoesNotFit("; ".join(shortages(prediction.host_bill)))


def _predicted(workload: Workload, request: PredictCommand, *, in_detail: bool) -> tuple[Prediction, Detail | None]:
    """Return the prediction of a training and, if asked for, every allocation and operation."""
    ranks = request.ranks or _of_another_gpu(workload)
    asked = replace(request, timeline=request.timeline or request.why_oom, ranks=ranks)
    with progress(f"simulating {workload.display_name}") as tell, quiet_libraries(debug=request.debug):
        if in_detail:
            return api.predict_in_detail(workload, request=asked, on_progress=tell)
        return api.predict_training(Training(workload), asked, tell), None


def hint(workload: Workload) -> str:
    """Return which commands say what would fit, as they work for a training."""
    allowed = "" if unsupported_precision(workload) is None else " --allow precision"
    return (
        f"`trainatomy fit{allowed}` finds settings that fit; --why-oom lists every change that would make this one fit"
    )


def _of_another_gpu(workload: Workload) -> tuple[int, ...]:
    """Return a GPU whose memory is shown unasked: with DataParallel, the others are not like the first."""
    return (1,) if workload.parallel.devices > 1 else ()


def _shortage(workload: Workload, prediction: Prediction, request: PredictCommand) -> Shortage:
    """Return what would make a training fit that was predicted."""
    from trainatomy.cli.progress import SearchProgress  # a prediction that fits needs no search

    asked = FitRequest(
        jobs=api.jobs_for(MANY_CANDIDATES), calibration=request.calibration, trust_remote_code=request.trust_remote_code
    )
    with quiet_libraries(debug=request.debug), SearchProgress(workload.display_name) as observer:
        return api.why_out_of_memory(workload, request=asked, progress=observer, prediction=prediction)


@dataclass(frozen=True, slots=True)
class OpsCommand(OpsRequest):
    """A breakdown that is shown."""

    file: str | None = option(
        None,
        "A file that describes the training, or the built-in encoder layer of BERT-large.",
        name="",
        metavar="encoder-layer | WORKLOAD.yaml | -- COMMAND",
        words=list[str] | None,
        read=file_or_command,
    )
    html: Path | None = option(None, HTML)
    open_report: bool = option(False, OPEN)
    json: bool = option(False, JSON)
    debug: bool = option(False, DEBUG)
    flags: Mapping[str, Any] = field(default_factory=dict)


@workload_command
def ops(request: OpsCommand) -> None:
    """Break a training step down into its operations: tensor contractions, normalisations, element-wise operators.

    For each group and phase: FLOP, bytes moved, time, and memory at the peak; then the heaviest operations, and shapes
    that use the GPU badly. `encoder-layer` is the layer of BERT-large whose operators were published in "Data Movement
    Is All You Need" (batch 8, sequence 512, fp16).
    """
    skip_collections()
    if request.file is not None:
        refuse_misspelt(request.file, (ENCODER_LAYER,))
    is_layer = request.file == ENCODER_LAYER
    workload = merge(encoder_layer(), request.flags) if is_layer else one_workload(request.file, request.flags)
    if not request.measured:
        skip_unused_imports([workload], trust_remote_code=request.trust_remote_code)
    page = check_report(request.html, request.open_report)
    with progress(f"simulating {workload.display_name}"), quiet_libraries(debug=request.debug):
        anatomy = api.ops(workload, request=request)
    write_report(page, anatomy, is_opened=request.open_report)
    show_result(to_json, operations_page, anatomy, json=request.json)
