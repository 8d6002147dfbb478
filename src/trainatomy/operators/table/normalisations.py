"""Statistical normalisations: softmax, norms, reductions."""

from __future__ import annotations

from trainatomy.operators.operator import CUDNN, Operator, family, row

_SOFTMAX = "difference, exponential, sum, division"
_STANDARDISE = "sum, difference, square, its sum, division, scale, shift"
_STANDARDISE_BACKWARD = (
    "nine for the data (scale, sum, difference, product, its sum, division, two additions, product), three for "
    "scale and shift (sum, product, its sum)"
)

SOFTMAX = family(
    Operator("", "normalisation", 4, _SOFTMAX, launch="reduction", cost="reduction:normalisation"),
    row("_softmax", allocates="elementwise:softmax"),
    row("_safe_softmax", allocates="attention:safe_softmax"),
    row(
        "_softmax_backward_data",
        allocates="elementwise:softmax_backward",
        why="product with the gradient, its sum, product with the sum, difference",
    ),
    row("_log_softmax", allocates="elementwise:softmax", why="difference, exponential, sum, difference"),
    row(
        "_log_softmax_backward_data",
        allocates="elementwise:log_softmax_backward",
        meta="meta:log_softmax_backward",
        why="sum, exponential, product, difference",
    ),
    row("logsumexp", composite=True, why="difference, exponential, sum, difference"),
)

NORMS = family(
    Operator("", "normalisation", 7, _STANDARDISE, launch="normalisation", cost="reduction:normalisation"),
    row("native_layer_norm", allocates="normalisation:layer_norm"),
    row(
        "native_group_norm",
        launch="group_norm",
        cost="norms:group_norm",
        allocates="normalisation:group_norm",
    ),
    row(
        "_fused_rms_norm",
        flop=4,
        why="square, its sum, division, scale",
        allocates="normalisation:layer_norm",
    ),
)

BATCH_NORMS = family(
    Operator("", "normalisation", 7, _STANDARDISE, launch="batch_norm", cost="norms:batch_norm"),
    row("native_batch_norm", allocates="normalisation:batch_norm"),
    row("cudnn_batch_norm", allocates="normalisation:batch_norm", loads=CUDNN),
    row("_native_batch_norm_legit _batch_norm_with_update", cost=""),
)

# One kernel for all pairs, however the distance is measured.
DISTANCES = family(
    Operator("", "normalisation", why="depends on the norm", launch="pointwise"),
    row("_pdist_forward _cdist_forward", cost="reduction:pairs"),
    row("_pdist_backward", allocates="matmul:pdist_backward"),
    row("_cdist_backward", allocates="matmul:cdist_backward"),
)

NORM_GRADIENTS = family(
    Operator("", "normalisation", 12, _STANDARDISE_BACKWARD, launch="normalisation", cost="reduction:normalisation"),
    row(
        "native_layer_norm_backward",
        allocates="normalisation:layer_norm_backward",
        meta="meta:layer_norm_backward",
    ),
    row(
        "native_group_norm_backward",
        launch="group_norm",
        cost="norms:group_norm",
        allocates="normalisation:group_norm_backward",
    ),
    row(
        "_fused_rms_norm_backward",
        flop=8,
        why="as layer normalisation without means: six for the data, two for the scale",
        allocates="normalisation:layer_norm_backward",
    ),
)

BATCH_NORM_GRADIENTS = family(
    Operator("", "normalisation", 12, _STANDARDISE_BACKWARD, launch="batch_norm", cost="norms:batch_norm"),
    row("native_batch_norm_backward", allocates="normalisation:batch_norm", meta="meta:batch_norm_backward"),
    row("cudnn_batch_norm_backward", allocates="normalisation:batch_norm", loads=("cudnn_backward",)),
    row("batch_norm_backward", cost=""),
)

SUMS = family(
    Operator("", "normalisation", 1, "a reduction", launch="reduction", cost="reduction:reduction"),
    # Gradients of biases are sums: the authors count them with the biases.
    row("sum", group="elementwise", allocates="reduction:SUM"),
    row("nansum", group="elementwise", allocates="reduction:PRODUCT", launch="pointwise"),
    row("mean", allocates="reduction:SUM"),
    row("prod", allocates="reduction:PRODUCT"),
    row("trace", launch="pointwise", cost=""),
)

MOMENTS = family(
    Operator("", "normalisation", 3, "difference, square, their sum", launch="reduction", cost="reduction:reduction"),
    row("var var_mean std", allocates="reduction:MOMENTS"),
    row("std_mean", allocates="reduction:MOMENTS", launch="pointwise"),
)

VECTOR_NORMS = family(
    Operator("", "normalisation", 2, "square and sum", cost="reduction:reduction"),
    row("linalg_vector_norm", allocates="reduction:NORM", launch="reduction"),
    row("norm", allocates="reduction:NORM"),
    row("native_norm", cost=""),
    row("dist", composite=True),
    row("_weight_norm_interface", cost="reduction:weight_norm"),
    row("_weight_norm_interface_backward", group=None, flop=None, why="", cost="reduction:weight_norm"),
)

EXTREMES = family(
    Operator("", "normalisation", 0, "comparisons", launch="reduction", cost="reduction:reduction"),
    row("max min", allocates="reduction:extremum"),
    row("amax amin", allocates="reduction:EXTREMUM"),
    row("argmax argmin", allocates="reduction:EXTREMUM_WITH_INDEX"),
    row("any all", allocates="reduction:LOGICAL"),
    row("aminmax", launch="pointwise"),
    row("cummax cummin", launch="pointwise", cost="reduction:scan"),
    row("count_nonzero", launch="pointwise", cost=""),
    row("topk", allocates="indexing:topk", launch="index", cost="indexing:sorted_values"),
)

CUMULATIVE = family(
    Operator("", "normalisation", 1, "an addition or product"),
    row("cumsum", allocates="indexing:cumulative_sum", launch="index", cost="reduction:scan"),
    row("cumprod", cost="reduction:scan"),
    row("logcumsumexp", cost="reduction:scan"),
)

NORMALISATIONS = (
    *SOFTMAX,
    *NORMS,
    *BATCH_NORMS,
    *NORM_GRADIENTS,
    *BATCH_NORM_GRADIENTS,
    *SUMS,
    *MOMENTS,
    *VECTOR_NORMS,
    *DISTANCES,
    *EXTREMES,
    *CUMULATIVE,
)
