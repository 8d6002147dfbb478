"""The outcome of a search: settings that fit a GPU, ranked by throughput, and what every single change costs or saves.

Every candidate was executed without a GPU; none of its figures is interpolated.

A search over a script's own flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainatomy.results.comparison import Comparison
from trainatomy.results.prediction import GPUSummary, Plan, Prediction

Permission = Literal["", "precision", "optimizer", "lora", "quantization", "sequence-length", "evaluation"]
"""What a user has to allow for a change: empty for changes after which the same is trained in the same way."""
Goal = Literal["throughput", "batch", "sequence-length", "model-size"] | str
SAME_TIME = 0.005
"""Share by which the times of two candidates must differ before they count as different."""
RemedyKind = Literal["same training", "changes training", "more GPUs", "larger GPU"]


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that a candidate changes.

    Attributes:
        axis: What is varied, such as ``gradient_checkpointing`` (``search.space`` lists the axes).
        option: The option chosen, such as ``every_2``; unique within its axis.
        settings: Keys of the workload with their new values.
        permission: What the user has to allow for it.
    """

    axis: str
    option: str
    settings: Mapping[str, object]
    permission: Permission = ""

    @property
    def changes_training(self) -> bool:
        """Whether something else is trained; how a training is evaluated does not change that."""
        return self.permission not in ("", "evaluation")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A training that was executed without a GPU.

    Attributes:
        changes: What it changes in the workload that was given, the batch size first.
        workload: The whole workload, as a mapping with the keys of its file.
        prediction: Its prediction.
        fits: Whether it fits with the headroom that was asked for.
    """

    changes: tuple[Change, ...]
    workload: Mapping[str, object]
    prediction: Prediction
    fits: bool

    @property
    def name(self) -> str:
        """The training's name with the changes, for tables and records."""
        changes = ", ".join(f"{change.axis}={change.option}" for change in self.changes)
        return f"{self.prediction.name}: {changes}" if changes else self.prediction.name

    @property
    def device_bytes(self) -> int:
        """Device memory at the peak."""
        return self.prediction.memory.device_bytes

    @property
    def step_seconds(self) -> float:
        """Duration of an optimizer step, which has the same number of samples in all candidates of a search."""
        assert self.prediction.time is not None
        return self.prediction.time.step_seconds

    @property
    def plan(self) -> Plan:
        """How the training is spread over GPUs."""
        return Plan.of(self.workload)

    @property
    def samples_per_second(self) -> float:
        """Throughput of all GPUs."""
        assert self.prediction.time is not None
        return self.prediction.time.samples_per_second * self.plan.data_parallel_size

    @property
    def samples_per_second_interval(self) -> tuple[float, float]:
        """Low and high end of the interval of the throughput of all GPUs that holds in 9 of 10 cases."""
        time = self.prediction.time
        assert time is not None
        samples = self.samples_per_second * time.step_seconds
        shortest, longest = time.interval_seconds
        return samples / longest, samples / shortest

    @property
    def per_device_train_batch_size(self) -> int:
        """Samples per batch."""
        return _train(self.workload, "per_device_train_batch_size", 8)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches per optimizer step."""
        return _train(self.workload, "gradient_accumulation_steps", 1)


def _train(workload: Mapping[str, object], name: str, default: int) -> int:
    train = workload.get("train", {})
    assert isinstance(train, Mapping)
    return int(train.get(name, default))


@dataclass(frozen=True, slots=True)
class Price:
    """Cost or saving of a single change of the best candidate, everything else being equal.

    Attributes:
        change: The change.
        allowed: Whether the search was free to make it.
        candidate: The changed training, ``None`` if it could not be predicted.
        device_bytes: Change of device memory in bytes.
        step_seconds: Change of the step's duration as a share (0.29: 29 % longer); for a change of the sequence length,
            of the time per token.
        error: Why it could not be predicted.
    """

    change: Change
    allowed: bool
    candidate: Candidate | None = None
    device_bytes: int = 0
    step_seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A way to make a training fit that does not.

    Attributes:
        kind: Whether the same is trained afterwards, or that more or larger GPUs train it.
        changes: The changes, all of them together; empty for a larger GPU.
        candidate: The training with the changes.
        device_bytes: Change of device memory against the training that does not fit.
        step_seconds: Change of the step's duration as a share; ``None`` on another GPU.
    """

    kind: RemedyKind
    changes: tuple[Change, ...]
    candidate: Candidate
    device_bytes: int
    step_seconds: float | None


