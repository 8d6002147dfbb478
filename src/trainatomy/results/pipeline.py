"""Work of the ranks of a pipeline in a step, as plain values."""

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
    """Begin and end of the operations of a part of a micro-batch, as indices into ``Operations.operations``."""

    work: Work
    begin: int
    end: int
