"""Arithmetic, comparisons, activation functions and dropout, element by element.

Losses, element by element; those that pick one class are among the moves.

Optimizers and gradient scaling; other ``_foreach_`` forms follow from the plain rows.
"""

from __future__ import annotations

from trainatomy.operators.operator import Operator, family, row

_BY_SIGMOID = "sigmoid 4, its derivative and products 5"
_SIGMOID = "negation, exponential, addition, division"
_TIMES_SIGMOID = f"{_SIGMOID}, product"

ARITHMETIC = family(
    Operator("", "elementwise", 1, "one operation", cost="elementwise:pointwise"),
    row("add sub rsub mul div neg reciprocal remainder floor_divide pow square sqrt"),
    row("exp expm1 log log1p sin cos acos erf"),
    row("exp2 log2 log10 tan asin atan atan2 sinh cosh erfinv fmod hypot logaddexp float_power", cost=""),
    row("cumulative_trapezoid", cost=""),
    row("rsqrt", flop=2, why="square root and division"),
    row("addcmul addcdiv lerp", flop=3, why="product and addition, scaled"),
    row("xlogy", group=None, flop=None, why=""),
)

COMPARISONS = family(
    Operator("", "elementwise", 0, "comparisons, selections, signs, roundings", cost="elementwise:pointwise"),
    row("eq ne lt le gt ge isfinite maximum minimum clamp clamp_min clamp_max abs sign floor ceil"),
    row("tril triu", cost="elementwise:rearranged"),
    row("logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not"),
    row("isnan"),
    row("isinf", allocates="elementwise:isinf"),
    row("where", allocates="elementwise:where"),
    row("masked_fill", reads="sources"),
    row("sgn round trunc signbit nan_to_num", cost=""),
    row("logical_xor bitwise_xor bitwise_left_shift bitwise_right_shift __and__ __or__", cost=""),
)

ACTIVATIONS = family(
    Operator("", "elementwise", activation="forward", cost="elementwise:pointwise"),
    row("relu hardtanh leaky_relu", flop=0, why="a comparison"),
    row("relu6 threshold", flop=0, why="a comparison", cost=""),
    row("tanh", flop=1, why="the function"),
    row("sigmoid log_sigmoid_forward", flop=4, why=_SIGMOID),
    row("hardsigmoid", flop=4, why=_SIGMOID, cost=""),
    row("silu softplus elu", flop=5, why=_TIMES_SIGMOID),
    row("mish hardswish", flop=5, why=_TIMES_SIGMOID, cost=""),
    row("gelu", flop=5, why="two products, the error function, an addition, a product"),
    row("glu", group=None, activation=""),
)

ACTIVATION_GRADIENTS = family(
    Operator("", "elementwise", activation="backward", cost="elementwise:pointwise"),
    row("threshold_backward hardtanh_backward leaky_relu_backward", flop=1, why="product with a comparison"),
    row("tanh_backward sigmoid_backward log_sigmoid_backward", flop=3, why="square, difference, product"),
    row("hardsigmoid_backward", flop=3, why="square, difference, product", cost="", meta="meta:as_both"),
    row("silu_backward", flop=9, why=_BY_SIGMOID),
    row("softplus_backward", flop=9, why=_BY_SIGMOID, meta="meta:as_both"),
    row("elu_backward", flop=9, why=_BY_SIGMOID, meta="meta:elu_backward"),
    row("mish_backward", flop=9, why=_BY_SIGMOID, cost="", meta="meta:as_both"),
    row(
        "hardswish_backward",
        flop=9,
        why=_BY_SIGMOID,
        cost="",
        meta="meta:as_both",
    ),
    row("gelu_backward", flop=11, why="distribution 4, density 4, their sum 2, product with the gradient"),
    row("glu_backward", group=None, activation="", meta="meta:contiguous"),
)

DROPOUT = family(
    Operator("", "elementwise", 1, "product with the mask", launch="dropout", cost="elementwise:pointwise"),
    row("native_dropout", allocates="elementwise:native_dropout"),
    row("native_dropout_backward"),
    row("_masked_scale", launch="pointwise", cost=""),
)

ELEMENTWISE = (*ARITHMETIC, *COMPARISONS, *ACTIVATIONS, *ACTIVATION_GRADIENTS, *DROPOUT)


