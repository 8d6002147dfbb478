"""``trainatomy run``: run the user's own training script without a GPU, and predict its memory and time.

Words of ``trainatomy run``: its own options stand before the script; the rest is the script's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from trainatomy.catalog.gpus import find_gpu, gpu_of_driver
from trainatomy.catalog.gpus import gpus as all_gpus
from trainatomy.cli.app import Command
from trainatomy.cli.options import DEBUG, JSON, PRICE, SOURCES, command, command_line, several_gpus
from trainatomy.cli.output import note, progress, show, show_json, show_result
from trainatomy.cli.prices import cost_per_hour
from trainatomy.cli.report import HTML, OPEN, SNAPSHOT, TRACE, check_report, write_exports, write_report
from trainatomy.errors import DoesNotFit, TrainatomyError, WorkloadError
from trainatomy.measurement.device.nvml import require_gpu
from trainatomy.option import in_output, option, output_file, required, shared_fields
from trainatomy.records.create import make_record
from trainatomy.records.store import Store
from trainatomy.reporters.host_sentences import shortages
from trainatomy.reporters.json import cost_to_json, measurement_to_json, to_json
from trainatomy.reporters.text.measurement import measurement_page
from trainatomy.reporters.text.prediction import prediction_page, verdict_line
from trainatomy.reporters.text.rendering import render
from trainatomy.reporters.text.script import scripts_page
from trainatomy.requests.measuring import RECORDS
from trainatomy.requests.predicting import CALIBRATION
from trainatomy.requests.scripts import ScriptRequest
from trainatomy.results.comparison import Comparison, ComparisonRow
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Plan, Prediction
from trainatomy.scripts import launch
from trainatomy.scripts.command import Command as Script
from trainatomy.scripts.command import check_gpu, read_command, with_gpus
from trainatomy.scripts.job import Job, Outcome

DEFAULT_GPU = "h200"
_NOT_GIVEN = "trainatomy.not_given"
"""Options of the command that were not given before the script, each with whether it takes a value."""


class ScriptCommand(Command):
    """A command whose own options end where the script begins; the script's are passed on as they are."""

    options_first = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        switches = {
            name for option in self.params for name in (*option.opts, *option.secondary_opts) if _is_switch(option)
        }
        position = 0
        while position < len(args) and args[position].startswith("-") and args[position] not in ("-m", "--"):
            word = args[position]
            alone = "=" in word or word.replace("_", "-") in switches or word in ("-h", "--help")
            position += 1 if alone else 2
        script = args[position:]
        is_divided = script[:1] == ["--"]
        script = script[1:] if is_divided else script
        rest: list[str] = super().parse_args(ctx, [*args[:position], "--", *script])
        if not is_divided:
            own = {word.partition("=")[0].replace("_", "-") for word in args[:position]}
            ctx.meta[_NOT_GIVEN] = [
                (name, not _is_switch(option))
                for option in self.params
                for name in (*option.opts, *option.secondary_opts)
                if option.param_type_name == "option" and name not in own
            ]
        return rest


def passed_on(script: Script, context: typer.Context) -> str:
    """Return that arguments of a script are spelled like options that were not given before it; "" if none is.

    Raises:
        WorkloadError: The answer would be another: for another GPU, or success whether the script fits or not.
    """
    options = dict(context.meta.get(_NOT_GIVEN, []))
    if "--gpu" in options:
        check_gpu(script, DEFAULT_GPU)
    if "--check" in options and (words := script.spelled("--check", takes_value=False)):
        raise WorkloadError(
            f"{words} stands after the script and goes to it, so that nothing would be checked. Write "
            f"trainatomy run --check {script.without(words)}\n"
            f"If it is meant for the script, say so: trainatomy run -- {script.text}"
        )
    spelled = (script.spelled(name, takes_value=takes_value) for name, takes_value in options.items())
    found = ", ".join(filter(None, spelled))
    return found and f"{found}: for the script, not for trainatomy run, whose options stand before the script"


