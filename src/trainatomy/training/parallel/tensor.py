"""Tensor parallelism by the plan that a model of transformers brings along, with PyTorch's styles.

Sequence parallelism inside tensor parallelism: norms and residuals work on shards of the sequence.

The styles are those of PyTorch's plan for Llama (torchtitan, ``parallelize_llama``), put around what the model's own
plan for tensor parallelism shards: before attention and MLP the sequence is gathered, behind them it is reduced and
scattered.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainatomy.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_SEQUENCE_KEY = "parallel.sequence_parallel"
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
            f"{type(model).__name__} does not say which norm is behind its layers (base_model_pp_plan)",
            key=_SEQUENCE_KEY,
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
            key=_SEQUENCE_KEY,
        )


def _check(model: Any, norms: Mapping[str, ParallelStyle]) -> None:
    kind = getattr(model.config, "_attn_implementation", "sdpa")
    if kind not in _OWN_MASKS:
        raise WorkloadError(
            f"attn_implementation {kind} needs a mask, which {type(model).__name__} would make for a shard of the "
            "sequence: use sdpa or flash_attention_2",
            key=_SEQUENCE_KEY,
        )
    if not norms:
        raise WorkloadError(f"{type(model).__name__} has no norms beside its sharded layers", key=_SEQUENCE_KEY)


_KEY = "parallel.tp_size"
_HEADS = 2
"""Dimension of the heads where queries and keys are normed; some models have moved it to 1, which computes the same."""


def shard_layers(model: nn.Module, mesh: DeviceMesh, *, sequences: bool = False, part: nn.Module | None = None) -> None:
    """Shard the linear layers that the model's plan (``model.tp_plan``) names over the ranks of ``mesh``.

    An embedding and an output layer that share their weights stay whole: sharding would separate the two.

    Args:
        model: The model, whose plan it is.
        mesh: The ranks that share each layer.
        sequences: Whether what is between the layers works on shards of the sequence.
        part: A stage of a pipeline, which holds modules of the model: only these are sharded (default: all).

    Raises:
        WorkloadError: The model has no plan, or one with a style that is not simulated, or its heads cannot be divided.
    """
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
    if not plan:
        raise WorkloadError(f"{type(model).__name__} has no plan for tensor parallelism", key="parallel.tp_size")
    _check_heads(model, mesh.size())
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    part = model if part is None else part
    here = _names_in(model, part)
    styles: dict[str, Any] = {}
    for pattern, style in plan.items():
        names = _matching(model, pattern, here)
        if tied and any(model.get_submodule(name) in _ends(model) for name in names):
            continue
        styles.update(dict.fromkeys(names, _style(model, pattern, style)))
    if sequences:
        styles = with_sequence_shards(model, styles, here)
        part.register_forward_pre_hook(whole_positions(model, mesh), with_kwargs=True)
    parallelize_module(model, mesh, styles)


def _names_in(model: nn.Module, part: nn.Module) -> list[str]:
    """Return the names that the modules of ``part`` have in the model."""
    found = set(part.modules())
    return [name for name, module in model.named_modules() if module in found]


def shard_as_transformers(model: Any, ranks: int) -> None:
    """Shard a model for the Trainer, by transformers' own code, as ``from_pretrained(tp_plan="auto")`` does.

    Raises:
        WorkloadError: The model has no plan, ties its weights, or has heads that the ranks cannot share; or
            transformers is too old.
    """
    try:
        config = import_module("transformers.distributed").DistributedConfig
        import_module("transformers.distributed.tensor_parallel")
    except (ImportError, AttributeError):
        raise WorkloadError("tensor parallelism with the Trainer needs transformers 5.17 or later", key=_KEY) from None
    name = type(model).__name__
    if not getattr(model, "tp_plan", None):
        raise WorkloadError(f"{name} has no plan for tensor parallelism", key=_KEY)
    if getattr(model.config, "tie_word_embeddings", False):
        raise WorkloadError(
            f"the embeddings and the output layer of {name} share weights, which is not simulated with tensor "
            "parallelism by the Trainer: use loop: pytorch, or tie_word_embeddings: false",
            key=_KEY,
        )
    _check_heads(model, ranks)
    distribute(model, config(tp_size=ranks), _KEY)


def distribute(model: Any, config: Any, key: str) -> None:
    """Shard a model over all ranks by transformers' own code, for a ``DistributedConfig``.

    Raises:
        WorkloadError: transformers refuses it; the message names ``key``.
    """
    holder = getattr(import_module("transformers.distributed.utils"), "TransformersDeviceMesh", None)
    if holder is None:  # before transformers 5.19
        mesh: Any = init_device_mesh("cuda", (config.tp_size,), mesh_dim_names=("tp",))
    else:
        mesh = holder(
            init_device_mesh("cuda", (1, 1, 1, config.tp_size), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")),
            init_device_mesh(
                "cuda",
                (1, 1, config.efsdp_size, config.ep_size),
                mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"),
            ),
        )
    try:
        type(model).maybe_distribute_model(model, config, mesh)
    except ValueError as error:
        raise WorkloadError(str(error), key=key) from None


def _ends(model: nn.Module) -> tuple[Any, ...]:
    """Return the embedding and the output layer."""
    find: Any = model
    return find.get_input_embeddings(), find.get_output_embeddings()


def _style(model: nn.Module, pattern: str, style: str) -> Any:
    """Return PyTorch's style for one of transformers'."""
    if style == "colwise":
        return ColwiseParallel()
    if style in ("colwise_rep", "colwise_gather_output"):
        return ColwiseParallel(output_layouts=Replicate())
    if style == "rowwise":
        return RowwiseParallel()
    if style in ("rowwise_rep", "embedding_rowwise"):
        return RowwiseParallel(input_layouts=Replicate())
    if style == "replicated_with_grad_allreduce":
        # A norm of each head sees this rank's heads: its weights are whole, and their gradients sums over the ranks.
        return SequenceParallel(sequence_dim=_HEADS, use_local_output=True)
    raise WorkloadError(
        f"{type(model).__name__} shards {pattern} as {style!r}, which is not simulated; "
        "colwise, rowwise and replicated_with_grad_allreduce are",
        key="parallel.tp_size",
    )


def _matching(model: nn.Module, pattern: str, names: list[str]) -> list[str]:
    """Return those of the names that a pattern of the plan means, which may leave the base model's prefix out."""
    prefix = getattr(model, "base_model_prefix", "")
    expression = re.compile(rf"(?:{re.escape(prefix)}\.)?" + re.escape(pattern).replace(r"\*", r"\d+"))
    return [name for name in names if expression.fullmatch(name)]


def _check_heads(model: nn.Module, size: int) -> None:
    config: Any = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % size:
            raise WorkloadError(
                f"{type(model).__name__} has {heads} {name.removeprefix('num_').replace('_', ' ')}, "
                f"which {size} ranks cannot share evenly",
                key="parallel.tp_size",
            )
