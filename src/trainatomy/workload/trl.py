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
    """Refuse settings of TRL that are not simulated, and those of workloads that TRL does not run."""
    settings = LOOPS[workload.loop].settings
    if settings is None or workload.mode != "training":
        if workload.data.prompt_length is not None:
            return [Problem(("data", "prompt_length"), "is of TRL's loops: sft, dpo and kto")]
        of_trl = ", ".join(loop.name for loop in LOOPS.values() if loop.settings)
        return [Problem(("trl",), f"needs a loop of TRL: {of_trl}")] if workload.trl else []
    found = ((name, trl_settings().problem(name, value)) for name, value in workload.trl.items())
    problems = [Problem(("trl", name), message) for name, message in found if message is not None]
    return [
        *problems,
        *_about_data(workload),
        *_about_prompts(workload),
        *_about_rewards(workload),
        *_about_lengths(workload),
        *_about_order(workload),
        *_about_the_rest(workload),
    ]


def _about_data(workload: Workload) -> list[Problem]:
    data, problems = workload.data, []
    unused = {"factory": data.factory is not None, "attention_mask": data.attention_mask, "padding": bool(data.padding)}
    by_trl = {
        "packing": data.packing,
        "padding_free": data.padding_free,
        "pad_to_multiple_of": data.pad_to_multiple_of is not None,
    }
    metrics = ("compute_metrics", "preprocess_logits_for_metrics")
    for name in (name for name in metrics if getattr(data, name)):
        message = f"is not simulated with loop: {workload.loop}: evaluation computes the loss"
        problems.append(Problem(("data", name), message))
    for name in (name for name, is_set in unused.items() if is_set):
        message = f"is not simulated with loop: {workload.loop}, whose batches TRL makes: give data.sequence_length"
        problems.append(Problem(("data", name), message))
    for name in (name for name, is_set in by_trl.items() if is_set):
        message = f"TRL makes the batches of loop: {workload.loop}: give trl.{name}, where its configuration has it"
        problems.append(Problem(("data", name), message))
    return problems


def _about_prompts(workload: Workload) -> list[Problem]:
    """Refuse prompts that have no meaning, or a length that is missing or leaves no answer."""
    loop, data, here = workload.loop, workload.data, ("data", "prompt_length")
    if data.prompt_length is None:
        message = f"loop: {loop} scores the tokens after the prompt: say how many the prompt has"
        return [Problem(here, message)] if loop in ("dpo", "kto") else []
    if loop == "grpo":
        return [Problem(here, "does not apply to loop: grpo, whose prompts have data.sequence_length tokens")]
    if loop == "reward":
        return [Problem(here, "does not apply to loop: reward, which scores prompt and answer as one sequence")]
    if data.prompt_length >= (data.sequence_length or data.prompt_length + 1):
        return [Problem(here, "must be below data.sequence_length: the rest is the answer")]
    limit = max_length(workload)
    if limit is not None and data.prompt_length >= limit and not workload.trl.get("packing"):
        message = (
            f"TRL cuts samples to {limit} tokens (trl.max_length) and leaves out those that are all prompt then: "
            "set trl.max_length to what the training has"
        )
        return [Problem(here, message)]
    return []


def _about_rewards(workload: Workload) -> list[Problem]:
    """Refuse pairs of answers that are all longer than TRL's trainer of reward models takes."""
    limit, length = max_length(workload), workload.data.sequence_length
    if workload.loop != "reward" or limit is None or length is None or length <= limit:
        return []
    message = f"loop: reward leaves out samples of more than {limit} tokens (trl.max_length): raise it"
    return [Problem(("data", "sequence_length"), message)]


def _about_lengths(workload: Workload) -> list[Problem]:
    """Refuse samples that differ in length where a step depends on more than the lengths of its batch."""
    if workload.data.lengths is None:
        return []
    loop, settings, here = workload.loop, workload.trl, ("data", "lengths")
    strategy, sequential = packing_strategy(workload), workload.train.train_sampling_strategy == "sequential"
    reasons = {
        "loop: grpo, whose answers have lengths that depend on what is generated": loop == "grpo",
        "loop: kto, whose step also depends on how many tokens the answers labelled good have": loop == "kto",
        "trl.precompute_ref_log_probs: the reference model runs over all samples before the first step": bool(
            settings.get("precompute_ref_log_probs")
        ),
        f"data.prompt_length and trl.packing_strategy: {strategy}, which cuts samples anywhere": (
            strategy in ("bfd_split", "wrapped") and workload.data.prompt_length is not None
        ),
        "trl.shuffle_dataset in the order of the samples: give train.train_sampling_strategy: random": bool(
            settings.get("shuffle_dataset") and sequential
        ),
    }
    return [Problem(here, f"are not simulated with {reason}") for reason, found in reasons.items() if found]


def _about_order(workload: Workload) -> list[Problem]:
    """Refuse what TRL's trainers refuse of the order and the number of samples, and of their maximum length."""
    loop, strategy, problems = workload.loop, workload.train.train_sampling_strategy, []
    pairs_neighbours = loop == "kto" and workload.trl.get("loss_type", "kto") == "kto"
    if pairs_neighbours and strategy != "sequential":
        message = "loop: kto pairs each prompt with the answer beside it, in sequential order only"
        problems.append(Problem(("train", "train_sampling_strategy"), message))
    elif strategy == "group_by_length" and loop in ("dpo", "kto", "reward"):
        message = (
            f"group_by_length needs input_ids, which the samples of loop: {loop} do not have: TRL stops with an error"
        )
        problems.append(Problem(("train", "train_sampling_strategy"), message))
    if pairs_neighbours and workload.batch_size < 2:
        message = "must be at least 2 with loop: kto, which pairs each prompt with another one's answer"
        problems.append(Problem(("train", "per_device_train_batch_size"), message))
    packs, is_unlimited = packing_strategy(workload) is not None, max_length(workload) is None
    if packs and is_unlimited:
        problems.append(Problem(("trl", "max_length"), "is the length of packs: give it, or leave trl.packing out"))
    if workload.trl.get("padding_free") and not (packs or is_unlimited):
        message = "needs trl.max_length: null without packing: TRL does not truncate samples that it joins"
        problems.append(Problem(("trl", "padding_free"), message))
    return problems


def _about_the_rest(workload: Workload) -> list[Problem]:
    problems = _about_several_gpus(workload)
    if workload.train.gradient_checkpointing_every > 1:
        message = "is not simulated with TRL's trainers: use 1, or gradient_checkpointing: false"
        problems.append(Problem(("train", "gradient_checkpointing_every"), message))
    return problems


def _about_several_gpus(workload: Workload) -> list[Problem]:
    """Refuse plans of parallelism that TRL's trainers are not simulated with."""
    parallel, train, problems = workload.parallel, workload.train, []
    for name in ("tp_size", "cp_size", "pp_size"):
        if getattr(parallel, name) > 1:
            message = "is not simulated with TRL's trainers: DDP, FSDP and DeepSpeed are"
            problems.append(Problem(("parallel", name), message))
    if parallel.strategy == "dp":
        problems.append(Problem(("parallel", "strategy"), "DataParallel is not simulated with TRL's trainers: DDP is"))
    if train.fsdp and workload.trl.get("precompute_ref_log_probs"):
        message = "with FSDP, TRL loads a reference model for it, which is not simulated: leave it out"
        problems.append(Problem(("trl", "precompute_ref_log_probs"), message))
    return problems
