"""Precision of a step: autocast, TF32, and the dtype of inference."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trainatomy.workload.train import TrainSpec


def set_tf32(train: TrainSpec) -> None:
    """Allow or forbid TF32 in float32 operations, as ``TrainingArguments`` does, if the workload says which.

    The setting holds for the process until ``process.isolated_process_settings`` restores it.
    """
    if train.tf32 is not None:
        backends: Any = torch.backends
        backends.fp32_precision = "tf32" if train.tf32 else "ieee"


def autocast(train: TrainSpec, device_type: str) -> AbstractContextManager[object]:
    """Return autocast in the precision of ``train``, or a context manager that does nothing."""
    if train.fp16:
        return torch.autocast(device_type, dtype=torch.float16)
    if train.bf16:
        return torch.autocast(device_type, dtype=torch.bfloat16)
    return nullcontext()


def full_precision_of_inference(train: TrainSpec) -> torch.dtype | None:
    """Return the dtype to which inference casts the whole model, or ``None``."""
    if train.fp16_full_eval:
        return torch.float16
    return torch.bfloat16 if train.bf16_full_eval else None
