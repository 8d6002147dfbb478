"""The largest batch, sequence, model or number of a workload that fits, by executing sizes on both sides of the limit.

The size is searched for several settings that keep what is trained: gradient checkpointing off and on, each with the
allocator as given and with expandable segments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from itertools import product

from trainatomy.bisection import largest, multiples
from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.requests.fitting import (
    FitRequest,
    Wanted,
    check,
    check_precision,
    effective_batch_size,
    samples_per_rank,
    usable_bytes,
)
from trainatomy.results.fit import Candidate, Change, Fit, Goal, Maximum, SearchCounts
from trainatomy.results.prediction import GPUSummary, Prediction
from trainatomy.search.axes import axes_of, batch_sizes
from trainatomy.search.explore import Executor, Observer
from trainatomy.search.plans import Axis, Option
from trainatomy.workload.data import DEFAULT_SEQUENCE_LENGTH
from trainatomy.workload.overlay import get_key
from trainatomy.workload.schema import MAX_BATCH_ELEMENTS, Workload
from trainatomy.workload.sweep import effective_batch_size_of

SEQUENCE_STEP = 8
"""Sequence lengths are multiples of this, the number that tensor cores want."""
_VARIED = ("gradient_checkpointing", "allocator")
_VARIED_OPTIONS = frozenset({"off", "on", "default", "expandable_segments"})
_BATCH_MEMORY = ("activations", "temporary", "cache")
_LARGEST_MODEL = 10_000
_DEPTHS = (
    ("num_hidden_layers",),
    ("n_layer",),
    ("n_layers",),
    ("num_layers", "num_decoder_layers"),
    ("encoder_layers", "decoder_layers"),
)
"""Names under which configurations keep their number of layers; those of one line go together."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes to choose from, and the settings of each.

    Attributes:
        axis: Name of the axis in results.
        start: The size to begin with.
        values: All sizes in ascending order.
        settings: Returns the keys of the workload for a size.
        bounded_by: What bounds the sizes from above.
        grows: Components of the memory that grow with the size.
    """

    axis: str
    start: int
    values: Sequence[int]
    settings: Callable[[int], Mapping[str, object]]
    bounded_by: str
    grows: tuple[str, ...] = _BATCH_MEMORY

    def change(self, size: int) -> Change:
        """Return the change to a size."""
        return Change(self.axis, str(size), self.settings(size))


def maximize(workload: Workload, goal: Goal, request: FitRequest, executor: Executor, observer: Observer) -> Fit:
    """Return the largest batch, sequence or model that fits, with the settings.

    ``batch`` keeps the number of accumulation steps, or divides the effective batch size if there is one in
    ``request``.  The other goals keep the effective batch size, with one sample per batch.

    After Ctrl-C the outcome is the largest found so far.

    Raises:
        WorkloadError: The goal makes no sense for this workload.
        TrainatomyError: The workload cannot be predicted.
    """
    began = time.perf_counter()
    check(workload, request)
    check_precision(workload, request)
    if request.allow:
        raise WorkloadError(f"maximize: what is trained is kept; leave --allow {','.join(request.allow)} out")
    sizes = sizes_of(workload, goal, request)
    usable = usable_bytes(workload, request.headroom)
    families = [_Family(workload, sizes, usable, changes) for changes in _families(workload, request)]
    interrupted = False
    try:
        _run(families, executor, observer)
    except KeyboardInterrupt:
        interrupted = True
    errors = [family.error for family in families if family.error is not None and not family.executed]
    if errors and not any(family.executed for family in families):  # one alone may need what the model does not support
        raise errors[0]
    return _fit(workload, goal, request, sizes, families, time.perf_counter() - began, interrupted)


def sizes_of(workload: Workload, goal: Goal, request: FitRequest) -> Sizes:
    """Return the sizes that a goal chooses from."""
    if goal == "batch":
        return _batches(workload, request)
    if "." in goal:
        return _values_of(workload, *Wanted.of(goal))
    samples = samples_per_rank(workload, request)
    least = batch_sizes(workload, samples)[0]
    single = {"train.per_device_train_batch_size": least, "train.gradient_accumulation_steps": samples // least}
    if goal == "model-size":
        depth, keys = _depth(workload)
        layers = range(1, _LARGEST_MODEL + 1)
        grows = (*_BATCH_MEMORY, "weights", "gradients", "optimizer_states")
        return Sizes("layers", depth, layers, lambda size: {**single, **dict.fromkeys(keys, size)}, "", grows)
    if workload.data.factory is not None:
        raise WorkloadError("maximize sequence-length: data.factory makes the batch, so its length cannot be varied")
    start = workload.data.sequence_length or DEFAULT_SEQUENCE_LENGTH
    lengths = range(
        SEQUENCE_STEP, min(MAX_BATCH_ELEMENTS, _positions(workload) or MAX_BATCH_ELEMENTS) + 1, SEQUENCE_STEP
    )
    return Sizes(
        "sequence_length",
        start,
        lengths,
        lambda size: {**single, "data.sequence_length": size},
        "positions of the model",
    )


def _batches(workload: Workload, request: FitRequest) -> Sizes:
    tokens = 1 if workload.data.factory else workload.data.sequence_length or 1
    start = workload.train.per_device_train_batch_size
    if request.effective_batch_size is None:
        batches = range(1, MAX_BATCH_ELEMENTS // tokens + 1)
        return Sizes("batch", start, batches, lambda size: {"train.per_device_train_batch_size": size}, "")
    samples = samples_per_rank(workload, request)

    def settings(size: int) -> Mapping[str, object]:
        return {
            "train.per_device_train_batch_size": size,
            "train.gradient_accumulation_steps": samples // size,
        }

    return Sizes("batch", start, batch_sizes(workload, samples), settings, "effective batch size")


def _values_of(workload: Workload, names: str, step: int | None) -> Sizes:
    """Return the values of a whole number of the workload around the one that it has, under one key or several."""
    keys = names.split(",")
    starts = {key: _value(workload, key) for key in keys}
    if len(set(starts.values())) > 1:
        shown = ", ".join(f"{key} is {value}" for key, value in starts.items())
        raise WorkloadError(f"maximize {names}: keys that are varied together need one value: {shown}")
    values = multiples(starts[keys[0]], step)
    return Sizes(names, starts[keys[0]], values, lambda size: dict.fromkeys(keys, size), "values that were tried")


def _value(workload: Workload, key: str) -> int:
    """Return the whole number that a key has, which may be one of the model's configuration."""
    section, _, name = key.rpartition(".")
    if section == "model.config" and workload.model.factory is None:
        start = _configuration(workload).get(name)
    else:
        start = get_key(workload.model_dump(by_alias=True), tuple(key.split(".")))
    if isinstance(start, bool) or not isinstance(start, int) or start < 1:
        workload.replace(key, 1)  # refuses an unknown key, with the nearest one
        raise WorkloadError(
            f"maximize {key}: its value is {start if start is not None else 'not given'}; give a whole number to begin "
            "with"
        )
    return start


