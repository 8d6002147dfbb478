"""FitScout (https://pypi.org/project/fitscout/): Megatron's formula for activations, and bytes per parameter.

Its formula for blocks is that of *Reducing Activation Recomputation in Large Transformer Models* (arXiv 2205.05198),
on which most calculators rest.  It is asked by its own functions, with the shipped configuration and the exact number
of parameters, for causal language models, the only ones it covers.
"""

from __future__ import annotations

from typing import Any

from rivals import About, NoAnswer
from rivals.shipped import trained_decoder

ABOUT = About(
    tool="FitScout (Megatron's formula)",
    packages=("fitscout",),
    figure="device",
    how="its total for the row's architecture, batch, sequence, precision, adapters and checkpointing",
)
EIGHT_BIT = ("adamw_bnb_8bit", "paged_adamw_8bit")
ADAM = ("adamw_torch", "adamw_torch_fused", *EIGHT_BIT)


def answer(line: dict[str, Any]) -> int:
    """Return its estimate for the row of a measured line, bytes."""
    from fitscout.memory.estimator import estimate_memory
    from fitscout.model.introspect import extract_arch_fields
    from fitscout.model.profile import ModelProfile

    row = trained_decoder(line)
    train, spec = row.workload.train, row.workload.model
    if train.optim not in ADAM or spec.freeze:
        raise NoAnswer("it knows AdamW in 32 and 8 bits, and no frozen parameters")
    size = 4 if row.precision == "fp32" else 2
    profile = ModelProfile(params=row.parameters, dtype_bytes=size, **extract_arch_fields(row.config))
    estimate = estimate_memory(
        profile,
        method="lora" if spec.lora else "full",
        micro_batch=row.workload.batch_size,
        seq_len=row.workload.data.sequence_length,
        grad_ckpt=bool(train.gradient_checkpointing),
        opt_8bit=train.optim in EIGHT_BIT,
        grad_dtype_bytes=size,
        **({"lora_rank": spec.lora.r} if spec.lora else {}),
    )
    return round(estimate.total_gb * 2**30)
