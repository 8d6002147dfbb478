"""Result values as JSON objects: what ``--json`` prints (docs/json.md), with the name and version of their schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainatomy.catalog.architectures import ArchitectureEntry
from trainatomy.catalog.gpus import GPU
from trainatomy.records.document import SCHEMA, to_plain
from trainatomy.reporters.doctor_json import diagnosis_to_json
from trainatomy.reporters.export import command_line_flags, launch_command, training_arguments_code, workload_yaml
from trainatomy.reporters.prediction_v2 import PREDICTION_2, PredictionV2, renamed_v2
from trainatomy.reporters.search_sentences import fit_note
from trainatomy.reporters.sentences import claim_sentence, fact_source, fact_value, padding_advice, reasons
from trainatomy.reporters.settings import may_change, plan_name
from trainatomy.results.comparison import Comparison, ComparisonRow
from trainatomy.results.diagnosis import Diagnosis
from trainatomy.results.difference import Difference
from trainatomy.results.fit import Candidate, Change, Fit, FitAcross, GPUOption, Price, Remedy, Shortage
from trainatomy.results.loader import LoaderReport
from trainatomy.results.measurement import Measurement, RankMeasurement
from trainatomy.results.operation_breakdown import OperationBreakdown
from trainatomy.results.plan import Plan, Scaling
from trainatomy.results.prediction import Prediction
from trainatomy.results.record import History, Record

PREDICTION = "trainatomy/prediction/1"
COMPARISON = "trainatomy/comparison/1"
MEASUREMENT = "trainatomy/measurement/1"
RECORD = SCHEMA
HISTORY = "trainatomy/history/1"
DIFFERENCE = "trainatomy/difference/1"
OPERATIONS = "trainatomy/operations/1"
FIT = "trainatomy/fit/1"
FIT_ACROSS = "trainatomy/fit-across/1"
SHORTAGE = "trainatomy/shortage/1"
GPUS = "trainatomy/cards/1"
LOADER = "trainatomy/loader/1"
ARCHITECTURES = "trainatomy/architectures/1"

COMPARED = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
"""The figures that a measurement and a prediction have in common."""

SPREADS = (*COMPARED, "step_seconds", "samples_per_second", "tokens_per_second")
"""The figures whose spread over the repeats a measured comparison gives."""


def to_json(
    value: Prediction | Measurement | Comparison | Fit | FitAcross | Shortage | Diagnosis, *, version: int = 1
) -> dict[str, Any]:
    """Return a result as an object of plain JSON types.

    Args:
        value: A prediction, a measurement, a comparison of several trainings, the outcome of a search, or a
            diagnosis of a machine.
        version: Version of the form.  Version 2 is a draft for predictions, whose keys may still change.

    Raises:
        ValueError: There is no such version for this kind of value.
    """
    if version == 2 and isinstance(value, Prediction):
        return {"schema": PREDICTION_2, **renamed_v2(to_plain(PredictionV2.of(value)))}
    if version != 1:
        raise ValueError(f"there is no version {version} of the JSON of a {type(value).__name__}")
    if isinstance(value, Diagnosis):
        return diagnosis_to_json(value)
    if isinstance(value, Comparison):
        return comparison_to_json(value)
    if isinstance(value, Fit):
        return fit_to_json(value)
    if isinstance(value, FitAcross):
        return fit_across_to_json(value)
    if isinstance(value, Shortage):
        return shortage_to_json(value)
    if isinstance(value, Prediction):
        return {"schema": PREDICTION, **_predicted(value)}
    return {"schema": MEASUREMENT, **to_plain(value)}


def comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the rows in order, each a prediction, with measured figures in a measured comparison.

    ``published`` holds what others measured for the rows, in the same order, or null; ``seconds`` are for ``samples``.
    """
    known = [row.published for row in comparison.rows if row.published is not None]
    published: dict[str, Any] = {
        "source": comparison.source,
        "memory_bytes": [figures.memory_bytes for figures in known],
    }
    if comparison.samples is not None:
        published |= {"samples": comparison.samples, "seconds": [figures.seconds for figures in known]}
    rows = [
        {**_row(row, measured=comparison.measured), "plan": _plan(row.plan), "scaling": _scaling(scaling)}
        for row, scaling in zip(comparison.rows, comparison.scaling(), strict=True)
    ]
    if comparison.costs_per_hour:
        for row, made in zip(comparison.rows, rows, strict=True):
            made["cost_per_million_samples"] = comparison.cost_per_million_samples(row)
    value = {"schema": COMPARISON, "rows": rows, "published": published if known else None}
    return {**value, "group": comparison.group, "repeats": comparison.repeats} if comparison.measured else value


