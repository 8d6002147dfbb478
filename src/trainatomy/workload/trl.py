"""The ``trl`` section: names of TRL's configurations, and which of them are applied (``trl.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from trainatomy.catalog.files import parse_yaml
from trainatomy.workload.loops import LOOPS
from trainatomy.workload.nearest import suggestion
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


def applied_settings(workload: Workload) -> dict[str, Any]:
    """Return the settings of the section ``trl`` that TRL's configuration gets."""
    return {name: value for name, value in workload.trl.items() if name in trl_settings().applied}


def steps_per_generation(workload: Workload) -> int:
    """Return after how many optimizer steps ``loop: grpo`` generates again, as ``GRPOConfig`` computes it."""
    train, settings = workload.train, applied_settings(workload)
    rounds = settings.get("steps_per_generation")
    if rounds is None and (size := settings.get("generation_batch_size")):
        rounds = size // train.per_device_train_batch_size
    every: int = (rounds or train.gradient_accumulation_steps) * settings.get("num_iterations", 1)
    return max(1, every // train.gradient_accumulation_steps)


def with_defaults(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the mapping of a workload with the defaults of its loop's configuration in the section ``train``.

    A precision that the mapping names replaces that of the defaults, as in TRL's ``__post_init__``.
    """
    loop = LOOPS.get(str(raw.get("loop")))
    train = raw.get("train") or {}
    if loop is None or raw.get("mode", "training") != "training" or not isinstance(train, Mapping):
        return raw
    defaults = dict(loop.defaults)
    if train.get("fp16"):
        defaults["bf16"] = False
    missing = {name: value for name, value in defaults.items() if train.get(name) is None}
    return {**raw, "train": {**train, **missing}}


def trl_problems(workload: Workload) -> list[Problem]:
    """Refuse settings of TRL that are not simulated, and those of workloads that TRL does not run."""
    settings = LOOPS[workload.loop].settings
    if settings is None or workload.mode != "training":
        if workload.data.prompt_length is not None:
            return [Problem(("data", "prompt_length"), "is of TRL's loops: sft and dpo")]
        return [Problem(("trl",), "needs a loop of TRL: sft, dpo or grpo")] if workload.trl else []
    found = ((name, trl_settings().problem(name, value)) for name, value in workload.trl.items())
    problems = [Problem(("trl", name), message) for name, message in found if message is not None]
    return problems + _about_data(workload) + _about_the_rest(workload)


def _about_data(workload: Workload) -> list[Problem]:
    data, problems = workload.data, []
    unused = {
        "factory": data.factory is not None,
        "lengths": data.lengths is not None,
        "attention_mask": data.attention_mask,
        "padding": bool(data.padding),
    }
    metrics = ("compute_metrics", "preprocess_logits_for_metrics")
    for name in (name for name in metrics if getattr(data, name)):
        message = f"is not simulated with loop: {workload.loop}: evaluation computes the loss"
        problems.append(Problem(("data", name), message))
    for name in (name for name, is_set in unused.items() if is_set):
        message = f"is not simulated with loop: {workload.loop}, whose batches TRL makes: give data.sequence_length"
        problems.append(Problem(("data", name), message))
    here = ("data", "prompt_length")
    if data.prompt_length is not None and workload.loop == "grpo":
        problems.append(Problem(here, "does not apply to loop: grpo, whose prompts have data.sequence_length tokens"))
    elif workload.loop == "dpo" and data.prompt_length is None:
        problems.append(Problem(here, "loop: dpo scores the tokens after the prompt: say how many the prompt has"))
    elif data.prompt_length is not None and data.prompt_length >= (data.sequence_length or data.prompt_length + 1):
        problems.append(Problem(here, "must be below data.sequence_length: the rest is the answer"))
    return problems


def _about_the_rest(workload: Workload) -> list[Problem]:
    problems, parallel = [], workload.parallel
    if parallel.world_size > 1 or parallel.devices > 1:
        problems.append(Problem(("parallel",), "TRL's trainers are simulated on one GPU"))
    if workload.train.gradient_checkpointing_every > 1:
        message = "is not simulated with TRL's trainers: use 1, or gradient_checkpointing: false"
        problems.append(Problem(("train", "gradient_checkpointing_every"), message))
    return problems
