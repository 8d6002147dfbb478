"""The ``trl`` section: names of TRL's configurations, and which of them are applied (``trl.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from trainatomy.catalog.files import parse_yaml
from trainatomy.workload.document import suggestion
from trainatomy.workload.loops import LOOPS
from trainatomy.workload.section import Problem

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload


MAX_LENGTH = 1024
"""Tokens to which TRL cuts a sample unless ``max_length`` says otherwise."""


@dataclass(frozen=True)
class TrlSettings:
    """The content of ``trl.yaml``.

    Attributes:
        applied: Names that TRL's own configuration gets.
        ignored: Names that change nothing, with the reason.
        accepted: Values that change nothing, of names that are refused with any other.
        refused: Why they are refused.
    """

    applied: frozenset[str]
    ignored: Mapping[str, str]
    accepted: Mapping[str, tuple[Any, ...]]
    refused: Mapping[str, str]

    def names(self) -> frozenset[str]:
        """Return all names."""
        return self.applied | self.ignored.keys() | self.refused.keys()

    def problem(self, name: str, value: Any) -> str | None:
        """Return why a setting is refused, None if it is not."""
        if name in self.refused:
            harmless = value is None or value in self.accepted[name]
            return None if harmless else f"not supported: {self.refused[name]}"
        return None if name in self.names() else f"unknown key{suggestion(name, self.names())}"


@cache
def trl_settings() -> TrlSettings:
    """Read ``trl.yaml`` once."""
    raw = parse_yaml(files(__package__).joinpath("trl.yaml").read_text(encoding="utf-8"))
    return TrlSettings(
        applied=frozenset(raw["applied"]),
        ignored={name: reason for reason, names in raw["ignored"].items() for name in names},
        accepted={name: tuple(rule["values"]) for name, rule in raw["refused"].items()},
        refused={name: rule["reason"] for name, rule in raw["refused"].items()},
    )


COUNTS = ("max_length", "num_generations", "steps_per_generation", "generation_batch_size", "num_iterations")
"""Settings that are whole numbers."""


def applied_settings(workload: Workload) -> dict[str, Any]:
    """Return the settings of the section ``trl`` that TRL's configuration gets."""
    return {name: value for name, value in workload.trl.items() if name in trl_settings().applied}


def max_length(workload: Workload) -> int | None:
    """Return the tokens that TRL lets a sample or a pack have, None for no limit."""
    limit: int | None = workload.trl.get("max_length", MAX_LENGTH)
    return limit


def packing_strategy(workload: Workload) -> str | None:
    """Return how ``loop: sft`` packs samples, None if it does not."""
    if workload.loop != "sft" or not workload.trl.get("packing"):
        return None
    return str(workload.trl.get("packing_strategy", "bfd"))


def steps_per_generation(workload: Workload) -> int:
    """Return after how many optimizer steps ``loop: grpo`` generates again, as ``GRPOConfig`` computes it."""
    train, settings = workload.train, applied_settings(workload)
    rounds = settings.get("steps_per_generation")
    if rounds is None and (size := settings.get("generation_batch_size")):
        rounds = size // train.per_device_train_batch_size
    every: int = (rounds or train.gradient_accumulation_steps) * settings.get("num_iterations", 1)
    return max(1, every // train.gradient_accumulation_steps)


def trl_problems(workload: Workload) -> list[Problem]:
    """Refuse settings of TRL that do not exist, or are not simulated."""
    if LOOPS[workload.loop].settings is None or workload.mode != "training":
        return []
    found = ((name, trl_settings().problem(name, value)) for name, value in workload.trl.items())
    return [Problem(("trl", name), message) for name, message in found if message is not None]
