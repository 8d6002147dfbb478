"""The settings of a training in words: the options of a search, what they may change, and how two settings differ.

Titles and notes of a search: its axes and options, what they may change, remedies, and the legend of its chart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import yaml

from trainatomy.results.fit import Candidate, Change
from trainatomy.results.prediction import Plan
from trainatomy.units import many
from trainatomy.workload.schema import Workload
from trainatomy.workload.section import leaves

FIT_MARKS = {
    "best": "best",
    "tie": "may be as fast",
    "fits": "fits",
    "too_large": "does not fit",
    "front": "Pareto front: none is faster with less memory",
    "interval": "90 % interval",
}
"""Legend of the chart of a search."""

PERMISSIONS = {
    "precision": "Activations and gradients are rounded differently.",
    "optimizer": "The update rule is different: tune the learning rate again.",
    "lora": "Only adapters are trained, not the weights.",
    "quantization": "The frozen weights are rounded to 4 or 8 bits.",
    "sequence-length": "The context is shorter: longer samples are cut.",
    "evaluation": "Training stays the same; evaluations run or report differently.",
}
"""Effect of a change on what is learnt, by the permission that it needs."""

MAY_CHANGE = {
    ("precision", "bf16_weights"): "Weights, gradients and optimizer states are rounded to 16 bits.",
    ("optimizer", "adamw_8bit"): "Optimizer states are rounded to 8 bits.",
    ("optimizer", "paged_adamw_8bit"): "Optimizer states are rounded to 8 bits.",
    ("evaluation", "accumulate_8"): "Gathered outputs wait in host memory, which has to hold them all.",
    ("evaluation", "accumulate_1"): "Gathered outputs wait in host memory, which has to hold them all.",
    ("evaluation", "predicted_ids"): "compute_metrics gets the predicted ids instead of the logits.",
    ("evaluation", "loss_only"): "Evaluations compute the loss, and no metrics.",
}
"""The same for single options, by axis and option."""

VARIED = {
    "batch": "batch size",
    "mini_batch": "mini-batches of the loss",
    "gradient_checkpointing": "gradient checkpointing",
    "optimizer_implementation": "optimizer implementation",
    "attention": "attention",
    "allocator": "allocator settings",
    "torch_empty_cache_steps": "emptying of the cache",
    "plan": "plan of parallelism",
    "gpus": "GPUs",
    "precision": "precision",
    "optimizer": "optimizer",
    "lora": "LoRA",
    "quantization": "quantised weights",
    "sequence_length": "sequence length",
    "evaluation": "what evaluations gather",
    "eval_batch": "batch size of evaluations",
    "effective_batch_size": "effective batch size",
    "torch_compile": "torch.compile",
    "layers": "layers",
}
"""Names of what a search varies, by the axes of ``results.fit.Change``."""

OPTIONS = {
    "mini_batch": {"off": "a loss without mini-batches"},
    "gradient_checkpointing": {"off": "gradient checkpointing off", "on": "gradient checkpointing on"},
    "optimizer_implementation": {
        "fused": "fused optimizer",
        "foreach": "foreach optimizer",
        "for_loop": "for-loop optimizer",
    },
    "allocator": {"default": "default allocator settings", "expandable_segments": "expandable segments"},
    "torch_empty_cache_steps": {"never": "cache never emptied", "every_step": "cache emptied every step"},
    "plan": {
        "ddp": "DDP",
        "dp": "DataParallel",
        "ddp_bucket_view": "DDP (gradient_as_bucket_view)",
        "zero1": "ZeRO-1",
        "zero1_bucket_view": "ZeRO-1 (gradient_as_bucket_view)",
        "fsdp2": "FSDP2",
        "fsdp2_keep": "FSDP2 (reshard_after_forward=False)",
        "fsdp1": "FSDP1",
        "fsdp1_keep": "FSDP1 (reshard_after_forward=False)",
    },
    "precision": {
        "fp32": "fp32",
        "tf32": "TF32",
        "fp16": "fp16 mixed precision",
        "bf16": "bf16 mixed precision",
        "bf16_weights": "bf16 weights",
    },
    "optimizer": {
        "adamw": "AdamW",
        "adamw_8bit": "8-bit AdamW",
        "paged_adamw_8bit": "paged 8-bit AdamW",
        "adafactor": "Adafactor",
        "sgd": "SGD",
    },
    "lora": {"none": "no LoRA"},
    "torch_compile": {
        "given": "not compiled",
        "whole": "torch.compile, whole",
        "by_layer": "torch.compile, layer by layer",
    },
    "evaluation": {
        "accumulate_8": "eval_accumulation_steps 8",
        "accumulate_1": "eval_accumulation_steps 1",
        "predicted_ids": "preprocess_logits_for_metrics that keeps the predicted ids",
        "loss_only": "prediction_loss_only",
    },
    "quantization": {"none": "weights not quantised", "nf4": "4-bit weights (NF4)", "int8": "8-bit weights"},
}
"""Options of a search by axis; ``reporters.settings`` puts the others into words."""

STRATEGIES = {
    "ddp": "DDP",
    "dp": "DataParallel",
    "zero1": "ZeRO-1",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    **{f"deepspeed{stage}": f"DeepSpeed ZeRO-{stage}" for stage in range(4)},
}
"""Short names of strategies, by the names of ``results.plan.Plan``."""

GOALS = {
    "batch": "samples per batch",
    "sequence-length": "tokens per sample",
    "model-size": "layers",
}
"""Names of what is maximised, by the goals of ``results.fit.Fit``."""

REMEDIES = {
    "same training": "Without changing what is trained:",
    "changes training": "Changing what is trained:",
    "more GPUs": "More GPUs:",
    "larger GPU": "A larger GPU, nothing else changed:",
    "insufficient": "These help, but are not enough alone:",
}
"""Headings of remedies, by the names of ``results.fit.RemedyKind``, and of those that do not suffice."""

FIT_NOTES = {
    "few_batch_sizes": (
        "The effective batch size has few divisors, so there are few batch sizes to choose from; "
        "a multiple of 8 has more."
    ),
    "fewer_gpus": (
        "{} GPUs are as fast as all that were given, or faster: at this effective batch size, more of them do not pay."
    ),
    "best_with_all_lengths": (
        "Candidates were compared by a few orders and lengths of the samples; the best one was then predicted with all."
    ),
    "none_with_all_lengths": (
        "None of the {} best candidates fits with all orders and lengths of the samples: ask for more headroom."
    ),
    "fewer_lengths": (
        "Every figure is of a few orders and lengths of the samples; trainatomy predict executes all of them."
    ),
    "compiled_is_best": (
        "The best settings are compiled, which trains the same but for rounding; what single changes cost or save is "
        "of the same settings without torch.compile."
    ),
    "not_compiled": (
        "torch.compile was not tried. It trains the same but for rounding: --try-compile predicts the best settings "
        "compiled, layer by layer and whole, in 5 to 10 and 15 to 30 s of CPU time more for 12 layers."
    ),
    "compared_in_batch": (
        "The loss compares each sample with the others of its batch, so that more accumulation steps of smaller "
        "batches would train something else: both stay as they are. Mini-batches of a cached loss train the same."
    ),
    "batch_norm": (
        "The model has BatchNorm, which takes its statistics from each GPU's own batch: the number of GPUs and the "
        "batch size change what is learnt. torch.nn.SyncBatchNorm takes them from all GPUs."
    ),
}
"""Notes of a search by code; ``{}`` stands for the value that follows the code and a colon."""


_CHECKPOINTING = "gradient_checkpointing"


def option(change: Change) -> str:
    """Return a change in words: ``gradient checkpointing on``, ``LoRA of rank 16``, ``batch 16``."""
    axis, name = change.axis, change.option
    if (known := OPTIONS.get(axis, {}).get(name)) is not None:
        return known
    number = name.removeprefix("every_").removesuffix("_steps").removeprefix("r")
    if number.isdecimal():
        match axis:
            case "batch":
                return _batch(int(number), change.settings.get("train.gradient_accumulation_steps"))
            case "gradient_checkpointing":
                return f"gradient checkpointing of every {_ordinal(int(number))} layer"
            case "mini_batch":
                loss = change.settings.get("sentence_transformers.loss", "a cached loss")
                return f"{loss} with mini_batch_size {number}"
            case "torch_empty_cache_steps":
                return f"cache emptied every {number} steps"
            case "lora":
                return f"LoRA of rank {number}"
            case "sequence_length":
                return f"{many(int(number), 'token')} per sample"
            case "layers":
                return many(int(number), "layer")
            case "gpus":
                return many(int(number), "GPU")
            case "eval_batch":
                return f"per_device_eval_batch_size {number}"
            case "effective_batch_size":
                return f"effective batch size {number}"
    if axis == "plan":
        return _plan_option(name)
    if "." in axis:
        return f"{axis} {name}"
    words = name.replace("_", " ")
    return f"{words} attention" if axis == "attention" else f"{VARIED.get(axis, axis.replace('_', ' '))}: {words}"


def _plan_option(name: str) -> str:
    """Return a plan that has no label of its own: ``hsdp_2_keep``, ``fsdp2_reshard_4``."""
    if name.startswith("hsdp_"):
        _, replicas, *rest = name.split("_")
        kept = " (reshard_after_forward=False)" if rest == ["keep"] else ""
        return f"FSDP2 with {replicas} replicas{kept}"
    strategy, _, kept = name.partition("_reshard")
    return f"{STRATEGIES.get(strategy, strategy)} (reshard_after_forward={kept.strip('_') or True})"


def options(changes: Sequence[Change]) -> str:
    """Return several changes in words, separated by commas."""
    return ", ".join(map(option, changes))


def plan_name(plan: Plan) -> str:
    """Return a plan of parallelism in a few words: ``DDP, 8 GPUs``, ``FSDP2 × TP 4, 2 nodes × 8``."""
    if plan.world_size == 1:
        return "1 GPU"
    count = f"{plan.gpus} GPUs" if plan.nodes == 1 else f"{plan.nodes} nodes × {plan.gpus}"
    return f"{strategy_name(plan)}, {count}"


def rank_name(plan: Plan, number: int) -> str:
    """Return what a bill is of: a rank, or a GPU of the one process of ``DataParallel``."""
    return f"GPU {number}" if plan.strategy == "dp" else f"rank {number}"


def strategy_name(plan: Plan) -> str:
    """Return how a training is spread, without the number of GPUs: ``DDP``, ``FSDP2 × TP 4``."""
    name = STRATEGIES.get(plan.strategy, plan.strategy)
    if plan.replicas > 1:
        name = f"{name} with {plan.replicas} replicas"
    parts = [name] * bool(name) + [f"TP {plan.tp_size}"] * (plan.tp_size > 1)
    parts += [f"PP {plan.pp_size}"] * (plan.pp_size > 1) + [f"CP {plan.cp_size}"] * (plan.cp_size > 1)
    return " × ".join(parts) or "-"


def may_change(change: Change) -> str:
    """Return what is learnt differently after a change, as a sentence; empty if the same is trained."""
    general = PERMISSIONS.get(change.permission, change.permission)
    return MAY_CHANGE.get((change.axis, change.option), general)


def settings_of(candidate: Candidate) -> str:
    """Return the settings of a candidate: its plan, its batch, its gradient checkpointing, and its other changes."""
    plan = [plan_of(candidate)] if candidate.plan.world_size > 1 else []
    others = _by_axis(candidate).values()
    return ", ".join([*plan, batch(candidate), _checkpointing(candidate), *map(option, others)])


def plan_of(candidate: Candidate) -> str:
    """Return the plan of a candidate with PyTorch's option: ``FSDP2, 8 GPUs (reshard_after_forward=False)``."""
    _, bracket, rest = plan_detail(candidate.workload).partition(" (")
    return f"{plan_name(candidate.plan)}{bracket}{rest}"


