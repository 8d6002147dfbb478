"""Rules by operator: attention, matrix products, convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.operators.allocation import attention, convolution, efficient_attention, grouped, matmul

if TYPE_CHECKING:
    from trainatomy.operators.allocation.plan import Rule

RULES_B: dict[str, Rule] = {
    "aten::_scaled_dot_product_flash_attention": attention.flash_forward,
    "aten::_scaled_dot_product_flash_attention_backward": attention.flash_backward,
    "aten::_scaled_dot_product_cudnn_attention": attention.cudnn_forward,
    "aten::_scaled_dot_product_cudnn_attention_backward": attention.cudnn_backward,
    "aten::_safe_softmax": attention.safe_softmax,
    "aten::_scaled_dot_product_efficient_attention": efficient_attention.efficient_forward,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_attention.efficient_backward,
    "aten::mm": matmul.matrix_product,
    "aten::addmm": matmul.matrix_product,
    "aten::bmm": matmul.batched_product,
    "aten::baddbmm": matmul.batched_product,
    "aten::_grouped_mm": grouped.grouped_product,
    "aten::convolution": convolution.convolution,
    "aten::convolution_backward": convolution.convolution_backward,
}
