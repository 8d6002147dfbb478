"""Losses, element by element; those that pick one class are among the moves."""

from __future__ import annotations

from trainatomy.operators.operator import Operator
from trainatomy.operators.table.family import family, row

LOSSES = family(
    Operator("", "elementwise", 2, "difference, square", cost="elementwise:pointwise"),
    row("mse_loss smooth_l1_loss", allocates="loss:elementwise_loss"),
    row("huber_loss", allocates="loss:huber_loss", cost=""),
)

LOSS_GRADIENTS = family(
    Operator("", "elementwise", 3, "difference, two products", meta="gradients:contiguous"),
    row("mse_loss_backward smooth_l1_loss_backward", cost="elementwise:pointwise"),
    row("huber_loss_backward"),
)

# The form of a call decides the group.
WITHOUT_GROUP = family(
    Operator(""),
    row(
        "binary_cross_entropy_with_logits",
        cost="elementwise:pointwise",
        allocates="loss:binary_cross_entropy_with_logits",
    ),
    row("binary_cross_entropy", allocates="loss:binary_cross_entropy"),
    row("_ctc_loss", allocates="loss:ctc_loss", cost="scans:ctc"),
    row(
        "_ctc_loss_backward",
        allocates="loss:ctc_loss_backward",
        meta="meta:contiguous_gradient",
        cost="scans:ctc",
    ),
    row("soft_margin_loss soft_margin_loss_backward", composite=True),
    row("multi_margin_loss_backward multilabel_margin_loss_backward", meta="meta:contiguous_gradient"),
    row("fake_quantize_per_tensor_affine_cachemask", meta="meta:fake_quantize"),
    row("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", meta="meta:fake_quantize"),
    row("fake_quantize_per_channel_affine_cachemask", meta="meta:fake_quantize"),
)

LOSS_FUNCTIONS = (*LOSSES, *LOSS_GRADIENTS, *WITHOUT_GROUP)
