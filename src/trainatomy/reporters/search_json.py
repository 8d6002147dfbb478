"""What searches print with ``--json``: candidates, prices, remedies, settings to paste."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from trainatomy.reporters.export import command_line_flags, launch_command, training_arguments_code, workload_yaml
from trainatomy.reporters.json_format import Derived, Format, view
from trainatomy.reporters.search_sentences import fit_note
from trainatomy.reporters.settings import may_change, plan_name
from trainatomy.reporters.subject_sentences import shared_subject
from trainatomy.results.fit import (
    Candidate,
    Change,
    Fit,
    FitAcross,
    Goal,
    GPUOption,
    Maximum,
    Permission,
    Price,
    Remedy,
    RemedyKind,
    SearchCounts,
    Shortage,
)
from trainatomy.results.memory import Memory, OutOfMemoryPoint, Verdict
from trainatomy.results.prediction import GPUSummary, Plan
from trainatomy.results.time import Time


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateTime(Time):
    """Predicted duration of a step of one rank, with the interval of its throughput."""

    samples_per_second_interval: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Totals:
    """The three totals of a memory breakdown."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True)
class WrittenCandidate:
    """A training that was executed without a GPU."""

    changes: tuple[Change, ...]
    workload: dict[str, object]
    plan: Plan
    fits: bool
    verdict: Verdict
    room_bytes: int
    memory: Totals
    time: CandidateTime | None
    samples_per_second: float | None


@dataclass(frozen=True, slots=True)
class WholeCandidate(WrittenCandidate):
    """A training that was executed without a GPU, with its whole memory breakdown."""

    memory: Memory  # type: ignore[assignment]


_Form = TypeVar("_Form", bound=WrittenCandidate)


def _candidate(candidate: Candidate, kind: type[_Form]) -> _Form:
    prediction, time = candidate.prediction, None
    if prediction.time is not None:
        ranks = candidate.plan.data_parallel_size
        low, high = candidate.samples_per_second_interval
        interval = (low / ranks, high / ranks)  # of one rank, as all times
        time = view(CandidateTime, prediction.time, samples_per_second_interval=interval)
    return view(
        kind,
        candidate,
        verdict=prediction.verdict,
        room_bytes=prediction.room_bytes,
        memory=prediction.memory if kind is WholeCandidate else view(Totals, prediction.memory),
        time=time,
        samples_per_second=None if time is None else candidate.samples_per_second,
    )


def _short(candidate: Candidate | None) -> WrittenCandidate | None:
    return None if candidate is None else _candidate(candidate, WrittenCandidate)


def _whole(candidate: Candidate | None) -> WholeCandidate | None:
    return None if candidate is None else _candidate(candidate, WholeCandidate)


@dataclass(frozen=True, slots=True)
class WrittenPrice:
    """Cost or saving of a single change of the best candidate, everything else being equal."""

    change: Change
    candidate: WrittenCandidate | None
    allowed: bool
    device_bytes: int
    step_seconds: float
    error: str

    @classmethod
    def of(cls, price: Price) -> WrittenPrice:
        """Return the form of a price."""
        return view(cls, price, candidate=_short(price.candidate))