def _configuration(workload: Workload) -> Mapping[str, object]:
    from trainatomy.training.configuration import build_configuration

    if workload.model.factory is not None:
        raise WorkloadError(
            "maximize: model.factory builds the model, so its size cannot be varied", key="model.factory"
        )
    found: Mapping[str, object] = build_configuration(workload.model).to_dict()
    return found


def _depth(workload: Workload) -> tuple[int, tuple[str, ...]]:
    """Return the number of layers of a model, and the keys of the workload that set it."""
    configuration = _configuration(workload)
    for keys in _DEPTHS:
        if isinstance(depth := configuration.get(keys[0]), int):
            present = [key for key in keys if isinstance(configuration.get(key), int)]
            return depth, tuple(f"model.config.{key}" for key in present)
    raise WorkloadError(
        f"maximize model-size: the configuration of {workload.display_name} names no single number of layers "
        f"({', '.join(keys[0] for keys in _DEPTHS)})"
    )


def _positions(workload: Workload) -> int | None:
    """Return the number of positions that the model was made for."""
    if workload.model.factory is not None:
        return None
    configuration = _configuration(workload)
    names = ("max_position_embeddings", "n_positions")
    return next((found for name in names if isinstance(found := configuration.get(name), int) and found > 0), None)


def _families(workload: Workload, request: FitRequest) -> Iterator[tuple[Change, ...]]:
    """Yield the combinations of settings for which the size is searched."""
    samples = workload.train.per_device_train_batch_size * workload.train.gradient_accumulation_steps
    axes = [axis for axis in axes_of(workload, samples) if axis.name in _VARIED and axis.name not in request.keep]

    def choices(axis: Axis) -> Iterator[Option]:
        return (option for option in axis.options if option.name in _VARIED_OPTIONS or option.name == axis.given)

    for combination in product(*(list(choices(axis)) for axis in axes)):
        pairs = zip(axes, combination, strict=True)
        yield tuple(axis.change(option.name) for axis, option in pairs if option.name != axis.given)


