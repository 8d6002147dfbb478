"""Clipping gradients of parameters that lie on several device meshes.

PyTorch's ``clip_grad_norm_`` takes gradients of one mesh only, so the norms of the meshes are combined as numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def clip_by_mesh(model: nn.Module, max_norm: float) -> None:
    """Clip gradients to a norm over all of them."""
    groups = with_gradients_by_mesh(model)
    if len(groups) < 2:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return
    total = total_norm(groups)
    for parameters in groups:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)


def with_gradients_by_mesh(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters that have gradients, those of each mesh and those of none together."""
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            found.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(found.values())


def total_norm(groups: Sequence[Sequence[nn.Parameter]]) -> torch.Tensor:
    """Return the norm of all gradients of the groups, whole on each rank."""
    norms = []
    for parameters in groups:
        norm = nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
