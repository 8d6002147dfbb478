"""Sequence parallelism inside tensor parallelism: norms and residuals work on shards of the sequence.

The styles are those of PyTorch's plan for Llama (torchtitan, ``parallelize_llama``), put around what the model's own
plan for tensor parallelism shards: before attention and MLP the sequence is gathered, behind them it is reduced and
scattered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from trainatomy.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

_KEY = "parallel.sequence_parallel"
_SEQUENCE = Shard(1)
_OWN_MASKS = frozenset({"sdpa", "flash_attention_2", "flash_attention_3"})
"""Implementations of attention that need no mask for whole causal sequences."""


class WholeSequence(ParallelStyle):
    """Gathers the hidden states that a module is called with; the shards' gradients are reduced and scattered.

    Args:
        local: Whether the module takes a plain tensor instead of a sharded one.
    """

    def __init__(self, *, local: bool = False) -> None:
        super().__init__()
        self._local = local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(hidden: torch.Tensor) -> torch.Tensor:
            shard = hidden if isinstance(hidden, DTensor) else DTensor.from_local(hidden, device_mesh, (_SEQUENCE,))
            gathered: DTensor = shard.redistribute(placements=(Replicate(),))
            return gathered.to_local() if self._local else gathered

        def gather(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if inputs:
                return (whole(inputs[0]), *inputs[1:]), options
            return inputs, {**options, "hidden_states": whole(options["hidden_states"])}

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


def with_sequence_shards(
    model: Any, styles: Mapping[str, ParallelStyle], here: Sequence[str]
) -> dict[str, ParallelStyle]:
    """Return the styles of tensor parallelism with those of sequence parallelism, by names of modules.

    Args:
        model: The model.
        styles: The styles of tensor parallelism.
        here: The modules that are sharded: all, or those of a pipeline's stage.

    Raises:
        WorkloadError: The model's layers are not like those of Llama.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    ends = {name: module for name in here if (module := model.get_submodule(name)) in (head, embeddings)}
    inner = [name for name in styles if name not in ends]
    norms: dict[str, ParallelStyle] = {}
    blocks = {name.rpartition(".")[0] for name in inner if isinstance(styles[name], ColwiseParallel)}
    for layer in {block.rpartition(".")[0] for block in blocks}:
        for name, child in model.get_submodule(layer).named_children():
            path = f"{layer}.{name}"
            if path not in blocks and any(True for _ in child.parameters()):
                norms[path] = SequenceParallel(use_local_output=True)  # some are behind a block, before an addition
    _check(model, norms)
    found = norms | {block: WholeSequence() for block in blocks}
    found |= {name: _scattering(styles[name]) for name in inner}
    if (norm := _final_norm(model)) in here:
        found[norm] = SequenceParallel(use_local_output=True)
    for name, module in ends.items():
        found[name] = _of_end(styles.get(name), is_head=module is head)
    return found


def shard_length(length: int, ranks: int) -> int:
    """Return the tokens of each rank's shard of a sequence.

    Raises:
        WorkloadError: The ranks cannot share the sequence evenly.
    """
    if length % ranks:
        raise WorkloadError(f"{ranks} ranks cannot share {length} tokens evenly", key="data.sequence_length")
    return length // ranks


def whole_positions(model: Any, mesh: DeviceMesh) -> Any:
    """Return a hook that gives ``model`` the positions of the whole sequence, which it would count by its shard.

    A stage of a pipeline may receive hidden states instead of ids: this rank's shard of them.
    """

    def prepare(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        taken = inputs[0] if inputs else options["input_ids"]
        length = taken.shape[1]
        if taken.is_floating_point():
            length *= mesh.size()
        else:
            shard_length(length, mesh.size())
        _check_window(model, length)
        given = {name: value for name, value in options.items() if name != "attention_mask"}
        given.setdefault("position_ids", torch.arange(length, device=taken.device)[None])
        return inputs, given

    return prepare


def _scattering(style: ParallelStyle) -> ParallelStyle:
    """Return the style of a linear layer inside a block: those that end it scatter the sequence."""
    return RowwiseParallel(output_layouts=_SEQUENCE) if isinstance(style, RowwiseParallel) else style


def _of_end(style: ParallelStyle | None, *, is_head: bool) -> ParallelStyle:
    """Return the style of the embeddings or the output layer; without ``style``, its weights are whole."""
    if is_head:
        gathers = ColwiseParallel(input_layouts=_SEQUENCE, output_layouts=Replicate())
        return WholeSequence(local=True) if style is None else gathers
    if style is None:
        return PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=_SEQUENCE)
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=_SEQUENCE)


def _final_norm(model: Any) -> str:
    """Return the name of the norm behind the layers, the last module of the model's plan for pipelines."""
    plan = list(getattr(model.config, "base_model_pp_plan", None) or {})
    if not plan or not hasattr(model.base_model, plan[-1]):
        raise WorkloadError(
            f"{type(model).__name__} does not say which norm is behind its layers (base_model_pp_plan)", key=_KEY
        )
    return f"{model.base_model_prefix}.{plan[-1]}" if model.base_model is not model else plan[-1]


def _check_window(model: Any, length: int) -> None:
    """Refuse attention in windows, whose mask a model makes for the shard of the sequence that it sees."""
    config = model.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window is not None and window < length and (kinds is None or "sliding_attention" in kinds):
        raise WorkloadError(
            f"{type(model).__name__} has layers that attend to {window} tokens, with a mask that it would make for a "
            f"shard of the {length} tokens: use shorter sequences, or leave it out",
            key=_KEY,
        )


def _check(model: Any, norms: Mapping[str, ParallelStyle]) -> None:
    kind = getattr(model.config, "_attn_implementation", "sdpa")
    if kind not in _OWN_MASKS:
        raise WorkloadError(
            f"attn_implementation {kind} needs a mask, which {type(model).__name__} would make for a shard of the "
            "sequence: use sdpa or flash_attention_2",
            key=_KEY,
        )
    if not norms:
        raise WorkloadError(f"{type(model).__name__} has no norms beside its sharded layers", key=_KEY)