def _is_switch(option: Any) -> bool:
    return bool(getattr(option, "is_flag", False))


COMMAND = ScriptCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommand(ScriptRequest):
    """A dry run that is shown."""

    FIRST = ("gpu", "gpus", "price", "timeline", "sources", "html", "open_report", "trace", "snapshot", "check", "json")

    script: tuple[str, ...] = required(
        "The script or notebook with its arguments, `-m module`, `torchrun …` or `accelerate launch …`, as they "
        "are typed. Everything from there on is the script's: options of `trainatomy run` stand before it.",
        name="",
        metavar="SCRIPT ARGUMENTS…",
    )
    gpu: str | None = option(
        None, f"The GPU to simulate (default: {DEFAULT_GPU}); several with commas, or `all`.", metavar="GPU"
    )
    gpus: int | None = option(
        None, "Simulate rank 0 of a training on this many GPUs, as if started by torchrun.", metavar="N", min=1
    )
    price: Mapping[str, float] = option({}, PRICE)
    sources: bool = option(False, SOURCES)
    html: Path | None = option(None, HTML)
    open_report: bool = option(False, OPEN)
    trace: Path | None = option(None, TRACE)
    snapshot: Path | None = option(None, SNAPSHOT)
    check: bool = in_output(False, "Exit with code 8 if the training does not fit.")
    json: bool = option(False, JSON)
    measure: bool = option(False, "Also run the script on this machine's GPU, and compare.")
    calibration: Path | None = option(None, replace(CALIBRATION, read=None))
    records: str | None = option(None, RECORDS)
    script_output: Path | None = output_file(
        None, "File for the output of the script (default: stderr).", metavar="FILE"
    )
    debug: bool = option(False, DEBUG)
    context: typer.Context | None = None


@command
def run(request: RunCommand) -> None:
    """Run a training script, unmodified, without a GPU: predict its peak memory, whether it fits, and its step time.

    This executes the script's own code, in a separate process, on tensors without data, and stops it after a few
    optimizer steps. Files that it writes are listed but not kept, and the network is off.
    """
    page = check_report(request.html, request.open_report)
    script = read_command(list(request.script))
    caution = "" if request.context is None else passed_on(script, request.context)
    job = Job(
        with_gpus(script, request.gpus),
        _gpus(request.gpu or (this_gpu() if request.measure else DEFAULT_GPU)),
        calibration=request.calibration,
        detail=bool(page or request.trace or request.snapshot),
        debug=request.debug,
        **shared_fields(ScriptRequest, request),
    )
    price = _price(request, job.gpus)
    if request.measure:
        job = replace(job, look_ahead=False)
        _check_measured(job)
    if caution and request.json:
        note(caution)
    with progress(f"running {job.command.name} without a GPU"):
        outcomes = launch.run_script(job, request.script_output)
    if outcomes[0].prediction is not None and outcomes[0].detail is not None:
        write_exports(outcomes[0].prediction, outcomes[0].detail, request.trace, request.snapshot)
    if request.measure:
        measured = _measure(job, outcomes[0], request, page)
        if request.check and measured.status == "out of memory":
            raise DoesNotFit(f"{job.command.name} ran out of memory on this machine's {measured.gpu}")
        return
    _report(outcomes, page, is_opened=request.open_report)
    if caution and not request.json:
        show(Text(f"note: {caution}"))
    _show(outcomes, price, json=request.json, with_sources=request.sources)
    _raise(outcomes, check=request.check)


def _gpus(text: str) -> tuple[str, ...]:
    """Return the ids of the GPUs in ``--gpu``."""
    names = several_gpus(text)
    if names is None:
        return (find_gpu(text).id,)
    return tuple(find_gpu(name).id for name in names) or tuple(each.id for each in all_gpus())