@dataclass(frozen=True, slots=True)
class Shortage:
    """A training that runs out of memory: what it needs, and ways to make it fit.

    Attributes:
        given: The training; of a search in which nothing fits, the candidate that needs the least memory.
        usable_bytes: Memory that it may take.
        headroom: Share of the GPU's memory that stays free.
        remedies: Ways to make it fit, in the order in which to try them; none if it fits.
        seconds: Duration of the search for them.
        interrupted: Whether that was stopped before its end.
    """

    given: Candidate
    usable_bytes: int
    headroom: float
    remedies: tuple[Remedy, ...]
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def missing_bytes(self) -> int:
        """Memory that it lacks; negative if it fits."""
        return self.given.device_bytes - self.usable_bytes

    @property
    def fits_without_headroom(self) -> bool:
        """Whether it would fit if no memory had to stay free."""
        prediction = self.given.prediction
        return self.missing_bytes > 0 and prediction.fits and self.given.device_bytes <= prediction.gpu.memory_bytes


@dataclass(frozen=True, slots=True)
class Maximum:
    """The largest batch, sequence or model that fits.

    Attributes:
        goal: What was maximised.
        value: Samples per batch, tokens per sample, layers, or the value of a key of the workload.
        parameters: Parameters of the model at that size.
        beyond: The smallest value that was executed and does not fit; ``None`` if every value tried fits.
        beyond_bytes: Device memory that it would need.
        bounded_by: What ended the search where every value fits: ``effective batch size``, ``positions of the model``
            or ``values that were tried``; empty if memory did.
        failed: Values that could not be predicted, with the reasons.
    """

    goal: Goal
    value: int
    parameters: int
    beyond: int | None = None
    beyond_bytes: int = 0
    bounded_by: str = ""
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SearchCounts:
    """Numbers of a search's candidates by outcome, which add up to ``space``.

    Attributes:
        space: Candidates in the space.
        executed: Executed without a GPU.
        too_large: Left out because their estimated memory exceeds the limit by more than the estimate's margin.
        slower: Left out because their estimated step takes longer than the best one, by more than the margin.
        dominated: Left out because options that were slower where they were tried help only where memory is short.
        failed: Could not be predicted.
        unexplored: Not looked at, because the search was interrupted.
        seconds: Duration of the search.
    """

    space: int
    executed: int
    too_large: int = 0
    slower: int = 0
    dominated: int = 0
    failed: int = 0
    unexplored: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """The settings that fit a GPU and train fastest.

    Attributes:
        name: Name of the training.
        workload: The workload as it was given.
        gpu: The GPU.
        goal: ``throughput``, or what was maximised.
        effective_batch_size: Samples per optimizer step on all GPUs, the same in all candidates.
        headroom: Share of the GPU's memory that stays free.
        usable_bytes: Memory that a candidate may take.
        allowed: What the user allowed to change.
        given: The workload as it was given, with the effective batch size.
        best: The candidate that is recommended; ``None`` if nothing fits.
        candidates: Every candidate that was executed and fits, the best first.
        too_large: Candidates that were executed and do not fit, the smallest first.
        ties: Those runner-ups that may be faster than the best one: the predicted times differ by less than the error
            that such differences have.
        prices: What every single change of the best candidate costs or saves.
        shortage: If nothing fits, what the smallest candidate needs, and ways to make it fit.
        maximum: The largest value, if the goal is not throughput.
        counts: How the candidates were dealt with.
        notes: Further codes for the reader (``reporters.search_labels.FIT_NOTES``), with their values.
        interrupted: Whether the search was stopped before its end.
        measured: The best candidates measured on this machine's GPU.
        by_gpus: Of a training on several GPUs, the best candidate on each number of them, the fewest first; where
            nothing fits, the smallest.
    """

    name: str
    workload: Mapping[str, object]
    gpu: GPUSummary
    goal: Goal
    effective_batch_size: int
    headroom: float
    usable_bytes: int
    allowed: tuple[Permission, ...]
    given: Candidate | None
    best: Candidate | None
    candidates: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    ties: tuple[Candidate, ...]
    prices: tuple[Price, ...]
    shortage: Shortage | None
    maximum: Maximum | None
    counts: SearchCounts
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    measured: Comparison | None = None
    by_gpus: tuple[Candidate, ...] = ()

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """The predictions of all executed candidates, those that fit first."""
        return tuple(each.prediction for each in (*self.candidates, *self.too_large))

    @property
    def runner_ups(self) -> tuple[Candidate, ...]:
        """The next best candidates, without those that a faster one of the same batch size beats in memory too.

        Candidates of the same batch size whose times differ by less than ``SAME_TIME`` count as one.
        """
        shown: list[Candidate] = []
        for each in self.candidates:
            same = [one for one in shown if one.per_device_train_batch_size == each.per_device_train_batch_size]
            is_slower = all(each.step_seconds > one.step_seconds * (1 + SAME_TIME) for one in same)
            if is_slower and all(each.device_bytes < one.device_bytes for one in same):
                shown.append(each)
        return tuple(shown[1:])

    @property
    def front(self) -> tuple[Candidate, ...]:
        """The Pareto front of all executed candidates: none needs less memory and is faster; the smallest first."""
        ranked = sorted((*self.candidates, *self.too_large), key=lambda each: (each.device_bytes, each.step_seconds))
        front: list[Candidate] = []
        for each in ranked:
            if not front or each.step_seconds < front[-1].step_seconds:
                front.append(each)
        return tuple(front)


