"""Mixed precision, and the settings of a process that a run must give back."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trainatomy.workload.train import TrainSpec


def set_tf32(train: TrainSpec) -> None:
    """Allow or forbid TF32 in products of float32 matrices, as ``TrainingArguments`` does, where the workload says so.

    Holds for the process, until ``process.own_process_settings`` puts it back.
    """
    if train.tf32 is not None:
        backends: Any = torch.backends
        backends.fp32_precision = "tf32" if train.tf32 else "ieee"


def autocast(train: TrainSpec, device_type: str) -> AbstractContextManager[object]:
    """Autocast in the precision of ``train``, or nothing."""
    if train.fp16:
        return torch.autocast(device_type, dtype=torch.float16)
    if train.bf16:
        return torch.autocast(device_type, dtype=torch.bfloat16)
    return nullcontext()


def full_precision_of_inference(train: TrainSpec) -> torch.dtype | None:
    """The dtype to which inference casts the whole model, or ``None``."""
    if train.fp16_full_eval:
        return torch.float16
    return torch.bfloat16 if train.bf16_full_eval else None
