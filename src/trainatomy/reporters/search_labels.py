"""Titles and notes of a search: its axes and options, what they may change, remedies, and the legend of its chart."""

from __future__ import annotations

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
    "layers": "layers",
}
"""Names of what a search varies, by the axes of ``results.fit.Change``."""

OPTIONS = {
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
    "batch_norm": (
        "The model has BatchNorm, which takes its statistics from each GPU's own batch: the number of GPUs and the "
        "batch size change what is learnt. torch.nn.SyncBatchNorm takes them from all GPUs."
    ),
}
"""Notes of a search by code; ``{}`` stands for the value that follows the code and a colon."""
