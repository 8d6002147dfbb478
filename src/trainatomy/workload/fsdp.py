"""FSDP's configuration (``train.fsdp_config``): refuse keys that are ignored, and what is not simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainatomy.results.prediction import fsdp_version
from trainatomy.workload.document import suggestion
from trainatomy.workload.section import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainatomy.workload.schema import Workload

_FSDP_CONFIG = frozenset(
    "activation_checkpointing auto_wrap_policy backward_prefetch cpu_offload cpu_ram_efficient_loading "
    "forward_prefetch limit_all_gathers min_num_params reshard_after_forward state_dict_type sync_module_states "
    "transformer_layer_cls_to_wrap use_orig_params version".split()
)
"""Keys that ``TrainingArguments`` reads from ``fsdp_config`` (transformers 5.17), with or without ``fsdp_``."""

SHARDING_STRATEGY = "sharding_strategy"
"""A key of ours in ``fsdp_config``: the variable ``FSDP_SHARDING_STRATEGY``, which ``accelerate launch`` sets.

For FSDP1, accelerate 1.15 reads this variable instead of ``reshard_after_forward``, which transformers gives it.
"""
PREPARED_BY = "prepared_by"
"""A key of ours in ``fsdp_config``: the framework whose preparation of a model replaces accelerate's for FSDP2."""
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_OFFLOADED = "gradient_checkpointing: true with gradient_checkpointing_kwargs: {offload: true}"

_STATE_DICTS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
"""Checkpoints of FSDP that are simulated."""


def fsdp_problems(workload: Workload) -> list[Problem]:
    """Refuse keys that transformers would ignore, and what is not simulated."""
    here, problems = ("train", "fsdp_config"), []
    for key, value in (workload.train.fsdp_config or {}).items():
        name = key.removeprefix("fsdp_")
        if name.startswith("xla") and value:
            problems.append(Problem((*here, key), "is about TPUs, which are not simulated"))
        elif key == SHARDING_STRATEGY:
            problems += _sharding_problems((*here, key), value, workload.train.fsdp_config or {})
        elif key == PREPARED_BY:
            is_second = fsdp_version(workload.train.fsdp_config) == 2 and workload.loop == "trainer"
            if value != "axolotl" or not is_second:
                problems.append(
                    Problem((*here, key), f"must be axolotl, with loop: trainer and version: 2, not {value!r}")
                )
        elif name == "activation_checkpointing_offload":
            if str(value).lower() in ("true", "1"):
                message = "is not passed on to accelerate by TrainingArguments (transformers 5.17)"
                problems.append(Problem((*here, key), f"{message}: use train.{_OFFLOADED}"))
        elif name == "state_dict_type" and workload.saves and str(value).upper() not in _STATE_DICTS:
            message = f"saving is simulated with {' and '.join(_STATE_DICTS)}, found {value}"
            problems.append(Problem((*here, key), message))
        elif name not in _FSDP_CONFIG and not name.startswith("xla"):
            problems.append(Problem((*here, key), f"unknown key{suggestion(name, _FSDP_CONFIG)}"))
        elif name == "version" and str(value) not in ("1", "2"):
            problems.append(Problem((*here, key), f"must be 1 or 2, found {value!r}"))
    return problems


def _sharding_problems(here: tuple[str, ...], value: Any, config: Mapping[str, Any]) -> list[Problem]:
    """Refuse a strategy of FSDP1 that does not exist, or with FSDP2."""
    if fsdp_version(config) != 1:
        return [Problem(here, "is FSDP1's (version: 1); with FSDP2, use reshard_after_forward")]
    if str(value).upper() not in _STRATEGIES:
        return [Problem(here, f"must be one of {', '.join(_STRATEGIES)}, found {value!r}")]
    return []
