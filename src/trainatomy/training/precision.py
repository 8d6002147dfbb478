"""Mixed precision, and the settings of a process that a run must give back."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trainatomy.workload.train import TrainSpec


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
