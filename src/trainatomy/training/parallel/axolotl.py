"""axolotl's preparation of a model for FSDP2, which it puts in the place of accelerate's.

Trained weights stay in their dtype, where accelerate casts them to float32; adapters are units of their own;
embeddings, the last norm and the output layer are in the root; ``activation_checkpointing`` wraps layers that
accelerate has wrapped already.

Source: ``fsdp2_prepare_model``, ``_process_lora_module_for_fsdp`` and ``fsdp2_load_full_state_dict`` of
``monkeypatch/accelerate/fsdp2.py``, axolotl 0.19.  Left out are weights in NVFP4, experts on different GPUs and norms
in float32, which the reader of its configurations refuses, and that 4-bit weights keep their class.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import accelerator
from accelerate.utils import get_module_children_bottom_up
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.modeling import get_non_persistent_buffers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


@contextmanager
def prepared_by_axolotl() -> Iterator[None]:
    """Prepare models for FSDP2 as axolotl does, while the context lasts."""
    accelerates = accelerator.fsdp2_prepare_model
    accelerator.fsdp2_prepare_model = _prepare
    try:
        yield
    finally:
        accelerator.fsdp2_prepare_model = accelerates


def _prepare(accelerator: Any, model: Any) -> nn.Module:
    """Shard the layers, the adapters and the rest of ``model`` in place."""
    plugin = accelerator.state.fsdp_plugin
    whole = model.state_dict()
    plugin.set_auto_wrap_policy(model)
    if plugin.activation_checkpointing:
        _checkpoint(model, plugin.auto_wrap_policy)
    offloads = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    mesh = accelerator.torch_device_mesh
    options = {
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_policy": plugin.cpu_offload,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "mesh": None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
    }
    is_packed = any(type(parameter).__name__ == "Params4bit" for parameter in model.parameters())
    buffers = _leave_to_first_rank(model) if plugin.cpu_ram_efficient_loading and not is_packed else None
    is_layer = fsdp2_prepare_auto_wrap_policy(plugin, model)
    for module in get_module_children_bottom_up(model)[:-1] if is_layer is not None else ():
        if hasattr(module, "lora_A"):
            _shard_adapters(module, options)
        if is_layer(module) and not isinstance(module, FSDPModule):
            fully_shard(module, **options)
    fully_shard(model, **options)
    if plugin.cpu_ram_efficient_loading:
        _load(model, whole, offloads=offloads)
    if buffers is not None:
        for name, buffer in buffers.items():
            parent, _, own = name.rpartition(".")
            model.get_submodule(parent).register_buffer(own, buffer.to(accelerator.device), persistent=False)
        _tie(model)
    return model


def _checkpoint(model: nn.Module, policy: Any) -> None:
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, auto_wrap_policy=policy)


def _leave_to_first_rank(model: nn.Module) -> dict[str, torch.Tensor]:
    """Move a model to the meta device, from which the first rank's weights are loaded, and return what is not saved."""
    names = get_non_persistent_buffers(model, recurse=True, fqns=True)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if name in names}
    model.to(torch.device("meta"))
    _tie(model)
    return kept


def _tie(model: Any) -> None:
    if hasattr(model, "tie_weights"):
        model.tie_weights()


def _shard_adapters(layer: Any, options: Mapping[str, Any]) -> None:
    """Make units of the adapters of a layer, except of those of parameters, which stay in the unit around them."""
    from peft.tuners.lora.layer import ParamWrapper

    if isinstance(layer, ParamWrapper):
        return
    weight, bias = getattr(layer.base_layer, "weight", None), getattr(layer.base_layer, "bias", None)
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        bias.data = bias.data.to(weight.dtype)
    for adapter in layer.active_adapters:
        for part in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector):
            if part:
                fully_shard(part[adapter], **options)
    if (layer.lora_embedding_A or layer.lora_embedding_B) and not isinstance(layer, FSDPModule):
        fully_shard(layer, **options)


def _load(model: nn.Module, whole: dict[str, torch.Tensor], *, offloads: bool) -> None:
    """Send the weights of the first rank to the others, one after the other."""
    is_first, shards = dist.get_rank() == 0, {}
    for name, shard in model.state_dict().items():
        device = shard.device_mesh.device_type if isinstance(shard, DTensor) else "cuda"
        if is_first:
            full = whole[name].to(shard.dtype).to(device)
        else:
            full = torch.empty(shard.size(), device=device, dtype=shard.dtype)
        if isinstance(shard, DTensor):
            own: Any = distribute_tensor(full, shard.device_mesh, shard.placements, src_data_rank=0)
            local = own.to_local()
            if local.untyped_storage().size() > local.nelement() * local.element_size():
                own = own.clone()
        else:
            own = full
            dist.broadcast(own, src=0)
        shards[name] = nn.Parameter(own.cpu() if offloads else own)
        del full
        whole.pop(name)
    model.load_state_dict(shards, assign=True, strict=True)
