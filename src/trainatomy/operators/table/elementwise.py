"""Arithmetic, comparisons, activation functions and dropout, element by element."""

from __future__ import annotations

from trainatomy.operators.operator import Operator
from trainatomy.operators.table.family import family, row

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
    row("hardsigmoid_backward", flop=3, why="square, difference, product", cost="", meta="gradients:as_both"),
    row("silu_backward", flop=9, why=_BY_SIGMOID),
    row("softplus_backward", flop=9, why=_BY_SIGMOID, meta="gradients:as_both"),
    row("elu_backward", flop=9, why=_BY_SIGMOID, meta="gradients:elu_backward"),
    row("mish_backward", flop=9, why=_BY_SIGMOID, cost="", meta="gradients:as_both"),
    row(
        "hardswish_backward",
        flop=9,
        why=_BY_SIGMOID,
        cost="",
        meta="gradients:as_both",
    ),
    row("gelu_backward", flop=11, why="distribution 4, density 4, their sum 2, product with the gradient"),
    row("glu_backward", group=None, activation="", meta="gradients:contiguous"),
)

DROPOUT = family(
    Operator("", "elementwise", 1, "product with the mask", launch="dropout", cost="elementwise:pointwise"),
    row("native_dropout", allocates="elementwise:native_dropout"),
    row("native_dropout_backward"),
    row("_masked_scale", launch="pointwise", cost=""),
)

ELEMENTWISE = (*ARITHMETIC, *COMPARISONS, *ACTIVATIONS, *ACTIVATION_GRADIENTS, *DROPOUT)
