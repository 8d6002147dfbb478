"""Techniques that a row of the grid uses; errors are grouped by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Mapped = Mapping[str, Any]
Test = Callable[[Mapped, Mapped], bool]

PADDED = ("attention_mask", "padding")
FULL_EVAL = ("bf16_full_eval", "fp16_full_eval")
BITSANDBYTES = ("bnb", "8bit", "bitsandbytes", "paged")


def _optimizer(train: Mapped) -> str:
    return str(train.get("optim", "adamw_torch_fused"))


TECHNIQUES: Mapping[str, Test] = {
    "inference": lambda row, train: row.get("mode") == "inference",
    "tf32": lambda row, train: bool(train.get("tf32")),
    "fp16 autocast": lambda row, train: bool(train.get("fp16")),
    "bf16 autocast": lambda row, train: bool(train.get("bf16")),
    "16-bit weights": lambda row, train: "dtype" in row["model"] or any(key in train for key in FULL_EVAL),
    "gradient accumulation": lambda row, train: train.get("gradient_accumulation_steps", 1) > 1,
    "gradient checkpointing": lambda row, train: bool(train.get("gradient_checkpointing")),
    "LoRA": lambda row, train: "lora" in row["model"],
    "frozen parameters": lambda row, train: "freeze" in row["model"],
    "mask or padding": lambda row, train: any(row.get("data", {}).get(key) for key in PADDED),
    "eager attention": lambda row, train: row["model"].get("attn_implementation") == "eager",
    "AdamW, foreach or for-loop": lambda row, train: "foreach" in train.get("optim_args", ""),
    "SGD": lambda row, train: _optimizer(train) == "sgd",
    "Adafactor": lambda row, train: _optimizer(train) == "adafactor",
    "8-bit or paged optimizer": lambda row, train: any(word in _optimizer(train).lower() for word in BITSANDBYTES),
    "RMSprop, Adagrad": lambda row, train: _optimizer(train) in ("rmsprop", "adagrad"),
    "no clipping": lambda row, train: train.get("max_grad_norm") == 0,
    "plain PyTorch loop": lambda row, train: row.get("loop") == "pytorch",
    "gradients zeroed, not freed": lambda row, train: row.get("zero_grad_set_to_none") is False,
    "expandable segments": lambda row, train: "expandable_segments" in row.get("allocator", ""),
    "max_split_size_mb": lambda row, train: "max_split_size_mb" in row.get("allocator", ""),
}
PLAIN = "fp32, none of these"


def techniques(workload: Mapped) -> list[str]:
    """Return the techniques of a workload file's content, in the order of ``TECHNIQUES``."""
    train = workload.get("train", {})
    return [name for name, used in TECHNIQUES.items() if used(workload, train)] or [PLAIN]