@dataclass(slots=True)
class _Family:
    """The search for the largest size with fixed settings."""

    workload: Workload
    sizes: Sizes
    usable_bytes: int
    changes: tuple[Change, ...]
    executed: dict[int, Prediction] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    error: TrainatomyError | None = None

    def fits(self, size: int) -> bool:
        """Return whether an executed size fits."""
        prediction = self.executed[size]
        return prediction.fits and prediction.memory.device_bytes <= self.usable_bytes

    @property
    def largest(self) -> int | None:
        """The largest executed size that fits."""
        return max(filter(self.fits, self.executed), default=None)

    def workload_of(self, size: int) -> Workload:
        """Return the workload of a size."""
        settings = {key: value for change in self.changes for key, value in change.settings.items()}
        return self.workload.replace({**settings, **self.sizes.settings(size)})

    def candidate(self, size: int) -> Candidate:
        """Return the candidate of an executed size."""
        prediction = self.executed[size]
        return Candidate((self.sizes.change(size), *self.changes), prediction.workload, prediction, self.fits(size))

    def search(self) -> Generator[int, None, None]:
        """Yield the sizes to execute; the next one is where the line through the two nearest ones meets the limit."""
        return largest(self.sizes.values, self.sizes.start, self._holds, self._guess)

    def _holds(self, size: int) -> bool | None:
        """Return whether a size fits, None if it cannot be predicted."""
        return self.fits(size) if size in self.executed else None

    def fail(self, size: int, error: TrainatomyError) -> bool:
        """Note that a size cannot be predicted; return whether another one may be, of a key that has other limits."""
        self.failed[size] = str(error).partition("\n")[0]
        passes = "." in self.sizes.axis and bool(self.executed)
        self.error = self.error if passes else error
        return passes

    def _guess(self) -> int:
        """Return the largest size that should fit: the line through the two nearest sizes says so."""
        known = {size: each.memory.device_bytes for size, each in self.executed.items()}
        near = sorted(known, key=lambda size: abs(known[size] - self.usable_bytes))[:2]
        if len(near) == 1:
            (size,) = near
            components = self.executed[size].memory.components
            slope = sum(components[name] for name in self.sizes.grows) / size
        else:
            size, other = near
            slope = (known[size] - known[other]) / (size - other)
        if slope <= 0:  # sizes side by side may use other algorithms: halve what is left
            beyond = min((other for other in known if not self.fits(other)), default=None)
            return 2 * size if beyond is None else ((self.largest or 0) + beyond) // 2
        guessed = int(size + (self.usable_bytes - known[size]) / slope)
        return min(guessed, 2 * max(known)) if "." in self.sizes.axis else guessed  # sides of images: squares or cubes


def _run(families: Sequence[_Family], executor: Executor, observer: Observer) -> None:
    """Run the searches side by side."""
    searches = {id(family): family.search() for family in families}
    waiting = list(families)
    running: dict[Future[Prediction | TrainatomyError], tuple[_Family, int]] = {}
    count = 0
    while waiting or running:
        while waiting and len(running) < executor.jobs:
            family = waiting.pop(0)
            size = next(searches[id(family)], None)
            if size is None:
                continue
            try:
                running[executor.submit(family.workload_of(size))] = family, size
            except TrainatomyError as error:
                if family.fail(size, error):
                    waiting.append(family)
        if not running:
            continue
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            family, size = running.pop(future)
            result = future.result()
            if isinstance(result, TrainatomyError):
                if family.fail(size, result):
                    waiting.append(family)
                continue
            family.executed[size] = result
            count += 1
            observer.executed(count, None)
            waiting.append(family)


def _fit(
    workload: Workload,
    goal: Goal,
    request: FitRequest,
    sizes: Sizes,
    families: Sequence[_Family],
    seconds: float,
    interrupted: bool,
) -> Fit:
    gpu = workload.resolve_gpu()
    found = [(family, size) for family in families if (size := family.largest) is not None]
    found.sort(key=lambda each: (-each[1], each[0].candidate(each[1]).step_seconds, len(each[0].changes)))
    candidates = tuple(family.candidate(size) for family, size in found)
    large = [family.candidate(size) for family in families for size in family.executed if not family.fits(size)]
    executed = sum(len(family.executed) for family in families)
    best = candidates[0] if candidates else None
    return Fit(
        name=workload.display_name,
        workload=workload.to_mapping(),
        gpu=GPUSummary(gpu.id, gpu.name, gpu.memory_bytes, gpu.capability),
        goal=goal,
        effective_batch_size=effective_batch_size_of(Workload.from_mapping(best.workload))
        if best
        else effective_batch_size(workload, request),
        headroom=request.headroom,
        usable_bytes=usable_bytes(workload, request.headroom),
        allowed=(),
        given=None,
        best=best,
        candidates=candidates,
        too_large=tuple(sorted(large, key=lambda each: each.device_bytes)),
        ties=(),
        prices=(),
        shortage=None,
        maximum=_maximum(goal, sizes, *found[0]) if found else None,
        counts=SearchCounts(executed, executed, seconds=seconds),
        interrupted=interrupted,
    )


def _maximum(goal: Goal, sizes: Sizes, family: _Family, size: int) -> Maximum:
    beyond = min((other for other in family.executed if not family.fits(other)), default=None)
    return Maximum(
        goal=goal,
        value=size,
        parameters=family.executed[size].bytes_per_parameter.parameters,
        beyond=beyond,
        beyond_bytes=family.executed[beyond].memory.device_bytes if beyond else 0,
        bounded_by=sizes.bounded_by if beyond is None else "",
        failed=dict(sorted(family.failed.items())),
    )