@dataclass(frozen=True, slots=True)
class WrittenRemedy:
    """A way to make a training fit that does not."""

    kind: RemedyKind
    gpu: GPUSummary
    changes: tuple[Change, ...]
    candidate: WrittenCandidate
    device_bytes: int
    step_seconds: float | None

    @classmethod
    def of(cls, remedy: Remedy) -> WrittenRemedy:
        """Return the form of a remedy."""
        return view(cls, remedy, gpu=remedy.candidate.prediction.gpu, candidate=_short(remedy.candidate))


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory of the GPU, the share that stays free, what a candidate may take, and the largest value that fits."""

    gpu_memory_bytes: int
    headroom: float
    usable_bytes: int
    maximum: Maximum | None


@dataclass(frozen=True, slots=True)
class Settings:
    """The best settings as texts to paste; `launch` starts a training on several GPUs."""

    launch: str | None
    training_arguments: str
    yaml: str
    flags: str

    @classmethod
    def of(cls, candidate: Candidate, name: str) -> Settings:
        """Return the settings of a candidate."""
        launch = launch_command(candidate) if candidate.plan.world_size > 1 else None
        code = training_arguments_code(candidate, name)
        return cls(launch, code, workload_yaml(candidate), command_line_flags(candidate))


@dataclass(frozen=True, slots=True)
class WrittenFit:
    """The outcome of a search.

    `best` has its whole memory breakdown, other candidates have the three totals. `measured` are the measured
    candidates, as `compare --measure --json`.
    """

    name: str
    subject: str
    workload: dict[str, object]
    gpu: GPUSummary
    goal: Goal
    effective_batch_size: int
    allowed: tuple[Permission, ...]
    best: WholeCandidate | None
    given: WrittenCandidate | None
    candidates: tuple[WrittenCandidate, ...]
    by_gpus: tuple[WrittenCandidate, ...]
    ties: tuple[WrittenCandidate, ...]
    prices: tuple[WrittenPrice, ...]
    remedies: tuple[WrittenRemedy, ...]
    front: tuple[WrittenCandidate, ...]
    too_large: tuple[WrittenCandidate, ...]
    limits: Limits
    counts: SearchCounts
    settings: Settings | None
    measured: dict[str, Any] | None
    notes: tuple[str, ...]
    interrupted: bool
    versions: dict[str, str]

    @classmethod
    def of(cls, fit: Fit, measured: dict[str, Any] | None) -> WrittenFit:
        """Return the form of the outcome; ``measured``: its measured runs as JSON."""
        some = next((each for each in (fit.best, *fit.candidates, *fit.too_large) if each is not None), None)
        lists = ("candidates", "by_gpus", "ties", "front", "too_large")
        shorts: dict[str, Any] = {name: tuple(map(_short, getattr(fit, name))) for name in lists}
        return view(
            cls,
            fit,
            subject=shared_subject(fit.predictions),
            best=_whole(fit.best),
            given=_short(fit.given),
            **shorts,
            prices=tuple(map(WrittenPrice.of, fit.prices)),
            remedies=tuple(map(WrittenRemedy.of, fit.shortage.remedies)) if fit.shortage else (),
            limits=Limits(fit.gpu.memory_bytes, fit.headroom, fit.usable_bytes, fit.maximum),
            settings=fit.best and Settings.of(fit.best, fit.name),
            measured=measured,
            notes=tuple(map(fit_note, fit.notes)),
            versions=some.prediction.versions if some else {},
        )


@dataclass(frozen=True, slots=True)
class WrittenOption:
    """The best candidate on a GPU, or the smallest that does not fit and what is missing for it."""

    gpu: GPUSummary
    usable_bytes: int
    best: WholeCandidate | None
    smallest: WrittenCandidate | None
    missing_bytes: int | None
    cost_per_hour: float | None
    cost_per_million_samples: float | None
    counts: SearchCounts
    notes: tuple[str, ...]

    @classmethod
    def of(cls, option: GPUOption) -> WrittenOption:
        """Return the form of a GPU's outcome."""
        fit = option.fit
        smallest = fit.too_large[0] if fit.best is None and fit.too_large else None
        return view(
            cls,
            option,
            usable_bytes=fit.usable_bytes,
            best=_whole(fit.best),
            smallest=_short(smallest),
            missing_bytes=smallest and max(0, smallest.device_bytes - fit.usable_bytes),
            counts=fit.counts,
            notes=tuple(map(fit_note, fit.notes)),
        )


@dataclass(frozen=True, slots=True)
class WrittenAcross:
    """A search on several GPUs, those on which the training fits first."""

    name: str
    workload: dict[str, object]
    effective_batch_size: int
    headroom: float
    allowed: tuple[Permission, ...]
    options: tuple[WrittenOption, ...]
    refused: tuple[str, ...]
    seconds: float
    interrupted: bool

    @classmethod
    def of(cls, across: FitAcross) -> WrittenAcross:
        """Return the form of the outcome."""
        return view(cls, across, options=tuple(map(WrittenOption.of, across.options)))


@dataclass(frozen=True, slots=True)
class WrittenShortage:
    """What a training needs that does not fit, and what would make it fit."""

    name: str
    gpu: GPUSummary
    given: WholeCandidate
    out_of_memory: OutOfMemoryPoint | None
    usable_bytes: int
    missing_bytes: int
    headroom: float
    remedies: tuple[WrittenRemedy, ...]
    seconds: float
    interrupted: bool
    versions: dict[str, str]

    @classmethod
    def of(cls, shortage: Shortage) -> WrittenShortage:
        """Return the form of a shortage."""
        prediction = shortage.given.prediction
        kept = {name: getattr(prediction, name) for name in ("name", "gpu", "out_of_memory", "versions")}
        remedies = tuple(map(WrittenRemedy.of, shortage.remedies))
        return view(cls, shortage, given=_whole(shortage.given), remedies=remedies, **kept)


_KEYS = {Plan: Derived(first={"name": plan_name}), Change: Derived(last={"may_change": may_change})}
FIT = Format("trainatomy/fit/1", "Settings that fit a GPU", WrittenFit, keys=_KEYS)
FIT_ACROSS = Format("trainatomy/fit-across/1", "Settings that fit several GPUs", WrittenAcross, WrittenAcross.of, _KEYS)
SHORTAGE = Format(
    "trainatomy/shortage/1", "What a training needs that does not fit", WrittenShortage, WrittenShortage.of, _KEYS
)
