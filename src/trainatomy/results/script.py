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


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory that each step of a training adds and never releases.

    ``operation`` and ``module`` made most of it. The GPU is full after ``steps``.
    """

    bytes_per_step: int
    operation: str
    module: str
    steps: int


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """A script that ran without a GPU.

    ``command`` is the script with its arguments as they were typed. ``message`` says why it ended where it ended by an
    error, and ``place`` is the script's line. ``writes`` are the paths that it would have written to, and did not.
    ``growth`` is None where memory stays the same from step to step.
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