def _row(row: ComparisonRow, *, measured: bool) -> dict[str, Any]:
    """Return a prediction (or name and workload without one), and the measured figures in a measured comparison."""
    made = to_json(row.prediction) if row.prediction else {"name": row.name, "workload": to_plain(row.workload)}
    if not measured:
        return made if row.prediction else {**made, "prediction_error": row.prediction_error}
    return {
        **made,
        "name": row.name,
        "status": row.status,
        "measured": {name: to_plain(row.spread(name)) for name in SPREADS},
        "gap": {name: row.gap(name) for name in COMPARED},
        "measurements": [to_json(each) for each in row.measurements],
        "errors": list(row.errors),
        "prediction_error": row.prediction_error,
    }


def _plan(plan: Plan) -> dict[str, Any]:
    return {"name": plan_name(plan), **to_plain(plan)}


def _scaling(scaling: Scaling | None) -> dict[str, Any] | None:
    """Return the throughput on all GPUs and on each."""
    if scaling is None:
        return None
    return {
        "samples_per_second": scaling.samples_per_second,
        "samples_per_second_per_gpu": scaling.samples_per_second_per_gpu,
        "efficiency": scaling.efficiency,
    }


def measurement_to_json(measurement: Measurement, prediction: Prediction | None) -> dict[str, Any]:
    """Return a measurement with the ``prediction`` of the same workload and the ``gap`` of each common figure."""
    gap: dict[str, Any] | None = None
    if prediction is not None:
        gap = {name: relative_gap(measurement, prediction, name) for name in COMPARED}
        gap["components"] = component_gaps(measurement, prediction)
        if measurement.other_ranks:
            gap["ranks"] = {str(number): rank_gaps(rank, prediction) for number, rank in measurement.ranks.items()}
    at_pace = None if prediction is None else _at_host_pace(measurement, prediction)
    return {
        **to_json(measurement),
        "prediction": prediction and to_json(prediction),
        "gap": gap,
        "at_host_pace": at_pace,
    }


def _at_host_pace(measurement: Measurement, prediction: Prediction) -> dict[str, float | None] | None:
    """Return the pace of the host beside the assumed one, and the prediction at it; ``None`` if it is not known."""
    time, pace = prediction.time, measurement.host_pace
    relative = None if time is None or pace is None else time.pace_of(pace)
    if time is None or relative is None:
        return None
    predicted, measured = time.step_seconds_at(relative), measurement.step_seconds
    gap = predicted / measured - 1 if predicted is not None and measured else None
    quiet = time.step_seconds
    return {"pace": relative, "step_seconds": predicted, "gap": gap, "quiet_step_seconds": quiet}


def rank_gaps(rank: RankMeasurement, prediction: Prediction) -> dict[str, float | None]:
    """Return predicted / measured - 1 of each of ``COMPARED`` in a rank; one without a prediction is like rank 0."""
    memory = prediction.ranks.get(rank.rank, prediction.ranks[prediction.rank]).memory
    measured = {name: getattr(rank, name) if rank.status == "completed" else None for name in COMPARED}
    return {name: getattr(memory, name) / size - 1 if size else None for name, size in measured.items()}


def component_gaps(measurement: Measurement, prediction: Prediction) -> dict[str, float] | None:
    """Return (predicted - measured) / measured total by component; ``None`` without a breakdown of a completed run."""
    if measurement.memory is None or measurement.status != "completed":
        return None
    measured, total = measurement.memory.components.as_dict(), measurement.memory.components.total_bytes
    predicted = prediction.memory.components
    return {name: (predicted[name] - size) / total for name, size in measured.items()}


def relative_gap(measurement: Measurement, prediction: Prediction, name: str) -> float | None:
    """Return predicted / measured - 1 of one of ``COMPARED``; ``None`` if not measured or not completed."""
    measured: int | None = getattr(measurement, name)
    predicted: int = getattr(prediction.memory, name)
    return predicted / measured - 1 if measured and measurement.status == "completed" else None


