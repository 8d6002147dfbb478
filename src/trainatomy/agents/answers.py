"""Answers in a few fields, computed from predictions and searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from trainatomy import api
from trainatomy.catalog.instances import find_instance
from trainatomy.reporters import search_sentences, sentences, settings
from trainatomy.reporters.subject_sentences import shared_subject
from trainatomy.reporters.text.prediction import verdict_line
from trainatomy.requests.fitting import FitRequest
from trainatomy.requests.predicting import PredictRequest, Training
from trainatomy.results.fit import Candidate, Permission
from trainatomy.results.prediction import Plan, Prediction
from trainatomy.workload.dialects.answer import answer_in
from trainatomy.workload.overrides import merge
from trainatomy.workload.reading import read_text

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload

GIB = 1024**3
REMEDIES = 6
"""Remedies that an answer lists."""


@dataclass(frozen=True, slots=True)
class Question:
    """What an agent asks about a training.

    Attributes:
        task: What is wanted.
        training: A workload or a framework's configuration, as text or the name of a file, or a framework's command;
            empty where the settings describe the training alone.
        settings: Settings over it, with the names of ``TrainingArguments`` and of options of the command line.
        allow: What a search may change of the training.
    """

    task: Literal["predict", "fit", "why_out_of_memory"]
    training: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    allow: tuple[Permission, ...] = ()


@dataclass(frozen=True)  # the SDK takes slots for defaults
class Predicted:
    """A prediction in short.

    Attributes:
        fits: Whether it fits.
        verdict: That in one sentence.
        training: What was predicted.
        assumed: What was decided where nothing was said.
        needs_gib: Memory of the GPU at the peak, as in nvidia-smi.
        gpu_gib: Memory that the GPU has.
        step_seconds: Duration of an optimizer step; None where times are not predicted.
        step_seconds_interval: Its 90 % interval.
        samples_per_second: Of all GPUs.
        usd_per_million_samples: At the list price of the machine that was named; None without one.
        out_of_memory: Where it would stop; empty if it fits.
        memory_gib: What holds the memory at the peak, by component.
        notes: What else a reader should know.
    """

    fits: bool
    verdict: str
    training: str
    assumed: tuple[str, ...]
    needs_gib: float
    gpu_gib: float
    step_seconds: float | None
    step_seconds_interval: tuple[float, float] | None
    samples_per_second: float | None
    usd_per_million_samples: float | None
    out_of_memory: str
    memory_gib: Mapping[str, float]
    notes: tuple[str, ...]


@dataclass(frozen=True)  # the SDK takes slots for defaults
class Option:
    """Settings that were executed.

    Attributes:
        change: What they change, in words.
        keys: That as keys of the configuration that was given, or of a workload.
        also: What the launcher or the environment has to say, and what the configuration has no key for.
        fits: Whether they fit.
        needs_gib: Memory of the GPU at the peak.
        samples_per_second: Of all GPUs.
        changes_training: Whether something else is trained.
    """

    change: str
    keys: Mapping[str, Any]
    also: tuple[str, ...]
    fits: bool
    needs_gib: float
    samples_per_second: float
    changes_training: bool


@dataclass(frozen=True)  # the SDK takes slots for defaults
class Found:
    """The outcome of a search.

    Attributes:
        answer: It in one sentence.
        best: The fastest settings that fit; None where none do.
        remedies: What would make it fit, the first to try first.
    """

    answer: str
    best: Option | None
    remedies: tuple[Option, ...]


class Oracle:
    """Answers questions in its process."""

    def answer(self, question: Question) -> Predicted | Found:
        """Return the answer to a question.

        Raises:
            TrainatomyError: Those of ``predict`` and ``fit``.
        """
        flags = dict(question.settings)
        workload = read_text(question.training, flags) if question.training.strip() else merge(None, flags)
        if question.task == "predict":
            return predicted(api.predict_training(Training(workload), PredictRequest()), workload)
        request = FitRequest(allow=question.allow, jobs=1)
        if question.task == "fit":
            return _searched(workload, request)
        return _remedied(workload, request)


def predicted(prediction: Prediction, workload: Workload | None = None) -> Predicted:
    """Return a prediction in short; of a script there is no workload."""
    time, point, gpus = prediction.time, prediction.out_of_memory, Plan.of(prediction.workload).data_parallel_size
    rate = None if time is None else time.samples_per_second * gpus
    components = prediction.memory.components.as_dict()
    return Predicted(
        fits=prediction.fits,
        verdict=str(verdict_line(prediction)),
        training=shared_subject([prediction]),
        assumed=prediction.leading_notes,
        needs_gib=_gib(prediction.memory.device_bytes),
        gpu_gib=_gib(prediction.gpu.memory_bytes),
        step_seconds=None if time is None else time.step_seconds,
        step_seconds_interval=None if time is None else time.interval_seconds,
        samples_per_second=rate,
        usd_per_million_samples=_price(workload, rate),
        out_of_memory="" if point is None else sentences.out_of_memory(point, predicted=True),
        memory_gib={name: _gib(size) for name, size in components.items() if size},
        notes=prediction.notes,
    )


def _price(workload: Workload | None, samples_per_second: float | None) -> float | None:
    if workload is None or workload.instance is None or not samples_per_second:
        return None
    hourly = find_instance(workload.instance).usd_per_hour
    return None if hourly is None else hourly * workload.parallel.nodes / 3600 / samples_per_second * 1e6


def _gib(size: int) -> float:
    return round(size / GIB, 2)


def _searched(workload: Workload, request: FitRequest) -> Found:
    found = api.search_settings(Training(workload), request)
    if found.best is not None:
        return Found(search_sentences.fit_answer(found, found.best), _option(workload, found.best), ())
    shortage = found.shortage
    if shortage is None:
        return Found(f"No setting was found that fits on {found.gpu.name}.", None, ())
    return Found(
        search_sentences.nothing_fits(shortage),
        None,
        _remedies(workload, [each.candidate for each in shortage.remedies]),
    )


def _remedied(workload: Workload, request: FitRequest) -> Found:
    shortage = api.why_out_of_memory(workload, request=request)
    prediction = shortage.given.prediction
    does = "fits" if shortage.given.fits else "does not fit"
    answer = f"It {does} on {prediction.gpu.name}: it {search_sentences.shortage(shortage)}."
    return Found(answer, None, _remedies(workload, [each.candidate for each in shortage.remedies]))


def _remedies(workload: Workload, candidates: Sequence[Candidate]) -> tuple[Option, ...]:
    ordered = sorted(candidates, key=lambda each: not each.fits)
    return tuple(_option(workload, each) for each in ordered[:REMEDIES])


def _option(workload: Workload, candidate: Candidate) -> Option:
    keys: dict[str, Any] = {key: value for change in candidate.changes for key, value in change.settings.items()}
    also: list[str] = []
    if workload.origin is not None:
        change = answer_in(workload.origin, workload.to_mapping(), candidate.workload)
        keys = dict(change.keys)
        also = [*change.outside, *(f"no key for {key}: {value}" for key, value in change.unsaid.items())]
    words = settings.options(candidate.changes) or candidate.prediction.gpu.name
    changes_training = any(change.changes_training for change in candidate.changes)
    needs, rate = _gib(candidate.device_bytes), candidate.samples_per_second
    return Option(words, keys, tuple(also), candidate.fits, needs, rate, changes_training)
