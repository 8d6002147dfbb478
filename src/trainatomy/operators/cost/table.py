"""Which function says what a call of an operator asks of the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trainatomy.operators.cost import (
    attention,
    batch_norm,
    blockwise,
    convolution,
    lists,
    matmul,
    recurrent,
    tables,
    traffic,
)
from trainatomy.operators.cost.work import NOTHING, Chip, Work
from trainatomy.results.operations import Call

Cost = Callable[[Call, Chip], Work]


def _nothing(call: Call, chip: Chip) -> Work:
    return NOTHING


def _each(cost: Cost, names: str) -> dict[str, Cost]:
    return {f"aten::{name}": cost for name in names.split()}


def _flat(parts: Iterable[dict[str, Cost]]) -> dict[str, Cost]:
    return {name: cost for part in parts for name, cost in part.items()}


COSTS: dict[str, Cost] = _flat(
    [
        _each(
            _nothing,
            "empty empty_like empty_strided new_empty new_empty_strided empty_permuted resize_ set_ detach "
            "detach_ alias view _unsafe_view _reshape_alias expand t transpose permute select slice unsqueeze "
            "squeeze as_strided as_strided_ split unbind split_with_sizes chunk diagonal unfold lift_fresh "
            "record_stream is_same_size _version view_as_real view_as_complex item is_pinned "
            "_has_compatible_shallow_copy_type",
        ),
        _each(matmul.matmul, "mm bmm addmm baddbmm addbmm linear _addmm_activation"),
        _each(matmul.vector_product, "mv dot addmv addr vdot"),
        _each(matmul.grouped, "_grouped_mm"),
        _each(
            attention.attention,
            "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
            "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward "
            "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward",
        ),
        _each(convolution.convolution, "convolution convolution_backward cudnn_convolution"),
        _each(recurrent.recurrent, "_cudnn_rnn _cudnn_rnn_backward"),
        {
            "bitsandbytes::optimizer_update_8bit_blockwise": blockwise.in_8_bits,
            "bitsandbytes::optimizer_update_32bit": blockwise.in_32_bits,
        },
        _each(
            traffic.reduction,
            "sum mean nansum prod norm linalg_vector_norm std var std_mean var_mean amax amin aminmax max min "
            "argmax argmin any all logsumexp",
        ),
        _each(
            traffic.normalisation,
            "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward "
            "native_group_norm native_group_norm_backward _softmax _softmax_backward_data _log_softmax "
            "_log_softmax_backward_data _safe_softmax _weight_norm_interface _weight_norm_interface_backward",
        ),
        _each(
            batch_norm.batch_norm,
            "native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward",
        ),
        _each(
            traffic.fill,
            "zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full arange zero_ fill_ "
            "scalar_tensor rand randn randint randperm linspace eye tril_indices triu_indices bernoulli_ normal_ "
            "uniform_ random_ exponential_",
        ),
        _each(tables.embedding, "embedding"),
        _each(tables.embedding_backward, "embedding_dense_backward"),
        _each(tables.gathered, "index gather index_select take masked_select"),
        _each(
            tables.scattered,
            "index_put index_put_ _index_put_impl_ index_add index_add_ scatter scatter_ scatter_add scatter_add_ "
            "scatter_reduce index_copy index_copy_ masked_scatter",
        ),
        _each(tables.part_of_zeros, "slice_backward select_backward constant_pad_nd"),
        _each(
            tables.negative_log_likelihood,
            "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward",
        ),
        _each(tables.sorted_values, "sort argsort topk cumsum cumprod"),
        _each(
            lists.fused_optimizer,
            "_fused_adamw_ _fused_adam_ _fused_sgd_ _fused_adagrad_",
        ),
        _each(lists.unscale, "_amp_foreach_non_finite_check_and_unscale_"),
    ]
)
"""Operators that are more than their traffic. The rest is priced by ``traffic.pointwise``."""

POINTWISE = frozenset(
    "abs add add_ addcdiv addcdiv_ addcmul addcmul_ _to_copy bitwise_and bitwise_not bitwise_or cat ceil clamp "
    "clamp_ clamp_min clamp_max clone copy_ cos div div_ elu elu_backward eq erf exp exp_ floor floor_divide ge "
    "gelu gelu_backward gt hardtanh isfinite isinf isnan le leaky_relu leaky_relu_backward lerp lerp_ log log1p "
    "logical_and logical_not logical_or lt masked_fill masked_fill_ maximum minimum mul mul_ native_dropout "
    "native_dropout_backward ne neg pow pow_ reciprocal relu relu_ remainder repeat rsqrt rsqrt_ sigmoid "
    "sigmoid_backward sign silu silu_backward silu_ sin softplus softplus_backward sqrt sqrt_ square stack sub "
    "sub_ tanh tanh_backward threshold_backward tril triu where xlogy flip roll mse_loss mse_loss_backward "
    "smooth_l1_loss smooth_l1_loss_backward binary_cross_entropy_with_logits max_pool2d_with_indices "
    "max_pool2d_with_indices_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward avg_pool2d "
    "avg_pool2d_backward upsample_bicubic2d upsample_bilinear2d glu glu_backward _foreach_zero_ "
    "acos expm1 hardtanh_backward logical_and_ log_sigmoid_forward log_sigmoid_backward upsample_bicubic2d_backward "
    "upsample_bilinear2d_backward upsample_nearest2d upsample_nearest2d_backward "
    "rsub histc nonzero _amp_update_scale_".split()
)
"""Operators that are known to be nothing but traffic."""


def work_of(call: Call, chip: Chip) -> Work:
    """What a call asks of the GPU."""
    if call.is_view:
        return NOTHING
    cost = COSTS.get(call.name)
    if cost is not None:
        if not _touches_card(call):
            return NOTHING
        return cost(call, chip)
    if call.name == "aten::_local_scalar_dense" or _crosses(call):
        return traffic.transfer(call, chip) if _touches_card(call) else NOTHING
    if call.name.startswith("aten::_foreach"):
        return lists.foreach(call, chip)
    return traffic.pointwise(call, chip)


def is_known(call: Call) -> bool:
    """Whether the cost of this operator rests on more than the general rule of traffic."""
    short = call.name.removeprefix("aten::")
    return (
        call.is_view
        or call.name in COSTS
        or short in POINTWISE
        or short.startswith("_foreach")
        or short == "_local_scalar_dense"
    )


def _touches_card(call: Call) -> bool:
    return any(not tensor.on_host for tensor in (*call.inputs, *call.outputs))


def _crosses(call: Call) -> bool:
    """A copy between host and card."""
    if call.name not in ("aten::_to_copy", "aten::copy_", "aten::clone"):
        return False
    return len({tensor.on_host for tensor in (*call.inputs, *call.outputs)}) == 2
