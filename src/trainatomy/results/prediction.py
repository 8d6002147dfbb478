"""A predicted training: the verdict, the memory breakdown, the time of a step, and the evidence for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainatomy.results.checkpoint import Checkpoint, RestoredCheckpoint
from trainatomy.results.duration import Duration, duration_of
from trainatomy.results.evaluation import Evaluation
from trainatomy.results.experts import Experts
from trainatomy.results.generation import Generation
from trainatomy.results.lengths import LengthsPrediction
from trainatomy.results.memory import Memory, ModuleActivations, OutOfMemoryPoint, TimelinePoint, Verdict
from trainatomy.results.operation_breakdown import Padding
from trainatomy.results.script import ScriptRun
from trainatomy.results.subject import Subject
from trainatomy.results.time import Time

Basis = Literal["measured", "computed", "assumed"]
Unit = Literal["", "bytes", "allocations", "steps"]

ReasonCode = Literal[
    "autocast_copies_not_at_peak",
    "frozen_parameters",
    "gradients_not_at_peak",
    "low_precision_parameters",
    "optimizer_states_not_created",
    "quantised_parameters",
    "sharded",
]


@dataclass(frozen=True, slots=True)
class Fact:
    """An input that the prediction rests on, with its source.

    ``amount`` in ``unit`` is the value of a quantity; ``value`` is the value of a setting, as text.
    """

    name: str
    value: str
    basis: Basis
    source: str
    amount: int | None = None
    unit: Unit = ""


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """Bytes per parameter at the peak, without activations and temporaries, compared with the rule of thumb.

    ``rule`` is the figure of Hugging Face's guides (18 for mixed precision with AdamW, 16 in fp32, 6 for inference in
    mixed precision; ``None`` where they give none) and ``rule_name`` the case it is for.  ``parts`` are bytes per
    parameter by component.  ``reasons`` explain the difference: each is a ``ReasonCode``, or a sentence in predictions
    that an earlier version recorded.
    """

    parameters: int
    trainable_parameters: int
    actual: float
    parts: dict[str, float]
    rule: float | None
    rule_name: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GPUSummary:
    """The GPU of a prediction: id, product name, bytes that CUDA can use, compute capability."""

    id: str
    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class RankPrediction:
    """Memory of one process of a training; ranks count from 0.  The fields are those of ``Prediction``."""

    rank: int
    fits: bool
    verdict: Verdict
    room_bytes: int
    memory: Memory
    modules: tuple[ModuleActivations, ...]
    out_of_memory: OutOfMemoryPoint | None
    timeline: tuple[TimelinePoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted training: the answer first, then the evidence.

    ``fits`` means that the allocator never runs out of the memory that the context and the driver leave on the GPU.
    ``room_bytes`` is the headroom at the peak (negative: the shortfall). ``verdict`` is ``tight`` when the training
    fits with less than 5 % of the GPU's memory left, or only because the allocator frees its cache on the way
    (``num_alloc_retries`` > 0).  ``without_workspace`` counts the convolutions of a step that fall back to a slower
    algorithm because the workspace of their first choice does not fit.  ``trials`` counts those for which cuDNN tries
    all its algorithms (``cudnn.benchmark``); by the rules, without cuDNN's library, memory is then the least that the
    training needs.

    The memory fields describe ``rank``: rank 0, or in a pipeline the one that holds most.  ``other_ranks`` holds
    further ranks of a training on several GPUs.  ``evaluation`` is the evaluation that runs during the training, if
    there is one.

    With ``data.lengths``, ``lengths`` describes the epochs, memory is that of the worst one, and time that of the mean
    step.  ``script`` is the script that was run, of ``trainatomy run``; ``workload`` then says what was seen of it.

    ``subject`` is what was predicted; None in predictions that an earlier version recorded.  ``leading_notes`` are the
    notes that matter most: what was decided for the user and changes memory or time.  ``paddings`` are sizes that are
    no multiples of what tensor cores take, with what padding them saves.
    """

    name: str
    workload: dict[str, object]
    card: GPUSummary
    fits: bool
    verdict: Verdict
    room_bytes: int
    memory: Memory
    modules: tuple[ModuleActivations, ...]
    bytes_per_parameter: BytesPerParameter
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]
    out_of_memory: OutOfMemoryPoint | None
    timeline: tuple[TimelinePoint, ...]
    seconds_taken: float
    versions: dict[str, str]
    time: Time | None = None
    without_workspace: int = 0
    trials: int = 0
    other_ranks: tuple[RankPrediction, ...] = ()
    evaluation: Evaluation | None = None
    rank: int = 0
    lengths: LengthsPrediction | None = None
    generation: Generation | None = None
    checkpoint: Checkpoint | None = None
    restored: tuple[RestoredCheckpoint, ...] = ()
    script: ScriptRun | None = None
    experts: Experts | None = None
    subject: Subject | None = None
    leading_notes: tuple[str, ...] = ()
    paddings: tuple[Padding, ...] = ()

    @property
    def gpu(self) -> GPUSummary:
        """The GPU; the field keeps the name that version 1 of the JSON gives it."""
        return self.card

    @property
    def duration(self) -> Duration | None:
        """How long the whole training takes, where its steps are known."""
        return duration_of(self)

    @property
    def ranks(self) -> dict[int, RankPrediction]:
        """The memory of every executed rank by its number, in order; a training on one GPU has rank 0 only."""
        first = RankPrediction(
            rank=self.rank,
            fits=self.fits,
            verdict=self.verdict,
            room_bytes=self.room_bytes,
            memory=self.memory,
            modules=self.modules,
            out_of_memory=self.out_of_memory,
            timeline=self.timeline,
        )
        return {each.rank: each for each in sorted((first, *self.other_ranks), key=lambda one: one.rank)}
