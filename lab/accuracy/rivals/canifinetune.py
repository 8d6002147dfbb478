"""canifinetune (https://pypi.org/project/canifinetune/): formulas for decoders, fitted on an RTX 4080.

Its own functions are called, with the shipped configuration and number of parameters.  In its favour, its flat shares
of the GPU (8 % for CUDA, 5 % for safety) are subtracted, and the rest is compared with reserved memory, which it says
it estimates.
"""

from __future__ import annotations

from typing import Any

from rivals import About, NoAnswer
from rivals.shipped import Shipped, trained_decoder

ABOUT = About(
    tool="canifinetune",
    packages=("canifinetune",),
    figure="reserved",
    how="its total without its flat shares of the GPU's memory, for the row's architecture and settings",
)
OPTIMIZERS = {
    "adamw_torch": "adamw_torch",
    "adamw_torch_fused": "adamw_torch_fused",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "sgd": "sgd",
}
SCOPES = {"all-linear": "all_linear", ("q_proj", "v_proj"): "conservative"}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
CARD_GIB = 139.8
"""Memory of an H200; only the flat shares, which are subtracted, depend on it."""


def answer(line: dict[str, Any]) -> int:
    """Return its estimate for the row of a measured line, bytes."""
    from canifinetune.estimator.memory import EstimateRequest, estimate

    row = trained_decoder(line)
    memory = estimate(EstimateRequest(**_request(row))).memory
    return round((memory.total_estimated_gb - memory.cuda_overhead_gb - memory.safety_margin_gb) * 2**30)


def _request(row: Shipped) -> dict[str, Any]:
    train, lora = row.workload.train, row.workload.model.lora
    momentum = train.optim == "sgd" and train.optimizer_arguments()
    if train.optim not in OPTIMIZERS or momentum or row.workload.model.freeze:
        raise NoAnswer(f"it does not know {train.optim} with these settings, or frozen parameters")
    request = {
        "model_id": str(row.workload.model.id or type(row.model).__name__),
        "method": "lora" if lora else "full",
        "seq_len": row.workload.data.sequence_length,
        "micro_batch_size": row.workload.batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "base_dtype": row.precision,
        "optimizer": OPTIMIZERS[train.optim],
        "gradient_checkpointing": bool(train.gradient_checkpointing),
        "attention_implementation": "sdpa" if row.is_flash else "eager",
        "gpu_vram_gb": CARD_GIB,
        "override": _override(row),
        "use_network": False,
    }
    return request | ({"lora_rank": lora.r, "lora_target_scope": _scope(lora.target_modules)} if lora else {})


def _scope(targets: Any) -> str:
    key = targets if isinstance(targets, str) else tuple(targets or ())
    if key == ATTENTION:
        return "attention"
    if key not in SCOPES:
        raise NoAnswer(f"it has no scope for adapters of {targets}")
    return SCOPES[key]


def _override(row: Shipped) -> dict[str, Any]:
    """Return the configuration as its own reader makes it, with the family and the exact number of parameters."""
    from dataclasses import asdict

    from canifinetune.estimator.model_metadata import _from_hf_config

    metadata = _from_hf_config("given", row.config, exact_total_params=row.parameters)
    if metadata is None:
        raise NoAnswer("it cannot read the configuration")
    return asdict(metadata.arch) | {"family": metadata.family, "total_params": metadata.total_params}
