"""FitCheck (https://pypi.org/project/fitcheck-llm/): formulas for decoders, with an overhead fitted on a T4.

Its own functions are called, with the shipped configuration instead of one from the hub, and the number of parameters
that the hub would report; it refuses models that its parameter formula does not fit.
"""

from __future__ import annotations

from typing import Any

from rivals import About, NoAnswer
from rivals.shipped import Shipped, trained_decoder

ABOUT = About(
    tool="FitCheck",
    packages=("fitcheck-llm",),
    figure="device",
    how="its total for the row's architecture, batch, sequence, precision, optimizer, adapters and checkpointing",
)
OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adam8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "sgd": "sgd",
    "adafactor": "adafactor",
}


def answer(line: dict[str, Any]) -> int:
    """Return its estimate for the row of a measured line, bytes."""
    from fitcheck.estimator import estimate
    from fitcheck.gpu_db import get_gpu

    row = trained_decoder(line)
    report = estimate(_configuration(row), _training(row), get_gpu("h200"))
    return round(report.total_mib * 2**20)


def _configuration(row: Shipped) -> Any:
    from fitcheck import config_parser as parser

    name = str(row.workload.model.id or type(row.model).__name__)
    parser._reject_unsupported(row.config, name)
    fields = parser._parse_fields(row.config)
    count = parser._reconcile_param_count(name, row.parameters, parser._count_params(fields))
    values = {field: getattr(fields, field) for field in fields.__dataclass_fields__}
    return parser.ModelConfig(name=name, num_params=count, **values)


def _training(row: Shipped) -> Any:
    from fitcheck.estimator import TrainingConfig
    from fitcheck.memory.lora import LORA_TARGETS_FULL

    train, lora = row.workload.train, row.workload.model.lora
    if train.optim not in OPTIMIZERS or row.workload.model.freeze:
        raise NoAnswer(f"it does not know {train.optim} or frozen parameters")
    targets = lora.target_modules if lora else None
    return TrainingConfig(
        precision=row.precision,
        optimizer=OPTIMIZERS[train.optim],
        batch_size=row.workload.batch_size,
        seq_len=row.workload.data.sequence_length,
        lora_rank=lora.r if lora else None,
        lora_targets=list(LORA_TARGETS_FULL) if targets == "all-linear" else list(targets or ()),
        grad_checkpoint=bool(train.gradient_checkpointing),
        flash_attn=row.is_flash,
        grad_accum_steps=train.gradient_accumulation_steps,
    )
