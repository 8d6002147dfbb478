"""Executes each padded length of a training once, for the epochs that are put together from them.

One run executes a step of every shape, after a first step that makes optimizer states; a short run for each first batch
of an order executes the first step itself, which has none yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.errors import SimulationError, WorkloadError
from trainatomy.results.operations import Operations
from trainatomy.simulator.compiled import compiles
from trainatomy.simulator.pieces import Beginning, Piece, StepLibrary, StepShapes, Stitched, cut, same_events
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.simulator.watcher import Watcher
from trainatomy.training.batch import BatchesOfLengths
from trainatomy.training.labels import IGNORED
from trainatomy.training.lengths import (
    BatchShape,
    LengthBatch,
    Order,
    Sample,
    fewest_tokens,
    orders,
    sample_lengths,
)
from trainatomy.training.model import build_model
from trainatomy.training.process import seed_host
from trainatomy.training.samples import media_of
from trainatomy.workload.batching import Batching, batching_of
from trainatomy.workload.lengths import MOST_COUNTED_SHAPES

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.catalog.gpus import GPU
    from trainatomy.workload.schema import Workload

MOST_MICRO_STEPS = 200
"""Micro-batches of one run, which bound its allocation trace; more lengths take several runs."""

_MASKED_OUT = {"attention_mask": 0, "completion_mask": 0, "labels": IGNORED, "pixel_mask": 0, "position_ids": 0}
"""Values in a batch's tensors where a token or a pixel is masked out, or a sample begins."""

_SIZES = ("image_grid_thw", "image_sizes", "aspect_ratio_ids")
"""Tensors of a batch that say how large each of its images is."""

Told = Callable[[str], None]
"""Is told what is executed, for progress on stderr."""


class EveryStep(Watcher):
    """Observer that keeps the operations of every step, and lets every micro-batch be executed or copied."""

    def __init__(self, recorder: Recorder, steps: int) -> None:
        super().__init__(recorder, steps)
        self.operations: list[Operations] = []

    def ready(self, model: nn.Module, optimizer: object) -> None:
        """Record from the first step on."""
        super().ready(model, optimizer)  # type: ignore[arg-type]
        self._operations.start(0)

    def leaves_out(self, micro_step: int, of: int) -> bool:
        """Leave out nothing: micro-batches differ."""
        self._given = of
        return False

    def repeat(self, micro_step: int, batch: Any) -> torch.Tensor | None:
        """Copy a micro-batch only from one with as many tokens masked out, for its tensors may have the same shapes.

        Random masks of a model (SpecAugment) are the same in each, so that batches that are alike do the same.
        """
        seed_host(0)
        return super().repeat(micro_step, (batch, self._masked_out(batch)))

    def _masked_out(self, batch: Any) -> list[Any]:
        """Return how many positions of each mask of a batch, and of what serves as one, are masked out, and sizes."""
        found: list[Any] = []
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            for name, nothing in _MASKED_OUT.items():
                given = batch.get(name)  # a detector's labels are a list
                value = self._recorder.values.of(given) if isinstance(given, torch.Tensor) else None
                if value is not None:
                    found.append(int((value == nothing).sum()))
            sizes = (self._recorder.values.of(batch[name]) for name in _SIZES if name in batch)
            found += [value.tolist() for value in sizes if value is not None]
        return found

    def step_end(self, step: int) -> None:
        """Keep the operations of a step."""
        self._recorder.mark("step end")
        self._repetition.between_steps()
        if self._operations.recording:
            self._operations.stop()
            self.operations.append(self._operations.operations)
        if step < self._last:
            self._operations.start(step + 1)


