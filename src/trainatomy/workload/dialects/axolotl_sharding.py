"""axolotl: DDP, DeepSpeed and FSDP.

Sources: ``utils/schemas`` and ``core/builders`` of ``src/axolotl``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainatomy.workload.arguments import is_off
from trainatomy.workload.fsdp import PREPARED_BY

if TYPE_CHECKING:
    from trainatomy.workload.dialects.translation import Translation

_RUN = "`trainatomy run axolotl train FILE` executes axolotl itself without a GPU"
_FSDP = {"offload_params": "cpu_offload"}
_FSDP_KEYS = frozenset(
    "activation_checkpointing offload_params sync_module_states cpu_ram_efficient_loading use_orig_params "
    "state_dict_type auto_wrap_policy transformer_layer_cls_to_wrap reshard_after_forward min_num_params".split()
)
"""Settings of FSDP that axolotl reads; it leaves out others."""


def uses_fsdp(said: Translation) -> bool:
    """Return whether the training is sharded by FSDP."""
    return not is_off(said.value("fsdp_config")) or not is_off(said.value("fsdp"))


def read_sharding(said: Translation) -> None:
    """Read DDP, DeepSpeed and FSDP; axolotl prepares models for FSDP2 itself."""
    unused = said.take("ddp_find_unused_parameters")
    sharded = not is_off(said.take("deepspeed")) or uses_fsdp(said)
    if not sharded:
        said.set("train.ddp_find_unused_parameters", not is_off(unused), "ddp_find_unused_parameters")
    if (deepspeed := said.configuration("deepspeed")) is not None:
        said.set("train.deepspeed", deepspeed, "deepspeed")
    config, version, switch = said.take("fsdp_config") or {}, said.take("fsdp_version"), said.take("fsdp")
    if not isinstance(config, Mapping):
        said.reject("fsdp_config", f"must be a mapping of keys to values, found {config!r}")
        return
    settings = {str(key).removeprefix("fsdp_"): value for key, value in config.items()}
    version = version or settings.get("version") or 1
    if is_off(switch) and not settings:
        return
    read = {_FSDP.get(key, key): value for key, value in settings.items() if key in _FSDP_KEYS and value is not None}
    own: dict[str, Any] = {"version": 1}
    if str(version) == "2":
        own = {"version": 2, PREPARED_BY: "axolotl"}
        _check_fsdp2(said, settings)
        shards, copies = said.count("dp_shard_size", 1), said.count("dp_replicate_size", 1)
        if shards > 1 or copies > 1:
            said.set("parallel.gpus", shards * copies, "dp_shard_size", "dp_replicate_size")
            said.set("parallel.dp_replicate_size", copies, "dp_replicate_size")
    said.set("train.fsdp", True, "fsdp", "fsdp_config")
    said.set("train.fsdp_config", {**read, **own}, "fsdp_config")


def _check_fsdp2(said: Translation, settings: Mapping[str, Any]) -> None:
    """Reject what axolotl rejects with FSDP2, and refuse what is not simulated."""
    if not is_off(said.value("load_in_4bit")) and not is_off(settings.get("cpu_ram_efficient_loading")):
        said.reject(
            "fsdp_config", "cpu_ram_efficient_loading does not go with load_in_4bit, as axolotl says: set false"
        )
    if said.value("optimizer") in ("adamw_8bit", "adamw_bnb_8bit"):
        said.reject("optimizer", "does not go with FSDP2, as axolotl says: use adamw_torch_8bit")
    if settings.get("cpu_offload_pin_memory") is False:
        said.refuse("fsdp_config", f"cpu_offload_pin_memory: false: not simulated: copies of pageable memory; {_RUN}")