def _price(request: RunCommand, gpus: tuple[str, ...]) -> float | None:
    """Return the price of one GPU, where it is given.

    Raises:
        WorkloadError: The dry run is of several kinds of GPUs, or is measured.
    """
    if request.price and (len(gpus) > 1 or request.measure):
        raise WorkloadError("--price adds the cost to the prediction of one GPU: name it with --gpu, without --measure")
    return cost_per_hour(request.price, gpus[0])[0]


def this_gpu() -> str:
    """Return the id of this machine's GPU; the default if there are no data for it."""
    name = require_gpu().partition(" (driver")[0]
    found = gpu_of_driver(name)
    return DEFAULT_GPU if found is None else found.id


def _check_measured(job: Job) -> None:
    """Refuse, before anything runs, what cannot be measured here.

    Raises:
        WorkloadError: The dry run is of several kinds of GPUs, or the launcher starts several machines.
    """
    if len(job.gpus) > 1:
        raise WorkloadError("--measure shows one prediction beside the run on this machine's GPU: name one with --gpu")
    launch.started_by(job.command)


def _report(outcomes: tuple[Outcome, ...], page: Path | None, *, is_opened: bool) -> None:
    """Write the report of a script: on one GPU with every allocation, on several side by side."""
    found = [outcome.prediction for outcome in outcomes if outcome.prediction is not None]
    if len(outcomes) == 1 and found:
        write_report(page, found[0], is_opened=is_opened, detail=outcomes[0].detail)
    elif found:
        rows = tuple(ComparisonRow(each.gpu.name, each.workload, each) for each in found)
        write_report(page, Comparison(rows), is_opened=is_opened)


def _measure(job: Job, outcome: Outcome, request: RunCommand, page: Path | None) -> Measurement:
    """Run the script for real, show and record it beside the prediction, and return it."""
    from trainatomy.integrations.measured_script import compared  # it imports what only a run on a GPU needs

    if outcome.message:
        note(f"the dry run ended by an error: {outcome.message}")
    store = Store(request.records)
    store.check()
    measured = compared(launch.measure_script(job, request.script_output), outcome.prediction)
    note(f"recorded in {store.write(make_record(measured, outcome.prediction, command_line()))}")
    write_report(page, measured, is_opened=request.open_report, prediction=outcome.prediction)
    show_result(measurement_to_json, measurement_page, measured, outcome.prediction, json=request.json)
    return measured


def _show(outcomes: tuple[Outcome, ...], price: float | None, *, json: bool, with_sources: bool) -> None:
    found = [outcome.prediction for outcome in outcomes if outcome.prediction is not None]
    cost = None if price is None or not found else price * Plan.of(found[0].workload).world_size
    if json and len(outcomes) == 1 and found:
        show_json(to_json(found[0]) | cost_to_json(found[0], cost))
    elif json and found:
        show_json({"predictions": [to_json(each) for each in found]})
    elif found:
        one = len(outcomes) == 1
        show(prediction_page(found[0], cost, with_sources=with_sources) if one else scripts_page(found))
        if any(not each.fits for each in found) and len(outcomes) == 1:
            note("`trainatomy fit --script` searches over the script's own flags for settings that fit")


def _raise(outcomes: tuple[Outcome, ...], *, check: bool) -> None:
    """Raise the error of a script that failed, or of one that does not fit if that is asked for."""
    for outcome in outcomes:
        if outcome.exit_code:
            error = TrainatomyError(outcome.message)
            error.exit_code = outcome.exit_code
            raise error
        run = None if outcome.prediction is None else outcome.prediction.script
        if run is not None and run.ending == "interrupted":
            raise KeyboardInterrupt
    predictions = [each.prediction for each in outcomes if each.prediction is not None]
    if check and not all(each.fits for each in predictions):
        raise DoesNotFit(_verdicts(predictions))
    bills = [each.host_bill for each in predictions if each.host_bill is not None]
    if check and (said := dict.fromkeys(text for bill in bills for text in shortages(bill))):
        raise DoesNotFit("; ".join(said))


def _verdicts(predictions: list[Prediction]) -> str:
    return "\n".join(render(verdict_line(each), width=1000).strip() for each in predictions if not each.fits)
