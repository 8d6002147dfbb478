"""A module that exists already: described as a workload, and copied to tensors without data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from trainatomy.errors import WorkloadError
from trainatomy.training.batch import MakeBatch
from trainatomy.workload.schema import Workload

#: Keywords that are sections of a workload; every other one is a setting of ``train``.
_TOP = ("loop", "mode", "allocator", "data", "zero_grad_set_to_none", "software")


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers are meta tensors; ties between them and settings are kept, the
    model is not touched.

    Raises ``WorkloadError`` for a module that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if isinstance(parameter, UninitializedParameter):
            raise WorkloadError(
                f"the module {type(model).__name__} has parameters without a shape (lazy modules): "
                "run it on one batch first, so that it takes its shapes from that"
            )
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    for computed in _computed(model):
        memo[id(computed)] = torch.empty_like(computed, device="meta").detach()
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError, ValueError) as error:
        raise WorkloadError(
            f"the module {type(model).__name__} cannot be copied ({error}); "
            "give a factory that builds it: model.factory"
        ) from error


def _computed(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that modules keep as plain attributes and compute from parameters before each forward: the weight of
    ``torch.nn.utils.weight_norm``, ``spectral_norm`` and ``prune``."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                yield value


def described(
    model: nn.Module,
    batch: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None,
    optimizer: str | type[torch.optim.Optimizer] | None,
    gpu: str | None,
    train: Mapping[str, Any],
) -> tuple[Workload, MakeBatch | None]:
    """The workload that stands for training ``model``, and what makes its batches (None: what fits a transformers
    model)."""
    settings = dict(train)
    top = {key: settings.pop(key) for key in _TOP if key in settings}
    if optimizer is not None:
        named = optimizer if isinstance(optimizer, str) else f"{optimizer.__module__}.{optimizer.__qualname__}"
        settings["optim"] = named
    make_batch: MakeBatch | None = None
    if isinstance(batch, Mapping):
        given = _to_host(batch)
        settings.setdefault("per_device_train_batch_size", _batch_size(given))
        make_batch = lambda size: given  # noqa: E731
    elif batch is not None:
        make_batch = lambda size: _to_host(batch(size))  # noqa: E731
    elif not hasattr(model, "config"):
        raise WorkloadError(
            f"a batch is needed to train {type(model).__name__}: "
            "pass batch={name: tensor}, or a function of the batch size"
        )
    card = {} if gpu is None else {"gpu": gpu}
    described_model = {"class": type(model).__name__, **_dtype(model)}
    mapping: dict[str, Any] = {"loop": "pytorch", **top, **card, "model": described_model, "train": settings}
    return Workload.from_mapping(mapping), make_batch


def _dtype(model: nn.Module) -> dict[str, str]:
    """The type of the weights, where they have 16 bits: that of the first."""
    first = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {"dtype": str(first).removeprefix("torch.")} if first in (torch.float16, torch.bfloat16) else {}


def _to_host(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors with their values where they are on the host or on a card, empty ones for those on meta."""

    def host(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_like(value, device="cpu") if value.is_meta else value.detach().cpu()

    return {key: host(value) for key, value in batch.items()}


def _batch_size(batch: Mapping[str, Any]) -> int:
    sizes = [value.shape[0] for value in batch.values() if isinstance(value, torch.Tensor) and value.dim() > 0]
    if not sizes:
        raise WorkloadError("the batch holds no tensor with a first dimension")
    return int(sizes[0])
