"""Outcomes of searches as JSON objects: candidates, prices, remedies, settings to paste."""

from __future__ import annotations

from typing import Any

from trainatomy.records.create import to_plain
from trainatomy.reporters.export import command_line_flags, launch_command, training_arguments_code, workload_yaml
from trainatomy.reporters.search_sentences import fit_note
from trainatomy.reporters.settings import may_change, plan_name
from trainatomy.reporters.subject_sentences import shared_subject
from trainatomy.results.fit import Candidate, Change, Fit, FitAcross, GPUOption, Price, Remedy, Shortage
from trainatomy.results.memory import TOTALS
from trainatomy.results.prediction import Plan

FIT = "trainatomy/fit/1"
FIT_ACROSS = "trainatomy/fit-across/1"
SHORTAGE = "trainatomy/shortage/1"


def search_to_json(fit: Fit, measured: dict[str, Any] | None) -> dict[str, Any]:
    """Return the outcome of a search.

    ``best`` has its whole memory breakdown, other candidates have the three totals.  ``settings`` are texts to paste.

    Args:
        fit: The outcome.
        measured: Its measured runs.
    """
    some = next((each for each in (fit.best, *fit.candidates, *fit.too_large) if each is not None), None)
    return {
        "schema": FIT,
        "name": fit.name,
        "subject": shared_subject(fit.predictions),
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
        "measured": measured,
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
        "plan": plan_to_json(candidate.plan),
        "fits": candidate.fits,
        "verdict": prediction.verdict,
        "room_bytes": prediction.room_bytes,
        "memory": memory if whole else {name: memory[name] for name in TOTALS},
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


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan of parallelism with its name."""
    return {"name": plan_name(plan), **to_plain(plan)}