@dataclass(frozen=True, slots=True)
class GPUOption:
    """A GPU on which a training might run.

    Attributes:
        gpu: The GPU.
        fit: The search on it.
        cost_per_hour: Its price per hour, as the user gave it.
    """

    gpu: GPUSummary
    fit: Fit
    cost_per_hour: float | None = None

    @property
    def cost_per_million_samples(self) -> float | None:
        """Cost of training on a million samples."""
        if self.cost_per_hour is None or self.fit.best is None:
            return None
        return self.cost_per_hour / 3600 / self.fit.best.samples_per_second * 1e6


@dataclass(frozen=True, slots=True)
class FitAcross:
    """One training on several GPUs: the GPUs on which it fits, the fastest first, then the others.

    Attributes:
        name: Name of the training.
        workload: The workload as it was given.
        effective_batch_size: Samples per optimizer step.
        headroom: Share of each GPU's memory that stays free.
        allowed: What the user allowed to change.
        options: The GPUs.
        refused: Why other GPUs cannot run the training at all, such as for want of bf16.
        seconds: Duration of the search.
        interrupted: Whether it was stopped before its end.
    """

    name: str
    workload: Mapping[str, object]
    effective_batch_size: int
    headroom: float
    allowed: tuple[Permission, ...]
    options: tuple[GPUOption, ...]
    refused: tuple[str, ...] = ()
    seconds: float = 0.0
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class ScriptCandidate:
    """A script with some of its flags set.

    ``message`` says why there is no prediction, or what ended it early. ``exit_code`` is that of the script's error, 0
    without one.
    """

    flags: Mapping[str, str]
    command: tuple[str, ...]
    prediction: Prediction | None
    message: str = ""
    exit_code: int = 0

    @property
    def failed(self) -> bool:
        """True if an error ended it."""
        return self.prediction is None or self.exit_code != 0

    @property
    def fits(self) -> bool:
        """True if it ran without an error, and fits."""
        return not self.failed and self.prediction is not None and self.prediction.fits

    @property
    def samples_per_second(self) -> float:
        """Samples per second on the GPU; 0 where they are not known."""
        time = self.prediction.time if self.prediction is not None else None
        return time.samples_per_second if time is not None else 0.0


@dataclass(frozen=True, slots=True)
class ScriptFit:
    """Candidates in the order in which they were run; ``best`` is the fastest that fits.

    Where the largest value of a flag was looked for, ``maximized`` is its name, candidates are in the order of its
    values, and ``best`` is the largest that fits.
    """

    name: str
    gpu: str
    candidates: tuple[ScriptCandidate, ...]
    maximized: str = ""

    @property
    def failed(self) -> tuple[ScriptCandidate, ...]:
        """The candidates that an error ended."""
        return tuple(each for each in self.candidates if each.failed)

    @property
    def best(self) -> ScriptCandidate | None:
        """The candidate that fits and trains most samples per second, or has the largest value."""
        fitting = [each for each in self.candidates if each.fits]
        if self.maximized:
            return fitting[-1] if fitting else None
        return max(fitting, key=lambda each: each.samples_per_second, default=None)
