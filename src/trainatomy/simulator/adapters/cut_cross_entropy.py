"""Cut cross-entropy on meta tensors: a loss of hidden states and the output layer that never stores logits.

A workload needs no library: ``linear_cross_entropy`` takes the place of the package's function and allocates what that
does.  In a script the installed release runs, and ``KERNELS`` says what its Triton kernels compute.

Forward multiplies hidden states with the output layer tile by tile, and keeps a sum for each token and the mean logit
of each word.  Backward multiplies again, and by the gradients of the logits of each tile twice: for the hidden states,
and for the output layer where it is trained.

Source: axolotl-ai-cloud/ml-cross-entropy at 5f0c7a7 (2026-06-26) and apple/ml-cross-entropy at d42911f (2025-06-26):
cut_cross_entropy/cce.py, cce_lse_forward.py, indexed_dot.py, cce_backward.py, utils.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from trainatomy.errors import SimulationError
from trainatomy.operators.allocation.above_autograd import one_operation
from trainatomy.operators.allocation.plan import ceil_div
from trainatomy.simulator.adapters.adapter import Adapter
from trainatomy.workload.model import CUT_CROSS_ENTROPY

_LIBRARY = "cut_cross_entropy"
_IGNORED = -100
_LOCKED_ROWS, _LOCKED_COLUMNS = 128, 64
"""Tokens or words, and columns of a gradient, that share a lock."""
_NOTE = (
    "model.kernels: cut_cross_entropy allocates what the source code of axolotl's fork does; its kernels are timed as "
    "cuBLAS's products of the same sizes, as if backward skipped no tile, and have not been measured"
)


def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool = False,
) -> Tensor:
    """Return the loss of hidden states ``e`` and the weight ``c`` of the output layer.

    Raises:
        SimulationError: They are not in 16 bits, in which the kernels compute gradients.
    """
    halves = (torch.float16, torch.bfloat16)
    if found := next((each.dtype for each in (e, c) if each.dtype not in halves), None):
        raise SimulationError(
            f"cut_cross_entropy takes float16 and bfloat16, found {str(found).removeprefix('torch.')}: set model.dtype"
        )
    e, targets = e.contiguous(), targets.contiguous()
    places = _counted_tokens(targets, shift)
    loss: Tensor = _Loss.apply(e.flatten(0, -2), c, bias, targets.flatten(), places, softcap, reduction)
    return loss


def _counted_tokens(targets: Tensor, shift: bool) -> Tensor | None:
    """Return the places of the tokens in the loss, for which the CPU waits; None for all."""
    if not shift:
        found = (targets.flatten() != _IGNORED).nonzero().to(torch.int32)
        return found.squeeze(1) if found.numel() != targets.numel() else None
    later = targets[..., 1:]
    found = (later != _IGNORED).nonzero().to(torch.int32)
    for dimension in range(later.ndim - 1):
        found[:, dimension] *= later.stride(dimension)
    return found.sum(1)


class _Loss(torch.autograd.Function):
    """``LinearCrossEntropyFunction``."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        e, c, bias, targets, places, softcap, reduction = arguments
        rows = e.shape[0] if places is None else places.shape[0]
        trained = e.requires_grad or c.requires_grad
        sums, means = _sums(e, c, rows, trained=trained)
        losses = e.new_zeros((rows,), dtype=torch.float32)
        _indexed_products({"E": e, "Inds": targets, "Valids": places, "Out": losses})
        if softcap is not None:
            with one_operation("inductor::kernel", losses) as results:
                results.append(torch.empty_like(losses))
            losses = results[0]
        losses.add_(sums)
        ctx.save_for_backward(e, c, bias, sums, targets, places, means)
        ctx.places = places  # which so live as long as the graph
        return losses.mean() if reduction == "mean" else losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        e, c, bias, sums, _, _, means = ctx.saved_tensors
        order = torch.argsort(means).to(torch.int32)
        made = [
            torch.zeros_like(each, dtype=dtype) if each is not None and wanted else None
            for each, wanted, dtype in zip(
                (e, c, bias), ctx.needs_input_grad, (None, None, torch.float32), strict=False
            )
        ]
        columns = ceil_div(c.shape[1], _LOCKED_COLUMNS)
        locks = [
            each.new_zeros((ceil_div(count, _LOCKED_ROWS), columns), dtype=torch.int32) if result is not None else None
            for each, count, result in zip((e, c), (sums.shape[0], c.shape[0]), made, strict=False)
        ]
        _backward({"E": e, "C": c, "LSE": sums, "VocabOrdering": order, "dE": made[0], "dC": made[1]})
        del locks
        if made[2] is not None:
            made[2] = made[2].to(bias.dtype)
        return (*made, None, None, None, None)


def _sums(e: Tensor, c: Tensor, rows: int, *, trained: bool) -> tuple[Tensor, Tensor | None]:
    """Return the logarithms of the sums of the tokens, and for backward the means of the words."""
    sums = e.new_full((rows,), -float("inf"), dtype=torch.float32)
    locks = e.new_full((ceil_div(rows, _LOCKED_ROWS),), 0, dtype=torch.uint32)
    means = e.new_full((c.shape[0],), 0.0, dtype=torch.float32) if trained else None
    _forward({"E": e, "C": c, "LSE": sums, "LA": means, "Locks": locks})
    return sums, means


def _forward(named: Mapping[str, Any]) -> None:
    """Write the forward kernel; what it computes is as unknown as the hidden states."""
    e, c, sums, means = (named[name] for name in ("E", "C", "LSE", "LA"))
    with one_operation("cut_cross_entropy::forward", e, c, sums, means, rows=sums.shape[0], products=1):
        sums.copy_(c.flatten()[: sums.shape[0]])
        if means is not None:
            means.copy_(c[:, 0])


def _indexed_products(named: Mapping[str, Any]) -> None:
    """Write the kernel that multiplies each token's hidden state with the row of its word."""
    e, losses = named["E"], named["Out"]
    with one_operation("triton::kernel", e, e, named["Inds"], named["Valids"], losses):
        losses.copy_(e.flatten()[: losses.shape[0]])


def _backward(named: Mapping[str, Any]) -> None:
    """Write the backward kernel."""
    e, c, sums = (named[name] for name in ("E", "C", "LSE"))
    trained = named.get("REQUIRES_GRAD", True)  # the release of 2025-01 passes the weight itself where it is frozen
    made = [each for each in (named["dE"], named["dC"] if trained else None) if each is not None]
    with one_operation("cut_cross_entropy::backward", e, c, sums, *made, rows=sums.shape[0], products=1 + len(made)):
        pass


KERNELS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "_cce_lse_forward_kernel": _forward,
    "_indexed_neg_dot_forward_kernel": _indexed_products,
    "_cce_backward_kernel": _backward,
}
"""What writes a launch of a Triton kernel of the package, from its arguments by their names."""


@contextlib.contextmanager
def simulated_cut_cross_entropy() -> Iterator[None]:
    """Let a workload import the package, installed or not, with the function above."""
    module = ModuleType(_LIBRARY)
    module.linear_cross_entropy = linear_cross_entropy  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {_LIBRARY: module}):
        yield


ADAPTER = Adapter(
    is_used=lambda workload, _: workload.mode == "training" and CUT_CROSS_ENTROPY in workload.model.kernels,
    simulated=lambda process, workload: simulated_cut_cross_entropy(),
    notes=lambda workload, model: (_NOTE,),
)
