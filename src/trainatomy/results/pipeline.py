"""What the ranks of a pipeline do in a step, as plain values."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """A part of a micro-batch in a stage.

    Attributes:
        kind: ``forward``, ``backward``, or a half of a divided backward pass: ``backward_input``, ``backward_weight``.
        stage: Index of the stage in the whole pipeline.
        micro_batch: Index of the micro-batch in the step.
    """

    kind: str
    stage: int
    micro_batch: int


class StageRun(NamedTuple):
    """Where the operations of a part of a micro-batch begin and end, as indices into ``Operations.operations``."""

    work: Work
    begin: int
    end: int