def record_to_json(record: Record) -> dict[str, Any]:
    """Return a record with the keys of its file; values that files keep as codes are sentences here."""
    prediction = record.prediction and _predicted(record.prediction)
    return {"schema": RECORD, **to_plain(record), "prediction": prediction}


def loader_to_json(report: LoaderReport) -> dict[str, Any]:
    """Return a timed DataLoader: ``timings`` by settings, ``best`` a place among them."""
    return {"schema": LOADER, **to_plain(report)}


def history_to_json(history: History) -> dict[str, Any]:
    """Return the rows under ``records``, oldest first, and unreadable files under ``skipped``."""
    return {"schema": HISTORY, **to_plain(history)}


def difference_to_json(difference: Difference) -> dict[str, Any]:
    """Return a difference, with the change or ratio of each figure beside its values."""
    shifts = ("components", "lines", "figures", "nvml")
    changes = {
        name: [{**to_plain(each), "change": each.change} for each in getattr(difference, name)] for name in shifts
    }
    paces = [{**to_plain(each), "ratio": each.ratio} for each in difference.paces]
    return {"schema": DIFFERENCE, **to_plain(difference), **changes, "paces": paces}


def operations_to_json(breakdown: OperationBreakdown) -> dict[str, Any]:
    """Return an operation breakdown, with sentences for claims and paddings."""
    plain = to_plain(breakdown)
    claims = [{**to_plain(claim), "sentence": claim_sentence(claim)} for claim in breakdown.claims]
    paddings = [{**to_plain(padding), "how": padding_advice(padding)} for padding in breakdown.paddings]
    return {"schema": OPERATIONS, **plain, "claims": claims, "paddings": paddings}


def fit_to_json(fit: Fit) -> dict[str, Any]:
    """Return the outcome of a search.

    ``best`` has its whole memory breakdown, other candidates have the three totals.  ``settings`` are texts to paste.
    """
    some = next((each for each in (fit.best, *fit.candidates, *fit.too_large) if each is not None), None)
    return {
        "schema": FIT,
        "name": fit.name,
        "workload": to_plain(fit.workload),
        "gpu": to_plain(fit.gpu),
        "goal": fit.goal,
        "effective_batch_size": fit.effective_batch_size,
        "allowed": list(fit.allowed),
        "best": fit.best and _candidate(fit.best, whole=True),
        "given": fit.given and _candidate(fit.given),
        "candidates": list(map(_candidate, fit.candidates)),
        "by_gpus": list(map(_candidate, fit.by_gpus)),
        "ties": list(map(_candidate, fit.ties)),
        "prices": list(map(_price, fit.prices)),
        "remedies": list(map(_remedy, fit.shortage.remedies)) if fit.shortage else [],
        "front": list(map(_candidate, fit.front)),
        "too_large": list(map(_candidate, fit.too_large)),
        "limits": {
            "gpu_memory_bytes": fit.gpu.memory_bytes,
            "headroom": fit.headroom,
            "usable_bytes": fit.usable_bytes,
            "maximum": to_plain(fit.maximum),
        },
        "counts": to_plain(fit.counts),
        "settings": fit.best and _settings(fit.best, fit.name),
        "measured": fit.measured and comparison_to_json(fit.measured),
        "notes": list(map(fit_note, fit.notes)),
        "interrupted": fit.interrupted,
        "versions": dict(some.prediction.versions) if some else {},
    }


def fit_across_to_json(across: FitAcross) -> dict[str, Any]:
    """Return a search on several GPUs under ``options``, those on which the training fits first."""
    return {
        "schema": FIT_ACROSS,
        "name": across.name,
        "workload": to_plain(across.workload),
        "effective_batch_size": across.effective_batch_size,
        "headroom": across.headroom,
        "allowed": list(across.allowed),
        "options": list(map(_gpu_option, across.options)),
        "refused": list(across.refused),
        "seconds": across.seconds,
        "interrupted": across.interrupted,
    }


