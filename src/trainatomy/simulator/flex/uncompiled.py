"""``flex_attention`` that nobody compiled: PyTorch's own functions in Python, which write all scores.

PyTorch runs them below autograd (``FlexAttentionAutogradOp``), which saves what they take and give.

Source: torch 2.9-2.13, torch/_higher_order_ops/flex_attention.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_OPERATOR = "torch._higher_order_ops.flex_attention"


class Uncompiled(torch.autograd.Function):
    """``FlexAttentionAutogradOp`` without its dispatcher, which lets no recorder see what runs."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask: Any, scale: float, options: Any
    ) -> Any:
        """Run ``sdpa_dense``."""
        ctx.set_materialize_grads(False)
        out, sums, maxima = import_module(_OPERATOR).sdpa_dense(query, key, value, score_mod, mask, scale, options)
        ctx.mark_non_differentiable(maxima)
        lists = [each for each in mask if isinstance(each, Tensor)]
        ctx.save_for_backward(query, key, value, out, sums, maxima, *lists)
        ctx.score_mod, ctx.mask, ctx.scale, ctx.options = score_mod, mask, scale, options
        return out, sums, maxima

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run ``sdpa_dense_backward``."""
        query, key, value, out, sums, *_ = ctx.saved_tensors
        joint = _joint(ctx.score_mod, query)
        gradients = import_module(_OPERATOR).sdpa_dense_backward(
            query, key, value, out, sums, *grads[:2], ctx.score_mod, joint, ctx.mask, ctx.scale, ctx.options, (), ()
        )
        return (*gradients[:3], None, None, None, None)


def _joint(score_mod: Any, query: Tensor) -> Any:
    """Return the derivative of ``score_mod`` as PyTorch traces it."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
        indices = [torch.zeros((), dtype=torch.int, device="meta") for _ in range(4)]
        score = torch.zeros((), dtype=query.dtype, device="meta", requires_grad=True)
        return import_module(_OPERATOR).create_fw_bw_graph(score_mod, (score, *indices), ())[1]
