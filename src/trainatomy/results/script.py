"""Observations of a dry run of a script: its text, steps, models and optimizers, and what stood in for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Ending = Literal["steps", "finished", "exit", "error", "interrupted", "time limit"]
"""How a script ended: stopped after the steps that were asked for, by itself, by ``sys.exit``, by an exception, by
Ctrl-C, or at the time limit."""

StandInKind = Literal[
    "command",
    "computed values",
    "compiled",
    "configuration",
    "data loader",
    "data set",
    "generation",
    "handover",
    "images",
    "launch",
    "metric",
    "monitor",
    "notebook",
    "out of memory",
    "pretrained weights",
    "random numbers",
    "sample lengths",
    "selection",
    "tokenizer",
    "torchscript",
    "tracker",
    "triton",
]


@dataclass(frozen=True, slots=True)
class StandIn:
    """Something that a dry run put in the place of what the script asks for.

    ``name`` is what was replaced (a data set, a model), ``place`` the script's line, ``times`` how often.
    """

    kind: StandInKind
    name: str
    place: str = ""
    times: int = 1


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model that the script calls with gradients; ``bytes`` are its weights on the GPU."""

    name: str
    parameters: int
    trainable_parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class UsedOptimizer:
    """An optimizer of the script; ``state_bytes`` are its states on the GPU."""

    name: str
    steps: int
    state_bytes: int


MANY_STEPS = 1_000_000
"""Steps that no training is assumed to take of which nobody knows how long it is."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory that each step of a training adds and never releases.

    ``operation`` and ``module`` made most of it. The GPU is full after ``steps``.
    """

    bytes_per_step: int
    operation: str
    module: str
    steps: int

    def fills_within(self, total_steps: int | None) -> bool:
        """Return whether the GPU is full before the end of a training; None: nobody knows how long it is."""
        return self.steps < (MANY_STEPS if total_steps is None else total_steps)


TaskKind = Literal["evaluation", "saving", "loading the best model", "callbacks"]
LITTLE_LEFT = 16 << 20
"""Bytes that the batches of an evaluation which are left out may keep together."""


@dataclass(frozen=True, slots=True)
class ScriptTask:
    """A task of a training besides its steps, as the configuration of its framework says.

    It comes first after step ``after`` (None: after the training), and was executed here after step ``executed_after``:
    None where it was not, for the ``reason``. Of an evaluation, ``batches`` of ``of`` (None: nobody knows) were
    executed; the others would keep ``left_bytes`` on the GPU.
    """

    kind: TaskKind
    after: int | None
    executed_after: int | None = None
    reason: str = ""
    batches: int = 0
    of: int | None = None
    left_bytes: int = 0

    @property
    def is_cut(self) -> bool:
        """True if batches were left out that would hold noticeably more memory."""
        return self.left_bytes > LITTLE_LEFT


@dataclass(frozen=True, slots=True)
class BatchLengths:
    """Batches of a training that differ in length.

    ``seen`` is the shape of the largest input of a model in the steps that were asked for, ``longest`` that in a
    further step with the longest of ``read`` samples, of ``samples`` in the data set; None where there was no such
    step, for the ``reason``.
    """

    seen: tuple[int, ...]
    longest: tuple[int, ...] | None
    read: int = 0
    samples: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """A script that ran without a GPU.

    ``command`` is the script with its arguments as they were typed. ``message`` says why it ended where it ended by an
    error, and ``place`` is the script's line. ``writes`` are the paths that it would have written to, and did not.
    ``growth`` is None where memory stays the same from step to step. Rates count what ``counted`` says: batches where
    nobody knows how many samples they have. ``total_steps`` are those of the whole training, and ``tasks`` what it does
    besides them, where a framework's configuration says so. ``lengths`` is None where batches do not differ.
    """

    command: tuple[str, ...]
    ending: Ending
    steps: int
    models: tuple[TrainedModel, ...] = ()
    optimizers: tuple[UsedOptimizer, ...] = ()
    stand_ins: tuple[StandIn, ...] = ()
    writes: tuple[str, ...] = ()
    message: str = ""
    place: str = ""
    growth: Growth | None = None
    counted: Literal["samples", "batches"] = "samples"
    tasks: tuple[ScriptTask, ...] = ()
    total_steps: int | None = None
    lengths: BatchLengths | None = None

    def fills(self, room_bytes: int) -> bool:
        """Return whether the training, which leaves this much room in its executed steps, runs out of memory later."""
        grows = self.growth is not None and self.growth.fills_within(self.total_steps)
        return grows or any(task.left_bytes > room_bytes for task in self.tasks)