LOSSES = family(
    Operator("", "elementwise", 2, "difference, square", cost="elementwise:pointwise"),
    row("mse_loss smooth_l1_loss", allocates="elementwise:elementwise_loss"),
    row("huber_loss", allocates="elementwise:huber_loss", cost=""),
)

LOSS_GRADIENTS = family(
    Operator("", "elementwise", 3, "difference, two products", meta="meta:contiguous"),
    row("mse_loss_backward smooth_l1_loss_backward", cost="elementwise:pointwise"),
    row("huber_loss_backward"),
)

# The form of a call decides the group.
WITHOUT_GROUP = family(
    Operator(""),
    row(
        "binary_cross_entropy_with_logits",
        cost="elementwise:pointwise",
        allocates="elementwise:binary_cross_entropy_with_logits",
    ),
    row("binary_cross_entropy", allocates="elementwise:binary_cross_entropy"),
    row("_ctc_loss", allocates="elementwise:ctc_loss", cost="reduction:ctc"),
    row(
        "_ctc_loss_backward",
        allocates="elementwise:ctc_loss_backward",
        meta="meta:contiguous_gradient",
        cost="reduction:ctc",
    ),
    row("soft_margin_loss soft_margin_loss_backward", composite=True),
    row("multi_margin_loss_backward multilabel_margin_loss_backward", meta="meta:contiguous_gradient"),
    row("fake_quantize_per_tensor_affine_cachemask", meta="meta:fake_quantize"),
    row("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", meta="meta:fake_quantize"),
    row("fake_quantize_per_channel_affine_cachemask", meta="meta:fake_quantize"),
)

LOSS_FUNCTIONS = (*LOSSES, *LOSS_GRADIENTS, *WITHOUT_GROUP)


_ADAM = "decay 1, first moment 3, second moment 4, root and its correction 3, step 3 (torch.optim.AdamW)"
_ADAGRAD = "square and sum 2, root and its guard 2, step 3 (torch.optim.Adagrad)"

# Gradients are written only where a gradient scaler hands over its scale.
OPTIMIZERS = family(
    Operator("", "elementwise", launch="list", cost="lists:fused_optimizer", read_only_list=1),
    row("_fused_adamw_ _fused_adam_", flop=14, why=_ADAM),
    row("_fused_sgd_", flop=4, why="momentum 2, step 2 (torch.optim.SGD)", meta="meta:in_place"),
    row("_fused_adagrad_", flop=7, why=_ADAGRAD, meta="meta:in_place"),
)

# multi_tensor_adam: FusedAdam; adam_update: DeepSpeedCPUAdam, on the host.
DEEPSPEED = family(
    Operator("", "elementwise", launch="list", cost="lists:deepspeed_adam"),
    row("deepspeed::multi_tensor_adam deepspeed::adam_update", flop=14, why=_ADAM),
)

FOREACH = family(
    Operator("", launch="list", cost="lists:foreach"),
    row("_foreach_copy", group="elementwise", flop=0, why="a move", reads="sources"),
    row("_foreach_max", group="normalisation", flop=0, why="comparisons", allocates="elementwise:foreach_max"),
    row("_foreach_norm", group="normalisation", flop=2, why="square and sum", allocates="elementwise:foreach_norm"),
)

UNSCALING = family(
    Operator("", "elementwise", 1, "unscaling of gradients"),
    row("_amp_foreach_non_finite_check_and_unscale", launch="list", cost="lists:unscale"),
    row("_amp_update_scale", cost="elementwise:pointwise"),
)

# ``sync_gpu`` after each parameter: bitsandbytes/optim/optimizer.py, 0.50.
QUANTISED_OPTIMIZERS = family(
    Operator(
        "",
        "elementwise",
        None,
        "no formula: the arithmetic of quantised states is the library's own",
        launch="library",
        sync="always",
    ),
    row("bitsandbytes::optimizer_update_32bit", cost="libraries:update_32bit"),
    row("bitsandbytes::optimizer_update_8bit_blockwise", cost="libraries:update_8bit"),
)

LISTS = (*OPTIMIZERS, *DEEPSPEED, *FOREACH, *UNSCALING, *QUANTISED_OPTIMIZERS)
