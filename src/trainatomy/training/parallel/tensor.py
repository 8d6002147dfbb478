"""Tensor parallelism by the plan that a model of transformers brings along, with PyTorch's styles."""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainatomy.errors import WorkloadError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_KEY = "parallel.tp_size"
_HEADS = 2
"""Dimension of the heads where queries and keys are normed; some models have moved it to 1, which computes the same."""


def shard_layers(model: nn.Module, mesh: DeviceMesh, *, sequences: bool = False, part: nn.Module | None = None) -> None:
    """Shard the linear layers that the model's plan (``model.tp_plan``) names over the ranks of ``mesh``.

    An embedding and an output layer that share their weights stay whole: sharding would separate the two.

    Args:
        model: The model, whose plan it is.
        mesh: The ranks that share each layer.
        sequences: Whether what is between the layers works on shards of the sequence (see ``sequence.py``).
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
        from trainatomy.training.parallel.sequence import whole_positions, with_sequence_shards

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
