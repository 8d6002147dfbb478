"""Context parallelism: ranks share each sequence, with PyTorch's ring attention (``context_parallel``).

What a batch needs beforehand is what transformers' Trainer does to it (``_prepare_context_parallel_inputs``): labels
that are shifted before the sequence is divided, positions, and no mask in the layers (accelerate's
``_attach_context_parallel_hooks``).
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor.experimental import context_parallel

from trainatomy.errors import WorkloadError
from trainatomy.libraries import import_library

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from trainatomy.training.batch import Batch
    from trainatomy.workload.parallel import ParallelSpec

_KEY = "parallel.cp_size"
_NO_LABEL = -100
_SEQUENCES = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")
"""Inputs that are divided, in the order of the Trainer."""


def share_sequences(model: nn.Module, parallel: ParallelSpec) -> None:
    """Prepare a model for parts of sequences.

    Raises:
        WorkloadError: Its attention is not causal attention by ``sdpa``.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "_attn_implementation", None)
    if kind != "sdpa":
        raise WorkloadError(
            f"context parallelism replaces scaled_dot_product_attention, and {type(model).__name__} uses "
            f"attn_implementation {kind}: use sdpa",
            key=_KEY,
        )
    import_library("accelerate", "parallel.cp_size")
    attach = import_module("accelerate.big_modeling")._attach_context_parallel_hooks
    try:
        attach(model)
    except ValueError as error:
        raise WorkloadError(str(error), key=_KEY) from None
    rotation = import_module("torch.distributed.tensor.experimental._attention")
    rotation.set_rotate_method(parallel.cp_comm_strategy)


@contextlib.contextmanager
def shared(batch: Batch, mesh: DeviceMesh) -> Iterator[None]:
    """Divide the sequences of a batch in place; attention passes keys and values around the ranks of ``mesh``."""
    ids = batch["input_ids"]
    rows, length = ids.shape
    if length % (2 * mesh.size()):
        raise WorkloadError(
            f"{mesh.size()} ranks divide a sequence into {2 * mesh.size()} parts, and {length} tokens cannot be",
            key="data.sequence_length",
        )
    if "labels" in batch and "shift_labels" not in batch:
        shifted = nn.functional.pad(batch["labels"], (0, 1), value=_NO_LABEL)
        batch["shift_labels"] = shifted[:, 1:].contiguous()
        del shifted
    if "position_ids" not in batch:
        batch["position_ids"] = torch.arange(length, device=ids.device).expand(rows, -1).contiguous()
    buffers = [batch[name] for name in _SEQUENCES if name in batch]
    divided = context_parallel(
        mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
    )
    del buffers, ids
    with divided:
        yield
