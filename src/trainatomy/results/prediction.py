"""A predicted training: the verdict, the memory breakdown, the time of a step, and what they rest on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainatomy.results.memory import Memory, ModuleShare, OutOfMemoryPoint, TimelinePoint, Verdict
from trainatomy.results.time import Time

Basis = Literal["measured", "computed", "assumed"]


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that the prediction rests on, e.g. ('context', '527 MiB', 'measured', 'H200, driver 580')."""

    name: str
    value: str
    basis: Basis
    source: str


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """The guide's rule beside what this training holds. Bytes per parameter without activations and temporaries.

    ``rule`` is what the guides say (18 for mixed precision with AdamW, 16 in fp32, 6 for inference in mixed precision,
    ...; None where they name no rule), ``parts`` what is held by component, ``reasons`` why they differ, one sentence
    each.
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
    """The card that was asked about: id, product name, bytes that CUDA can use, compute capability."""

    id: str
    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Prediction:
    """One predicted training: the answer first, then what it rests on.

    ``fits`` means that the allocator, with what the card leaves after context and driver, never runs out.
    ``room_bytes`` is what is left of the card at the peak (negative: what is short); ``verdict`` is ``tight`` when it
    fits with less than 5 % of the card left, or only because the allocator frees its cache on the way
    (``num_alloc_retries`` > 0).  ``without_workspace``: calls of convolutions in a step that take another, slower
    algorithm since the workspace of the first choice does not fit; where it is not 0, the training fits thanks to that.
    """

    name: str
    workload: dict[str, object]
    card: GPUSummary
    fits: bool
    verdict: Verdict
    room_bytes: int
    memory: Memory
    modules: tuple[ModuleShare, ...]
    bytes_per_parameter: BytesPerParameter
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]
    out_of_memory: OutOfMemoryPoint | None
    timeline: tuple[TimelinePoint, ...]
    seconds_taken: float
    versions: dict[str, str]
    time: Time | None = None
    without_workspace: int = 0

    @property
    def gpu(self) -> GPUSummary:
        """The GPU; the field keeps the name that version 1 of the JSON gives it."""
        return self.card