@dataclass(frozen=True, slots=True)
class Epochs:
    """Everything that epochs of a training are put together from.

    Attributes:
        simulation: The run that executed every shape, with the operations of the longest.
        orders: The orders of the epoch's batches.
        stand_ins: The executed shape that stands for each shape of the orders.
        operations: Operations of a step of each executed shape.
        library: The executed steps.
        firsts: The first steps of each order, by the shapes of their batches.
        begun: Number of these steps.
        lengths: Length of every sample.
    """

    simulation: Simulation
    orders: tuple[Order, ...]
    stand_ins: dict[BatchShape, BatchShape]
    operations: dict[BatchShape, Operations]
    library: StepLibrary
    firsts: dict[tuple[StepShapes, ...], Beginning]
    begun: int
    lengths: tuple[int, ...]

    @property
    def executed_steps(self) -> int:
        """Return the number of steps that were executed: in the run of all shapes, and for the first steps."""
        return self.simulation.steps + (self.begun + 1) * len(self.firsts)

    def shapes(self, order: Order) -> list[StepShapes]:
        """Return the executed shapes of each step of an order."""
        return [tuple(self.stand_ins[batch.shape] for batch in step) for step in order.steps]

    def stitched(self, steps: Sequence[StepShapes], *, detailed: bool = False) -> Stitched:
        """Return the trace of these steps, of which the first ones begin the training."""
        return self.library.stitch(self.firsts[tuple(steps[: self.begun])], steps[self.begun :], detailed=detailed)


_MANY_SHAPES = 16
"""Shapes from which on the shortest and the longest are tried before all are executed."""


def simulate_lengths(
    workload: Workload,
    gpu: GPU,
    *,
    model: Callable[[], nn.Module] | None = None,
    trust_remote_code: bool = False,
    operations: bool = True,
    tell: Told = lambda message: None,
) -> Epochs:
    """Execute the shapes of a workload's batches.

    Raises:
        SimulationError: A step depends on more than the shapes of its batches.
        TrainatomyError: What ``simulate`` raises.
    """
    samples = _media(workload, model, trust_remote_code) if workload.data.varying_media else None
    taken = orders(workload, samples)
    given = {batch.shape: batch for order in taken for step in order.steps for batch in step if batch.media}
    run = _Run(workload, gpu, model, trust_remote_code, given)
    if len(taken[0].steps) < run.begun:
        why = "on several GPUs" if workload.parallel.world_size > 1 else "with torch_compile"
        message = f"an epoch has {len(taken[0].steps)} step, and {why} it needs two: give more `samples`"
        raise WorkloadError(f"data.lengths: {message}", key="data.lengths")
    stand_ins = stand_ins_of(workload, taken)
    shapes = sorted(set(stand_ins.values()), key=lambda shape: (shape.length, shape.is_mixed, shape.tokens))
    simulation, library, recorded = run.library(shapes, tell, operations=operations)
    beginnings = dict.fromkeys(
        tuple(tuple(stand_ins[batch.shape] for batch in step) for step in order.steps[: run.begun]) for order in taken
    )
    firsts = {}
    for place, first in enumerate(beginnings):
        tell(f"executing first steps: {place + 1} of {len(beginnings)}")
        firsts[first] = run.beginning(first, shapes[0])
    lengths = sample_lengths(workload) if samples is None else [sample.length for sample in samples]
    return Epochs(simulation, taken, stand_ins, recorded, library, firsts, run.begun, tuple(lengths))


def _media(workload: Workload, model: Callable[[], nn.Module] | None, trust_remote_code: bool) -> list[Sample]:
    """Return the samples of an epoch whose images or recordings differ, as the model's processor leaves them."""
    with torch.random.fork_rng(devices=()), torch.device("meta"):
        built = build_model(workload, trust_remote_code=trust_remote_code) if model is None else model()
    return media_of(workload, built)[1]