def by_gpus(candidate: Candidate) -> str:
    """Return the settings of a candidate in a table by the number of GPUs, without its batch."""
    name = plan_of(candidate) if candidate.plan.world_size > 1 else plan_name(candidate.plan)
    checkpointed = [] if _checkpointing(candidate).endswith(" off") else [_checkpointing(candidate)]
    return ", ".join([name, *checkpointed, *map(option, _by_axis(candidate).values())])


def plan_detail(workload: Mapping[str, object]) -> str:
    """Return the strategy of a workload with the options that a search varies: ``DDP (gradient_as_bucket_view)``."""
    name = strategy_name(Plan.of(workload))
    if setting(workload, "parallel.gradient_as_bucket_view"):
        return f"{name} (gradient_as_bucket_view)"
    reshard = setting(workload, "parallel.reshard_after_forward")
    if reshard is None:
        reshard = setting(workload, "train.fsdp_config.reshard_after_forward")
    return f"{name} (reshard_after_forward=False)" if reshard is False else name


def batch(candidate: Candidate) -> str:
    """Return ``batch 16 × 4 accumulation steps``."""
    return _batch(candidate.per_device_train_batch_size, candidate.gradient_accumulation_steps)


def differences(candidate: Candidate, best: Candidate) -> str:
    """Return in what the settings of a candidate differ from those of the best one."""
    parts = [text(candidate) for text in (plan_of, batch, _checkpointing) if text(candidate) != text(best)]
    mine, others = _by_axis(candidate), _by_axis(best)
    for axis in dict.fromkeys((*mine, *others)):
        if axis not in mine:
            as_given = f"{VARIED.get(axis, axis.replace('_', ' '))} as given"
            parts.append(OPTIONS.get(axis, {}).get("given", as_given))
        elif axis not in others or mine[axis].option != others[axis].option:
            parts.append(option(mine[axis]))
    return ", ".join(parts) or "the same settings"