def shortage_to_json(shortage: Shortage) -> dict[str, Any]:
    """Return what a training needs that does not fit, and what would make it fit under ``remedies``."""
    point = shortage.given.prediction.out_of_memory
    return {
        "schema": SHORTAGE,
        "name": shortage.given.prediction.name,
        "gpu": to_plain(shortage.given.prediction.gpu),
        "given": _candidate(shortage.given, whole=True),
        "out_of_memory": to_plain(point),
        "usable_bytes": shortage.usable_bytes,
        "missing_bytes": shortage.missing_bytes,
        "headroom": shortage.headroom,
        "remedies": list(map(_remedy, shortage.remedies)),
        "seconds": shortage.seconds,
        "interrupted": shortage.interrupted,
        "versions": dict(shortage.given.prediction.versions),
    }


def _gpu_option(option: GPUOption) -> dict[str, Any]:
    """Return the best candidate on a GPU, or the smallest that does not fit and what is missing for it."""
    fit = option.fit
    smallest = fit.too_large[0] if fit.best is None and fit.too_large else None
    return {
        "gpu": to_plain(option.gpu),
        "usable_bytes": fit.usable_bytes,
        "best": fit.best and _candidate(fit.best, whole=True),
        "smallest": smallest and _candidate(smallest),
        "missing_bytes": smallest and max(0, smallest.device_bytes - fit.usable_bytes),
        "cost_per_hour": option.cost_per_hour,
        "cost_per_million_samples": option.cost_per_million_samples,
        "counts": to_plain(fit.counts),
        "notes": list(map(fit_note, fit.notes)),
    }


def _candidate(candidate: Candidate, *, whole: bool = False) -> dict[str, Any]:
    """Return a candidate, with its whole memory breakdown or the three totals."""
    prediction, time = candidate.prediction, None
    if prediction.time is not None:
        ranks = candidate.plan.data_parallel_size
        interval = [end / ranks for end in candidate.samples_per_second_interval]  # of one rank, as all times
        time = {**to_plain(prediction.time), "samples_per_second_interval": interval}
    memory = to_plain(prediction.memory)
    return {
        "changes": list(map(_change, candidate.changes)),
        "workload": to_plain(candidate.workload),
        "plan": _plan(candidate.plan),
        "fits": candidate.fits,
        "verdict": prediction.verdict,
        "room_bytes": prediction.room_bytes,
        "memory": memory if whole else {name: memory[name] for name in COMPARED},
        "time": time,
        "samples_per_second": None if time is None else candidate.samples_per_second,
    }


def _change(change: Change) -> dict[str, Any]:
    return {**to_plain(change), "may_change": may_change(change)}


def _price(price: Price) -> dict[str, Any]:
    candidate = price.candidate and _candidate(price.candidate)
    fields_of = ("allowed", "device_bytes", "step_seconds", "error")
    return {
        "change": _change(price.change),
        "candidate": candidate,
        **{name: getattr(price, name) for name in fields_of},
    }


def _remedy(remedy: Remedy) -> dict[str, Any]:
    return {
        "kind": remedy.kind,
        "gpu": to_plain(remedy.candidate.prediction.gpu),
        "changes": list(map(_change, remedy.changes)),
        "candidate": _candidate(remedy.candidate),
        "device_bytes": remedy.device_bytes,
        "step_seconds": remedy.step_seconds,
    }


def _settings(candidate: Candidate, name: str) -> dict[str, str | None]:
    return {
        "launch": launch_command(candidate) if candidate.plan.world_size > 1 else None,
        "training_arguments": training_arguments_code(candidate, name),
        "yaml": workload_yaml(candidate),
        "flags": command_line_flags(candidate),
    }


def gpus_to_json(gpus: Sequence[GPU]) -> dict[str, Any]:
    """Return GPUs under ``rows``, each with its sources and assumptions by field."""
    return {"schema": GPUS, "rows": [to_plain(gpu) for gpu in gpus]}


def architectures_to_json(entries: Sequence[ArchitectureEntry]) -> dict[str, Any]:
    """Return architectures under ``rows``."""
    return {"schema": ARCHITECTURES, "rows": [to_plain(entry) for entry in entries]}


def _predicted(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as plain JSON types, with the sentences that version 1 gives as text."""
    facts = [{**to_plain(fact), "value": fact_value(fact), "source": fact_source(fact)} for fact in prediction.facts]
    figures = {**to_plain(prediction.bytes_per_parameter), "reasons": reasons(prediction)}
    return {**to_plain(prediction), "bytes_per_parameter": figures, "facts": facts}