def stand_ins_of(workload: Workload, taken: Sequence[Order]) -> dict[BatchShape, BatchShape]:
    """Return for each shape of some orders the one that is executed in its place: itself, or the next longer one."""
    spec = workload.data.lengths
    assert spec is not None
    found = sorted({batch.shape for order in taken for step in order.steps for batch in step})
    batching = batching_of(workload)
    is_bounded = batching.prompt is not None or workload.data.varying_media
    limit = spec.shapes or (MOST_COUNTED_SHAPES if is_bounded else len(found))
    if limit >= len(found):
        return {shape: shape for shape in found}
    stand_ins: dict[BatchShape, BatchShape] = {}
    for kind in {shape.kind for shape in found}:
        shapes = [shape for shape in found if shape.kind == kind]
        fewer = _covering if workload.data.varying_media else _fewer
        stand_ins |= fewer(shapes, max(1, limit * len(shapes) // len(found)), batching)
    return stand_ins


def _fewer(shapes: Sequence[BatchShape], most: int, batching: Batching) -> dict[BatchShape, BatchShape]:
    """Return at most this many stand-ins for the shapes of a kind: each is at least as large in every respect.

    Where the number of tokens matters, it is rounded up as the length is, each to a share of the stand-ins.
    """
    is_counted = batching.prompt is not None
    lengths = _spread(sorted({shape.length for shape in shapes}), isqrt(most) if is_counted else most)
    found: dict[BatchShape, BatchShape] = {}
    for length in lengths:
        alike = [shape for shape in shapes if _next(shape.length, lengths) == length]
        fewest = fewest_tokens(alike[0].rows, length, batching) if is_counted else 0
        tokens = _spread(sorted({max(shape.tokens, fewest) for shape in alike}), most // len(lengths))
        documents = max(shape.documents for shape in alike)
        for shape in alike:
            counted = _next(max(shape.tokens, fewest), tokens)
            found[shape] = shape._replace(length=length, tokens=counted, documents=documents)
    return found


def _covering(shapes: Sequence[BatchShape], most: int, batching: Batching) -> dict[BatchShape, BatchShape]:
    """Return stand-ins among the shapes of a kind: those that no other covers, and some between, about this many."""
    sizes = {shape.size: shape for shape in shapes}
    executed = {sizes[size] for size in _spread(sorted(sizes), most)}
    by_size = sorted(shapes, key=lambda shape: shape.size, reverse=True)
    for place, shape in enumerate(by_size):
        if not any(other.covers(shape) for other in by_size[:place]):
            executed.add(shape)
    sorted_ones = sorted(executed, key=lambda shape: shape.size)
    return {shape: next(other for other in sorted_ones if other.covers(shape)) for shape in shapes}


def _spread(lengths: Sequence[int], most: int) -> list[int]:
    """Return at most this many of the sorted lengths, the longest among them, so that one is near to every length."""
    narrow, wide = 0, lengths[-1] - lengths[0]
    while narrow < wide:
        width = (narrow + wide) // 2
        narrow, wide = (narrow, width) if len(_chosen(lengths, width)) <= most else (width + 1, wide)
    return _chosen(lengths, wide)


def _chosen(lengths: Sequence[int], width: int) -> list[int]:
    """Return the lengths, the longest first, each of which stands for those that are at most ``width`` shorter."""
    chosen = [lengths[-1]]
    for length in reversed(lengths):
        if length < chosen[-1] - width:
            chosen.append(length)
    return chosen[::-1]


def _next(value: int, chosen: Sequence[int]) -> int:
    """Return the smallest of the sorted numbers that is not below a value."""
    return chosen[bisect_left(chosen, value)]


@dataclass(frozen=True, slots=True)
class _Run:
    """Executes steps with batches of given shapes."""

    workload: Workload
    gpu: GPU
    model: Callable[[], nn.Module] | None
    trust_remote_code: bool
    given: Mapping[BatchShape, LengthBatch]

    @property
    def begun(self) -> int:
        """Return how many steps at the beginning are not repeated.

        In the second one, DDP makes new buckets, and a length other than the first lets Dynamo compile for all lengths.
        """
        return 1 if self.workload.parallel.world_size == 1 and not compiles(self.workload) else 2

    def library(
        self, shapes: Sequence[BatchShape], tell: Told, *, operations: bool
    ) -> tuple[Simulation, StepLibrary, dict[BatchShape, Operations]]:
        """Execute a step of each shape, in as many runs as are needed."""
        accumulation = self.workload.train.gradient_accumulation_steps
        size = max(1, MOST_MICRO_STEPS // accumulation)
        steps: dict[BatchShape, tuple[Piece, ...]] = {}
        recorded: dict[BatchShape, Operations] = {}
        simulations = []
        if len(shapes) > _MANY_SHAPES:
            self._steps_of(shapes[0], shapes[-1:], operations=False)  # refuses at once what cannot be put together
        for start in range(0, len(shapes), size):
            tell(f"executing lengths {start + 1} to {min(start + size, len(shapes))} of {len(shapes)}")
            simulation, found, executed = self._steps_of(shapes[0], shapes[start : start + size], operations=operations)
            simulations.append(simulation)
            steps |= {shape: pieces for shape, pieces in found.items() if shape not in steps}
            recorded |= executed
        whole = replace(
            simulations[-1],
            libraries=frozenset().union(*(each.libraries for each in simulations)),
            stack_bytes=max(each.stack_bytes for each in simulations),
            steps=sum(each.steps for each in simulations),
            operations=recorded.get(shapes[-1], Operations()),
        )
        return whole, StepLibrary(steps), recorded

    def _steps_of(
        self, shortest: BatchShape, shapes: Sequence[BatchShape], *, operations: bool
    ) -> tuple[Simulation, dict[BatchShape, tuple[Piece, ...]], dict[BatchShape, Operations]]:
        """Execute a step of each shape, then one of different shapes and the shortest again, to check them.

        What the last step keeps is not known.
        """
        accumulation = self.workload.train.gradient_accumulation_steps
        executed = list(dict.fromkeys((shortest, *shapes)))
        mixed = tuple(executed[-1 - place % len(executed)] for place in range(accumulation))
        alike = [(shape,) * accumulation for shape in executed]
        first, begins = alike[0], alike[:1] * self.begun
        if compiles(self.workload):
            begins = [first, *alike[::-1]]  # the second length and some others let Dynamo compile, and kernels be tried
        steps = [*begins, *alike, mixed, first, first]
        simulation, watcher = self._simulate(steps, operations=operations)
        pieces = cut(simulation.trace, len(begins)).steps
        found = dict(zip(executed, pieces[len(begins) :], strict=False))
        library = StepLibrary(found)
        for place in (-3, -2):
            if not same_events(library.pieces(steps[place]), pieces[place]):
                raise SimulationError(
                    "data.lengths: a step that was executed twice did not allocate the same, so epochs cannot be put "
                    "together from single steps.\nPredict this training with data.sequence_length"
                )
        return simulation, found, dict(zip(executed, watcher.operations[len(begins) :], strict=False))

    def beginning(self, steps: Sequence[StepShapes], following: BatchShape) -> Beginning:
        """Execute the first steps of a training, and one more that shows what the last of them keeps."""
        simulation, _ = self._simulate([*steps, (following,) * len(steps[0])], operations=False)
        return Beginning.of(simulation.trace, cut(simulation.trace, self.begun))

    def _simulate(self, steps: Sequence[StepShapes], *, operations: bool) -> tuple[Simulation, EveryStep]:
        batching = batching_of(self.workload)
        made = (self.given.get(shape) or LengthBatch.of(shape, batching) for step in steps for shape in step)
        watchers: list[EveryStep] = []

        def watch(recorder: Recorder, count: int) -> EveryStep:
            watchers.append(EveryStep(recorder, count))
            return watchers[0]

        simulation = simulate(
            self.workload,
            self.gpu,
            model=self.model,
            make_batch=BatchesOfLengths(tuple(made)),
            trust_remote_code=self.trust_remote_code,
            operations=operations,
            steps=len(steps),
            watch=watch,
        )
        return simulation, watchers[0]