def _by_axis(candidate: Candidate) -> dict[str, Change]:
    named = ("batch", "plan", "gpus", _CHECKPOINTING)
    return {each.axis: each for each in candidate.changes if each.axis not in named}


def _batch(size: int, accumulation: object) -> str:
    if not isinstance(accumulation, int):
        return f"batch {size}"
    return f"batch {size}" if accumulation == 1 else f"batch {size} × {accumulation} accumulation steps"


def _checkpointing(candidate: Candidate) -> str:
    train: Any = candidate.workload.get("train", {})
    if not train.get("gradient_checkpointing", False):
        return "gradient checkpointing off"
    every = train.get("gradient_checkpointing_every", 1)
    return "gradient checkpointing on" if every == 1 else f"gradient checkpointing of every {_ordinal(every)} layer"


def _ordinal(number: int) -> str:
    """Return ``2nd``, ``3rd``, ``4th``, ``11th``."""
    last = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"


def setting(workload: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key of a workload, ``None`` where it is not set."""
    value: Any = workload
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def changed_keys(workload: Mapping[str, object], change: Change) -> list[str]:
    """Return the keys that a change sets to another value: ``train.optim: adamw_torch (was adamw_torch_fused)``."""
    lines = []
    for key, value in change.settings.items():
        before = setting(workload, key)
        before = defaults().get(key) if before is None else before
        if before != value:
            was = "not set" if before is None else plain(before)
            lines.append(f"{key}: {plain(value)} (was {was})")
    return lines


@cache
def defaults() -> dict[str, Any]:
    """Return the default of every key of a workload, by its dotted name."""
    return {".".join(map(str, path)): field.get_default(call_default_factory=True) for path, field in leaves(Workload)}


def plain(value: object) -> str:
    """Return a value as in a workload file: ``true``, ``16``, ``{r: 16, lora_alpha: 32}``."""
    if value is None:
        return "default"
    return (value or "default") if isinstance(value, str) else inline(value)


def inline(value: object) -> str:
    """Return a value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return text.strip().removesuffix("...").strip()


def same_but_batch(candidates: Sequence[Candidate], best: Candidate) -> list[Candidate]:
    """Return the candidates that differ from the best one in nothing but the batch size, by batch size."""
    found = {each.per_device_train_batch_size: each for each in candidates if _rest(each) == _rest(best)}
    found[best.per_device_train_batch_size] = best
    return [found[size] for size in sorted(found)]


def _rest(candidate: Candidate) -> dict[str, object]:
    """Return the workload without its batch size and accumulation."""
    ignored = ("per_device_train_batch_size", "gradient_accumulation_steps")
    train: Any = candidate.workload.get("train", {})
    return {**candidate.workload, "train": {name: value for name, value in train.items() if name not in ignored}}


def speed(candidate: Candidate, other: Candidate) -> float:
    """Return how fast a candidate trains as a multiple of another: per token if their samples differ in length."""
    mine, others = candidate.prediction.time, other.prediction.time
    if mine is None or others is None:
        return 1.0
    if differ_in_length((candidate, other)) and mine.tokens_per_second and others.tokens_per_second:
        return mine.tokens_per_second / others.tokens_per_second
    return candidate.samples_per_second / other.samples_per_second


def differ_in_length(candidates: Sequence[Candidate]) -> bool:
    """Return whether the samples of candidates differ in length."""
    return len({setting(each.workload, "data.sequence_length") for each in candidates}) > 1
