"""The request of a search for settings that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from trainatomy.catalog.calibrations import Calibration
from trainatomy.errors import WorkloadError
from trainatomy.option import keys, names, option, share, shared_fields
from trainatomy.requests.predicting import CALIBRATION, EXECUTOR, HOST_MEMORY, JOBS, TRUST_REMOTE_CODE, PredictRequest
from trainatomy.results.fit import Goal, Permission
from trainatomy.workload.document import suggestion
from trainatomy.workload.schema import Workload
from trainatomy.workload.sweep import effective_batch_size_of

PERMISSIONS: tuple[Permission, ...] = (
    "precision",
    "optimizer",
    "lora",
    "quantization",
    "sequence-length",
    "evaluation",
)
"""Permissions that a user can give, in the order of the documentation."""
GOALS: tuple[Goal, ...] = ("batch", "sequence-length", "model-size")
"""What may be as large as fits, in place of the throughput."""
DEFAULT_HEADROOM = 0.05
MANY_CANDIDATES = 100
"""About as many training runs as a search executes, for the number of processes."""
CanApply = Callable[[Mapping[str, object]], bool]
"""Says whether settings, keys of the workload with their values, can be applied."""
Translated = Callable[[Mapping[str, object]], Mapping[str, object] | None]
"""Returns settings as what is trained has them, None where it cannot."""


def _goal(text: str) -> Goal:
    """Return a goal as it is named, a key of the workload, or a flag of a script, as they are."""
    goal = text.strip().replace("_", "-")
    return goal if goal in GOALS else text.strip()


class Wanted(NamedTuple):
    """A key or a flag whose largest value is wanted, and the distance of the values to try; None: not said."""

    name: str
    step: int | None

    @classmethod
    def of(cls, goal: Goal) -> Wanted:
        """Read ``data.image_size:32``.

        Raises:
            WorkloadError: The step is no number.
        """
        name, colon, step = goal.partition(":")
        if colon and (not step.isdigit() or int(step) < 1):
            raise WorkloadError(f"--maximize {goal}: the step after the colon must be a whole number of at least 1")
        return cls(name, int(step) if colon else None)


@dataclass(frozen=True, slots=True)
class FitRequest:
    """How to search for the settings of a training.

    Attributes:
        effective_batch_size: Samples per optimizer step; by default those of the workload.
        headroom: Share of the GPU's memory that must stay free.
        allow: Changes of what is trained that the search may make: "precision", "optimizer", "lora",
            "quantization", "sequence-length", "evaluation".
        keep: Settings that the search may not vary, such as "gradient_checkpointing" or "attention"
            (``trainatomy.search.axes`` lists them).
        exhaustive: Execute every candidate instead of leaving out those that cannot win.
        try_compile: Predict the best settings with ``torch.compile`` too, whole and layer by layer.
        prices: Execute the workload as it was given too, and the single changes of the best settings, for what each
            costs or saves.
        can_apply: A function that gets the settings of an option, keys of the workload with their values, and returns
            whether the caller can apply them; other options are left out. By default all can be applied.
        translated: Returns what settings are for what is trained, such as a framework that makes more of them; None
            where they cannot be applied. They are taken as they are by default.
        maximize: "throughput", or "batch", "sequence-length", "model-size", or a key of the workload with a whole
            number ("data.image_size", "data.image_size:14" in steps): the largest one that fits.
        measure: Run this many of the best candidates on this machine's GPU.
        jobs: See ``compare``; for a workload.
        executor: See ``compare``; for a workload.
        calibration: See ``predict``.
        trust_remote_code: See ``predict``.
        host_memory: See ``predict``; the search does not lower it, and says what would.
    """

    effective_batch_size: int | None = option(
        None,
        "Samples per optimizer step (batch size × accumulation), which stays the same (default: the workload's).",
        metavar="N",
    )
    headroom: float = option(
        DEFAULT_HEADROOM,
        "Share of the GPU's memory that must stay free (default: 5%).",
        metavar="PERCENT",
        words=str | None,
        read=partial(share, "--headroom"),
    )
    allow: tuple[Permission, ...] = option(
        (),
        f"Let the search change what is trained, or how it is evaluated: {', '.join(PERMISSIONS)}; several with "
        "commas.",
        metavar="CHANGE,…",
        words=list[str] | None,
        read=names,
    )
    keep: tuple[str, ...] = option(
        (),
        "Do not vary these settings, such as gradient_checkpointing, attention or allocator; several with commas.",
        metavar="SETTING,…",
        words=list[str] | None,
        read=keys,
    )
    exhaustive: bool = option(
        False, "Execute every candidate, which takes long and shows whether the search missed one."
    )
    try_compile: bool = option(
        False,
        "Also predict the best settings with torch.compile, whole and layer by layer; takes a minute or two more.",
    )
    prices: bool = True
    can_apply: CanApply | None = None
    translated: Translated | None = None
    maximize: Goal = option(
        "throughput",
        "Find the largest one that fits instead of the fastest: also of a whole number of the workload by its key "
        "(data.image_size; several keys with commas have one value), or with --script of a flag; `:STEP` is the "
        "distance of the values to try.",
        metavar="|".join((*GOALS, "KEY[:STEP]")),
        words=str | None,
        read=_goal,
    )
    measure: int = option(0, "Run the best N on this machine's GPU, one by one in fresh processes.", metavar="N", min=0)
    jobs: int | None = option(None, JOBS)
    executor: object = option(None, EXECUTOR)
    calibration: Calibration | None = option(None, CALIBRATION)
    trust_remote_code: bool = option(False, TRUST_REMOTE_CODE)
    host_memory: int | str | None = option(None, HOST_MEMORY)

    def applies(self, settings: Mapping[str, object]) -> bool:
        """Return whether settings can be applied to what is trained."""
        if self.can_apply is not None and not self.can_apply(settings):
            return False
        return self.translated is None or self.translated(settings) is not None

    @property
    def predicting(self) -> PredictRequest:
        """How a training is predicted."""
        return PredictRequest(**shared_fields(PredictRequest, self))

    @property
    def predicting_candidates(self) -> PredictRequest:
        """How each candidate is predicted."""
        return replace(self.predicting, layouts=False, timeline=True)


def refusal(workload: Workload) -> WorkloadError | None:
    """Return why no search can vary a workload, ``None`` if one can."""
    if workload.mode != "training":
        return WorkloadError(f"mode: {workload.mode}: fit searches the settings of a training", key="mode")
    if workload.parallel.pp_size > 1:
        message = "parallel.pp_size: fit does not search pipelines; predict them, or use trainatomy compare --sweep"
        return WorkloadError(message, key="parallel.pp_size")
    return None


def check(workload: Workload, request: FitRequest) -> None:
    """Raise ``WorkloadError`` for requests that contradict each other or the GPU."""
    if (refused := refusal(workload)) is not None:
        raise refused
    if request.try_compile and workload.train.torch_compile:
        raise WorkloadError(
            "train.torch_compile: every candidate is compiled; leave it out to try it on the best one",
            key="train.torch_compile",
        )
    if not 0 <= request.headroom < 1:
        raise WorkloadError(f"headroom: {request.headroom:g} is not a share of the GPU's memory; give 0 to 0.99")
    for name in request.allow:
        if name not in PERMISSIONS:
            raise WorkloadError(f"allow: unknown value {name!r}{suggestion(name, PERMISSIONS)}")
    size = request.effective_batch_size
    if size is not None and size < 1:
        raise WorkloadError(f"effective_batch_size: {size} is not a number of samples; give 1 or more")


def unsupported_precision(workload: Workload) -> str | None:
    """Return the kind of mixed precision that a workload asks for and its GPU has no arithmetic units for."""
    gpu, train = workload.resolve_gpu(), workload.train
    return next((kind for kind in ("bf16", "fp16", "tf32") if getattr(train, kind) and kind not in gpu.rates), None)


def check_precision(workload: Workload, request: FitRequest) -> None:
    """Raise ``WorkloadError`` for a precision that the GPU has no arithmetic units for, unless it may be changed."""
    kind, gpu = unsupported_precision(workload), workload.resolve_gpu()
    if kind is None or "precision" in request.allow:
        return
    raise WorkloadError(
        f"{workload.where('train', kind)}: the {gpu.name} (compute capability {'.'.join(map(str, gpu.capability))}) "
        f"has no arithmetic units for {kind}; choose another precision, or let the search choose: --allow precision",
        key=f"train.{kind}",
    )


def effective_batch_size(workload: Workload, request: FitRequest) -> int:
    """Return the samples per optimizer step on all GPUs: as asked for, or those of the workload."""
    return request.effective_batch_size or effective_batch_size_of(workload)


def samples_per_rank(workload: Workload, request: FitRequest) -> int:
    """Return the samples per optimizer step on each data-parallel rank.

    Raises:
        WorkloadError: The ranks do not divide the effective batch size.
    """
    samples, ranks = effective_batch_size(workload, request), workload.parallel.data_parallel_size
    if samples % ranks:
        raise WorkloadError(
            f"an effective batch size of {samples} cannot be divided among {ranks} data-parallel ranks; "
            f"give a multiple of {ranks}, or other GPUs",
            key="parallel.gpus",
        )
    return samples // ranks


def usable_bytes(workload: Workload, headroom: float) -> int:
    """Return the device memory that a candidate may take."""
    return int(workload.resolve_gpu().memory_bytes * (1 - headroom))
