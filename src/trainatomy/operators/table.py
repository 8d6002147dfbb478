"""The registry's rows: one for each operator that the package knows.

A family states what its operators share; a row states its names and what differs. ``operator.Operator`` explains the
columns. To add an operator, add a row; a rule or cost function that it names is written in ``operators.allocation`` or
``operators.cost``.

FLOP are counted by the rule of the paper's authors (github.com/spcl/substation, substation/arith_counter.py): an
addition, a multiplication, a division, an exponential, a hyperbolic tangent and a square root are one each; minimum,
maximum, comparisons and moves are none; a reduction is one for each element that goes in. Formulas of the operators:
their definitions (substation/attention.py, substation/transformer.py) where they have one, else PyTorch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainatomy.operators.operator import Operator

Row = tuple[str, dict[str, Any]]

_CUBLAS = ("cublas",)
_CUBLASLT = ("cublas", "cublaslt")  # a bias goes through cuBLASLt's epilogue; ``mm`` and batched products do not use it
_CUDNN = ("cudnn", "convolution")


def row(names: str, **differences: Any) -> Row:
    """Describe the operators ``names`` (separated by spaces) by what differs from their family."""
    return names, differences


def family(shared: Operator, *rows: Row) -> Iterator[Operator]:
    """Yield an operator for each name of ``rows``."""
    for names, differences in rows:
        for name in names.split():
            yield replace(shared, name=name, **differences)


def _products() -> Iterator[Operator]:
    """Contractions: matrix products, convolutions, attention, recurrent layers."""
    yield from family(
        Operator(
            "",
            "contraction",
            why="matrix products",
            launch="matmul",
            cost="matmul:matmul",
            loads=_CUBLAS,
            workspaces=_CUBLAS,
        ),
        row("mm", allocates="matmul:matrix_product"),
        row("addmm", allocates="matmul:matrix_product", workspaces=_CUBLASLT),
        row("_addmm_activation", workspaces=_CUBLASLT),
        row("bmm baddbmm", allocates="matmul:batched_product"),
        row("addbmm"),
        row("mv addmv dot vdot", cost="matmul:vector_product"),
        row("addr", cost="matmul:vector_product", loads=(), workspaces=()),
        row("linear", loads=(), workspaces=()),  # seen whole in inference mode only
        row("_grouped_mm", cost="matmul:grouped_matmul", allocates="grouped:grouped_product", workspaces=()),
        row("_scaled_mm _int_mm", cost="", workspaces=_CUBLASLT),
        row("_scaled_grouped_mm", cost="", loads=(), workspaces=()),
    )
    yield from family(
        Operator("", "contraction", why="convolutions are products of unfolded images", launch="convolution"),
        row(
            "convolution",
            cost="convolution:convolution",
            allocates="convolution:convolution",
            meta="meta:convolution",
            loads=_CUDNN,
        ),
        row(
            "convolution_backward",
            cost="convolution:convolution",
            allocates="convolution:convolution_backward",
            meta="meta:convolution_backward",
            loads=("cudnn_backward",),
        ),
        row("cudnn_convolution", cost="convolution:convolution", loads=_CUDNN),
        row("convolution_overrideable cudnn_convolution_transpose", loads=_CUDNN),
        row("cudnn_convolution_relu cudnn_convolution_add_relu", loads=_CUDNN),
        row("_convolution"),
        row("_slow_conv2d_forward", launch="pointwise"),
    )
    yield from family(
        Operator(
            "",
            "contraction",
            why="two products with a softmax between them that never leaves the chip",
            launch="attention",
            cost="attention:attention",
        ),
        row("_scaled_dot_product_flash_attention", allocates="attention:flash_forward"),
        row("_scaled_dot_product_flash_attention_backward", allocates="attention:flash_backward"),
        row("_scaled_dot_product_efficient_attention", allocates="efficient_attention:efficient_forward"),
        row("_scaled_dot_product_efficient_attention_backward", allocates="efficient_attention:efficient_backward"),
        row("_scaled_dot_product_cudnn_attention", allocates="attention:cudnn_forward", loads=("cudnn",)),
        row(
            "_scaled_dot_product_cudnn_attention_backward",
            allocates="attention:cudnn_backward",
            loads=("cudnn_backward",),
        ),
        row("_flash_attention_forward _flash_attention_backward", cost=""),
        row("_efficient_attention_forward _efficient_attention_backward", cost=""),
        row("_cudnn_attention_forward _cudnn_attention_backward", cost=""),
    )
    yield from family(  # what they allocate: ``allocation.recurrent``, which runs cuDNN's layers whole
        Operator("", "contraction", why="products, time step by time step"),
        row("_cudnn_rnn", cost="recurrent:recurrent", loads=_CUDNN),
        row("_cudnn_rnn_backward", cost="recurrent:recurrent", loads=("cudnn_backward",)),
        row("_thnn_fused_lstm_cell _thnn_fused_gru_cell"),
    )


def _normalisations() -> Iterator[Operator]:
    """Statistical normalisations: softmax, norms, reductions."""
    softmax = "difference, exponential, sum, division"
    yield from family(
        Operator("", "normalisation", 4, softmax, launch="reduction", cost="reduction:normalisation"),
        row("_softmax", allocates="loss:softmax"),
        row("_safe_softmax", allocates="attention:safe_softmax"),
        row(
            "_softmax_backward_data",
            allocates="loss:softmax_backward",
            why="product with the gradient, its sum, product with the sum, difference",
        ),
        row("_log_softmax", allocates="loss:softmax", why="difference, exponential, sum, difference"),
        row(
            "_log_softmax_backward_data",
            allocates="loss:log_softmax_backward",
            meta="gradients:log_softmax_backward",
            why="sum, exponential, product, difference",
        ),
        row("logsumexp", cost="reduction:reduction", why="difference, exponential, sum, difference"),
    )
    forward = "sum, difference, square, its sum, division, scale, shift"
    backward = (
        "nine for the data (scale, sum, difference, product, its sum, division, two additions, product), three for "
        "scale and shift (sum, product, its sum)"
    )
    yield from family(
        Operator("", "normalisation", 7, forward, launch="normalisation", cost="reduction:normalisation"),
        row("native_layer_norm", allocates="normalisation:layer_norm"),
        row("native_group_norm", allocates="normalisation:group_norm"),
        row("native_batch_norm", cost="batch_norm:batch_norm", allocates="normalisation:batch_norm"),
        row("cudnn_batch_norm", cost="batch_norm:batch_norm", allocates="normalisation:batch_norm", loads=_CUDNN),
        row("_native_batch_norm_legit _batch_norm_with_update", cost=""),
        row(
            "_fused_rms_norm",
            flop=4,
            why="square, its sum, division, scale",
            allocates="normalisation:layer_norm",
        ),
    )
    yield from family(
        Operator("", "normalisation", 12, backward, launch="normalisation", cost="reduction:normalisation"),
        row(
            "native_layer_norm_backward",
            allocates="normalisation:layer_norm_backward",
            meta="gradients:layer_norm_backward",
        ),
        row("native_group_norm_backward", allocates="normalisation:group_norm_backward"),
        row(
            "native_batch_norm_backward",
            cost="batch_norm:batch_norm",
            allocates="normalisation:batch_norm",
            meta="gradients:batch_norm_backward",
        ),
        row(
            "cudnn_batch_norm_backward",
            cost="batch_norm:batch_norm",
            allocates="normalisation:batch_norm",
            loads=("cudnn_backward",),
        ),
        row("batch_norm_backward", cost=""),
        row(
            "_fused_rms_norm_backward",
            flop=8,
            why="as layer normalisation without means: six for the data, two for the scale",
            allocates="normalisation:layer_norm_backward",
        ),
    )
    yield from family(
        Operator("", "normalisation", 1, "a reduction", launch="reduction", cost="reduction:reduction"),
        # Gradients of biases are sums: the authors count them with the biases.
        row("sum", group="elementwise", allocates="reduction:SUM"),
        row("nansum", group="elementwise", allocates="reduction:PRODUCT", launch="pointwise"),
        row("mean", allocates="reduction:SUM"),
        row("prod", allocates="reduction:PRODUCT"),
        row("trace", launch="pointwise", cost=""),
    )
    moments = "difference, square, their sum"
    yield from family(
        Operator("", "normalisation", 3, moments, launch="reduction", cost="reduction:reduction"),
        row("var var_mean std", allocates="reduction:MOMENTS"),
        row("std_mean", allocates="reduction:MOMENTS", launch="pointwise"),
    )
    yield from family(
        Operator("", "normalisation", 2, "square and sum", cost="reduction:reduction"),
        row("linalg_vector_norm", allocates="reduction:NORM", launch="reduction"),
        row("norm", allocates="reduction:NORM"),
        row("native_norm", cost=""),
        row("_weight_norm_interface", cost="reduction:normalisation"),
        row("_weight_norm_interface_backward", group=None, flop=None, why="", cost="reduction:normalisation"),
    )
    yield from family(
        Operator("", "normalisation", 0, "comparisons", launch="reduction", cost="reduction:reduction"),
        row("max min", allocates="reduction:extremum"),
        row("amax amin", allocates="reduction:EXTREMUM"),
        row("argmax argmin", allocates="reduction:EXTREMUM_WITH_INDEX"),
        row("any all", allocates="reduction:LOGICAL"),
        row("aminmax", launch="pointwise"),
        row("count_nonzero cummax cummin", launch="pointwise", cost=""),
        row("topk", allocates="indexing:topk", launch="index", cost="indexing:sorted_values"),
    )
    yield from family(
        Operator("", "normalisation", 1, "an addition or product"),
        row("cumsum", allocates="indexing:cumulative_sum", launch="index", cost="indexing:sorted_values"),
        row("cumprod", cost="indexing:sorted_values"),
        row("logcumsumexp"),
    )


def _elementwise() -> Iterator[Operator]:
    """Arithmetic, comparisons, activation functions, dropout and losses, element by element."""
    yield from family(
        Operator("", "elementwise", 1, "one operation", cost="elementwise:pointwise"),
        row("add sub rsub mul div neg reciprocal remainder floor_divide pow square sqrt"),
        row("exp expm1 log log1p sin cos acos erf"),
        row("exp2 log2 log10 tan asin atan atan2 sinh cosh erfinv fmod hypot logaddexp float_power", cost=""),
        row("cumulative_trapezoid", cost=""),
        row("rsqrt", flop=2, why="square root and division"),
        row("addcmul addcdiv lerp", flop=3, why="product and addition, scaled"),
        row("xlogy", group=None, flop=None, why=""),
    )
    yield from family(
        Operator("", "elementwise", 0, "comparisons, selections, signs, roundings", cost="elementwise:pointwise"),
        row("eq ne lt le gt ge isfinite maximum minimum clamp clamp_min clamp_max abs sign floor ceil tril triu"),
        row("logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not"),
        row("isnan", launch="reduction"),
        row("isinf", launch="reduction", allocates="elementwise:isinf"),
        row("where", launch="index"),
        row("masked_fill", launch="index", reads="sources"),
        row("sgn round trunc signbit nan_to_num", cost=""),
        row("logical_xor bitwise_xor bitwise_left_shift bitwise_right_shift __and__ __or__", cost=""),
    )
    yield from family(
        Operator("", "elementwise", activation="forward", cost="elementwise:pointwise"),
        row("relu hardtanh leaky_relu", flop=0, why="a comparison"),
        row("relu6 threshold", flop=0, why="a comparison", cost=""),
        row("tanh", flop=1, why="the function"),
        row("sigmoid log_sigmoid_forward", flop=4, why="negation, exponential, addition, division"),
        row("hardsigmoid", flop=4, why="negation, exponential, addition, division", cost=""),
        row("silu softplus elu", flop=5, why="negation, exponential, addition, division, product"),
        row("mish hardswish", flop=5, why="negation, exponential, addition, division, product", cost=""),
        row("gelu", flop=5, why="two products, the error function, an addition, a product"),
        row("glu", group=None, activation=""),
    )
    yield from family(
        Operator("", "elementwise", activation="backward", cost="elementwise:pointwise"),
        row("threshold_backward hardtanh_backward leaky_relu_backward", flop=1, why="product with a comparison"),
        row("tanh_backward sigmoid_backward log_sigmoid_backward", flop=3, why="square, difference, product"),
        row("hardsigmoid_backward", flop=3, why="square, difference, product", cost="", meta="gradients:as_both"),
        row("silu_backward", flop=9, why="sigmoid 4, its derivative and products 5"),
        row("softplus_backward", flop=9, why="sigmoid 4, its derivative and products 5", meta="gradients:as_both"),
        row("elu_backward", flop=9, why="sigmoid 4, its derivative and products 5", meta="gradients:elu_backward"),
        row("mish_backward", flop=9, why="sigmoid 4, its derivative and products 5", cost=""),
        row(
            "hardswish_backward",
            flop=9,
            why="sigmoid 4, its derivative and products 5",
            cost="",
            meta="gradients:as_both",
        ),
        row("gelu_backward", flop=11, why="distribution 4, density 4, their sum 2, product with the gradient"),
        row("glu_backward", group=None, activation="", meta="gradients:contiguous"),
    )
    yield from family(
        Operator("", "elementwise", 1, "product with the mask", launch="dropout", cost="elementwise:pointwise"),
        row("native_dropout", allocates="elementwise:native_dropout"),
        row("native_dropout_backward"),
        row("_masked_scale", launch="pointwise", cost=""),
    )
    yield from family(
        Operator("", "elementwise", 2, "difference, square", cost="elementwise:pointwise"),
        row("mse_loss smooth_l1_loss", allocates="loss:elementwise_loss"),
        row("huber_loss", allocates="loss:huber_loss", cost=""),
    )
    yield from family(
        Operator("", "elementwise", 3, "difference, two products", meta="gradients:contiguous"),
        row("mse_loss_backward smooth_l1_loss_backward", cost="elementwise:pointwise"),
        row("huber_loss_backward"),
    )
    yield from family(
        Operator(""),
        row(
            "binary_cross_entropy_with_logits",
            cost="elementwise:pointwise",
            allocates="loss:binary_cross_entropy_with_logits",
        ),
        row("binary_cross_entropy", allocates="loss:binary_cross_entropy"),
        row("_ctc_loss", allocates="loss:ctc_loss"),
        row("_ctc_loss_backward", allocates="loss:ctc_loss_backward", meta="meta:contiguous_gradient"),
        row("multi_margin_loss_backward multilabel_margin_loss_backward", meta="meta:contiguous_gradient"),
        row("fake_quantize_per_tensor_affine_cachemask", meta="meta:fake_quantize"),
        row("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", meta="meta:fake_quantize"),
        row("fake_quantize_per_channel_affine_cachemask", meta="meta:fake_quantize"),
    )


def _moves() -> Iterator[Operator]:
    """Copies, fills, random numbers, indexing, pooling, sorting."""
    yield from family(
        Operator("", "elementwise", 0, "a move", cost="elementwise:pointwise"),
        row("_to_copy clone cat stack", launch="copy"),
        row("copy", launch="copy", reads="sources"),
        row("flip repeat"),
        row("roll", allocates="elementwise:roll"),
        row("constant_pad_nd slice_backward select_backward", cost="indexing:part_of_zeros"),
        row("im2col col2im", cost="", allocates="indexing:columns"),
        row("repeat_interleave", cost="", allocates="indexing:repeated"),
        row("scatter masked_scatter", launch="index", cost="indexing:scattered"),
        row("slice_scatter select_scatter diagonal_scatter as_strided_scatter unfold_backward", cost=""),
        row("reflection_pad1d reflection_pad2d pixel_shuffle pixel_unshuffle channel_shuffle", cost=""),
        row("_reshape_copy expand_copy permute_copy", cost=""),
        row("contiguous", launch="copy", group=None, flop=None, why="", cost=""),  # seen whole in inference mode only
    )
    yield from family(
        Operator("", "elementwise", 0, "only written", reads="none", cost="elementwise:fill"),
        row("zero zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full fill"),
        row("arange eye scalar_tensor linspace tril_indices triu_indices"),
    )
    yield from family(
        Operator("", "elementwise", 0, "random numbers are no arithmetic of the model", reads="none"),
        row("bernoulli uniform normal rand randn randint randperm random exponential", cost="elementwise:fill"),
        row("rand_like randn_like multinomial"),
    )
    yield from family(
        Operator("", "elementwise", 0, "rows are picked", reads="rows", launch="index", cost="indexing:gathered"),
        row("index", allocates="indexing:index"),
        row("index_select gather"),
        row("take", launch="pointwise"),
        row("masked_select", sync="shape"),
        row("_unsafe_index", launch="pointwise", cost=""),
        row("nonzero", sync="shape", reads="all", cost="elementwise:pointwise"),
        row("embedding", cost="indexing:embedding", allocates="embedding:embedding"),
        row("embedding_bag one_hot", group=None, flop=None, why="", reads="all", cost=""),
    )
    yield from family(
        Operator("", "elementwise", 0, launch="reduction", cost="indexing:negative_log_likelihood"),
        row("nll_loss_forward nll_loss2d_forward", reads="rows", why="rows are picked", allocates="loss:nll_loss"),
        row("nll_loss_backward nll_loss2d_backward", reads="none", why="zeros", allocates="loss:nll_loss"),
    )
    yield from family(
        Operator("", "elementwise", 1, "additions into the rows", launch="index", cost="indexing:scattered"),
        row(
            "embedding_dense_backward",
            cost="indexing:embedding_backward",
            allocates="embedding:embedding_dense_backward",
        ),
        row("index_put _index_put_impl", allocates="indexing:index_put"),
        row("index_add scatter_add scatter_reduce"),
        row("index_copy", launch="pointwise"),
        row("_unsafe_index_put put", launch="pointwise", cost=""),
        row("index_fill", launch="pointwise", cost="", reads="sources"),
    )
    yield from family(
        Operator("", "elementwise", 0, "comparisons in a window", cost="elementwise:pointwise"),
        row("max_pool2d_with_indices max_pool2d_with_indices_backward"),
        row("max_pool3d_with_indices adaptive_max_pool2d", cost=""),
    )
    yield from family(
        Operator("", "elementwise", 1, "additions in a window", cost="elementwise:pointwise"),
        row("avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward"),
        row("avg_pool1d avg_pool3d adaptive_avg_pool1d", cost=""),
    )
    yield from family(
        Operator("", cost="elementwise:pointwise"),
        row("upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d_backward"),
        row("upsample_bicubic2d upsample_bicubic2d_backward"),
        row("cudnn_grid_sampler cudnn_affine_grid_generator", cost="", loads=_CUDNN),
        row("cudnn_grid_sampler_backward cudnn_affine_grid_generator_backward", cost="", loads=("cudnn_backward",)),
    )
    data = "no formula: comparisons in an order that the data decide"
    yield from family(
        Operator("", "elementwise", None, data, launch="index"),
        row("sort", cost="indexing:sorted_values", allocates="indexing:sort"),
        row("argsort", cost="indexing:sorted_values", group=None, why=""),
        row("_unique2", sync="shape"),
        row("histc", cost="elementwise:pointwise"),
        row("bincount searchsorted"),
        row("unique_dim bucketize", launch="pointwise"),
    )


def _lists() -> Iterator[Operator]:
    """Optimizers and gradient scaling; other ``_foreach_`` forms follow from the plain rows."""
    adam = "decay 1, first moment 3, second moment 4, root and its correction 3, step 3 (torch.optim.AdamW)"
    adagrad = "square and sum 2, root and its guard 2, step 3 (torch.optim.Adagrad)"
    yield from family(  # gradients are written only where a gradient scaler hands over its scale
        Operator("", "elementwise", launch="list", cost="lists:fused_optimizer", read_only_list=1),
        row("_fused_adamw_ _fused_adam_", flop=14, why=adam),
        row("_fused_sgd_", flop=4, why="momentum 2, step 2 (torch.optim.SGD)", meta="meta:in_place"),
        row("_fused_adagrad_", flop=7, why=adagrad, meta="meta:in_place"),
    )
    yield from family(
        Operator("", launch="list", cost="lists:foreach"),
        row("_foreach_copy", group="elementwise", flop=0, why="a move", reads="sources"),
        row("_foreach_max", group="normalisation", flop=0, why="comparisons", allocates="optimizer:foreach_max"),
        row("_foreach_norm", group="normalisation", flop=2, why="square and sum", allocates="optimizer:foreach_norm"),
    )
    yield from family(
        Operator("", "elementwise", 1, "unscaling of gradients"),
        row("_amp_foreach_non_finite_check_and_unscale", launch="list", cost="lists:unscale"),
        row("_amp_update_scale", cost="elementwise:pointwise"),
    )
    quantised = "no formula: the arithmetic of quantised states is the library's own"
    yield from family(  # ``sync_gpu`` after each parameter: bitsandbytes/optim/optimizer.py, 0.50
        Operator("", "elementwise", None, quantised, launch="library", sync="always"),
        row("bitsandbytes::optimizer_update_32bit", cost="bitsandbytes:update_32bit"),
        row("bitsandbytes::optimizer_update_8bit_blockwise", cost="bitsandbytes:update_8bit"),
    )


def _communication() -> Iterator[Operator]:
    """Collectives (``c10d::…``, ``_c10d_functional::…``): none yet, since one GPU is simulated."""
    yield from ()


def _without_kernel() -> Iterator[Operator]:
    """Operators that launch no kernel, and values that the CPU reads."""
    yield from family(
        Operator("", kernel=False),
        row("empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize set lift_fresh detach"),
        row("alias view _unsafe_view _reshape_alias expand t transpose permute select slice unsqueeze squeeze"),
        row("as_strided split split_with_sizes unbind chunk diagonal unfold view_as_real view_as_complex"),
        row("record_stream is_same_size is_pinned sym_size _version _has_compatible_shallow_copy_type item"),
    )
    yield from family(
        Operator("", sync="value"),
        row("_local_scalar_dense", cost="elementwise:transfer"),
        row("equal is_nonzero"),
        row("_assert_async", group="elementwise", flop=0, why="a check", sync=""),
    )


OPERATORS: dict[str, Operator] = {}
"""The row of each operator by its name."""

for _operator in (
    *_products(),
    *_normalisations(),
    *_elementwise(),
    *_moves(),
    *_lists(),
    *_communication(),
    *_without_kernel(),
):
    if _operator.name in OPERATORS:
        raise ValueError(f"operators/table.py describes {_operator.name} twice")
    OPERATORS[_operator.name] = _operator
