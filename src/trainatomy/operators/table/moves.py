"""Copies, fills, random numbers, indexing, pooling, sorting.

Operators that launch no kernel, and values that the CPU reads.
"""

from __future__ import annotations

from trainatomy.operators.operator import CUDNN, Operator, family, row

COPIES = family(
    Operator("", "elementwise", 0, "a move", cost="elementwise:pointwise"),
    row("_to_copy clone", launch="copy"),
    row("cat stack", cost="elementwise:joined", launch="copy"),
    row("copy", launch="copy", reads="sources"),
    row("repeat"),
    row("affine_grid_generator", cost="", allocates="elementwise:affine_grid"),
    row("flip", cost="elementwise:rearranged"),
    row("roll", cost="elementwise:rearranged", allocates="elementwise:roll"),
    row("constant_pad_nd slice_backward select_backward", cost="indexing:part_of_zeros"),
    row("im2col col2im", cost="resampling:patches", allocates="indexing:columns"),
    row("repeat_interleave", cost="", allocates="indexing:repeated"),
    row("scatter", launch="index", cost="indexing:scattered"),
    row("masked_scatter", launch="index", cost="indexing:scattered", allocates="indexing:masked_scatter"),
    row("slice_scatter select_scatter diagonal_scatter as_strided_scatter unfold_backward", cost=""),
    row("reflection_pad1d reflection_pad2d pixel_shuffle pixel_unshuffle channel_shuffle", cost=""),
    row("_reshape_copy expand_copy permute_copy", cost=""),
    row("contiguous", launch="copy", group=None, flop=None, why="", cost=""),  # seen whole in inference mode only
)

SHARDS = family(
    Operator("", "elementwise", 0, "a move", reads="sources", cost="elementwise:pointwise"),
    row("fsdp::chunk_cat fsdp::chunk_cat_mixed_dtype fsdp::split_with_sizes_copy"),
    # Its launch is in what FSDP's Python around a collective costs (``timing.launch``).
    row("fsdp::all_gather_copy_in", launch="view", cost="lists:foreach"),
)
"""FSDP2's copies between parameters and the buffers of collectives.

Sources: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, aten/src/ATen/native/cuda/TensorShape.cu, torch
2.9-2.15; since 2.15 ``chunk_cat_mixed_dtype`` (torch/csrc/distributed/fsdp/ChunkCat.h) runs ``chunk_cat``'s kernel.
"""

FILLS = family(
    Operator("", "elementwise", 0, "only written", reads="none", cost="elementwise:fill"),
    row("zero zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full fill"),
    row("arange eye scalar_tensor linspace tril_indices triu_indices"),
)

RANDOM = family(
    Operator("", "elementwise", 0, "random numbers are no arithmetic of the model", reads="none"),
    row("bernoulli uniform normal rand randn randint randperm random exponential", cost="elementwise:fill"),
    row("rand_like randn_like multinomial"),
    row("_standard_gamma _sample_dirichlet", meta="meta:random_like"),
    row("_standard_gamma_grad _dirichlet_grad", meta="meta:random_like"),
)

GATHERS = family(
    Operator("", "elementwise", 0, "rows are picked", reads="rows", launch="index", cost="indexing:gathered"),
    row("index", launch="advanced_index", allocates="indexing:index"),
    row("index_select gather"),
    row("take", launch="pointwise"),
    row("masked_select", sync="shape", allocates="indexing:masked_select"),
    row("masked_scatter_backward", sync="shape", allocates="indexing:masked_scatter_backward"),
    row("_unsafe_index", launch="pointwise", cost=""),
    row("nonzero", sync="shape", reads="all", cost="elementwise:pointwise", allocates="indexing:nonzero"),
    row("embedding", cost="indexing:embedding", allocates="indexing:embedding"),
    row("_embedding_bag", cost="indexing:embedding_bag", reads="all"),
    row("embedding_bag one_hot", group=None, flop=None, why="", reads="all", cost=""),
)

NEGATIVE_LOG_LIKELIHOOD = family(
    Operator("", "elementwise", 0, launch="reduction", cost="indexing:negative_log_likelihood"),
    row("nll_loss_forward nll_loss2d_forward", reads="rows", why="rows are picked", allocates="elementwise:nll_loss"),
    row("nll_loss_backward nll_loss2d_backward", reads="none", why="zeros", allocates="elementwise:nll_loss"),
)

SCATTERS = family(
    Operator("", "elementwise", 1, "additions into the rows", launch="index", cost="indexing:scattered"),
    row(
        "embedding_dense_backward",
        cost="indexing:embedding_backward",
        allocates="indexing:embedding_dense_backward",
    ),
    row("_embedding_bag_backward _embedding_bag_dense_backward", cost="indexing:embedding_bag_backward"),
    row("index_put _index_put_impl", allocates="indexing:index_put"),
    row("index_add scatter_add scatter_reduce"),
    row("index_copy", launch="pointwise"),
    row("_unsafe_index_put put", launch="pointwise", cost=""),
    row("index_fill", launch="pointwise", cost="", reads="sources"),
)

MAX_POOLING = family(
    Operator("", "elementwise", 0, "comparisons in a window", cost="resampling:pooled"),
    row("max_pool2d_with_indices max_pool2d_with_indices_backward"),
    row("max_pool3d_with_indices max_pool3d_with_indices_backward"),
    row("adaptive_max_pool2d", cost=""),
)

AVERAGE_POOLING = family(
    Operator("", "elementwise", 1, "additions in a window", cost="resampling:pooled"),
    row("avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward"),
    row("avg_pool3d avg_pool3d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward"),
    row("avg_pool1d adaptive_avg_pool1d", cost=""),
)

RESAMPLING = family(
    Operator("", cost="resampling:interpolated"),
    row("upsample_nearest2d upsample_nearest2d_backward upsample_nearest3d upsample_nearest3d_backward"),
    row("upsample_bilinear2d upsample_bilinear2d_backward upsample_bicubic2d upsample_bicubic2d_backward"),
    row("upsample_trilinear3d upsample_trilinear3d_backward"),
    row("upsample_linear1d_backward", cost="", allocates="elementwise:linear_gradient"),
    row("grid_sampler_2d grid_sampler_2d_backward", cost="resampling:sampled"),
    row("cudnn_grid_sampler cudnn_affine_grid_generator", cost="", loads=CUDNN),
    row("cudnn_grid_sampler_backward cudnn_affine_grid_generator_backward", cost="", loads=("cudnn_backward",)),
)

SORTING = family(
    Operator("", "elementwise", None, "no formula: comparisons in an order that the data decide", launch="index"),
    row("sort", cost="indexing:sorted_values", allocates="indexing:sort"),
    row("argsort", cost="indexing:sorted_values", group=None, why=""),
    row("_unique2", sync="shape"),
    row("histc", cost="elementwise:pointwise"),
    row("bincount searchsorted"),
    row("unique_dim bucketize", launch="pointwise"),
)

MOVES = (
    *COPIES,
    *SHARDS,
    *FILLS,
    *RANDOM,
    *GATHERS,
    *NEGATIVE_LOG_LIKELIHOOD,
    *SCATTERS,
    *MAX_POOLING,
    *AVERAGE_POOLING,
    *RESAMPLING,
    *SORTING,
)


WITHOUT_KERNEL = family(
    Operator("", kernel=False),
    row("empty empty_like empty_strided empty_permuted new_empty resize set lift_fresh detach"),
    # autograd's, for a gradient that is written in part; the costs of batch norms and of quantised layers contain their
    # empty tensors, priced like pointwise operations
    row("new_empty_strided", launch="view"),
    row("alias view _unsafe_view _reshape_alias expand t transpose permute select slice unsqueeze squeeze"),
    row("as_strided split split_with_sizes unbind chunk diagonal unfold view_as_real view_as_complex"),
    row("record_stream is_same_size is_pinned sym_size _version _has_compatible_shallow_copy_type item"),
    row("fsdp::record_grad_output_stream", launch="view"),  # since torch 2.15; does nothing on a GPU with CUDA
)

READ_BY_CPU = family(
    Operator("", sync="value"),
    row("_local_scalar_dense", cost="elementwise:transfer"),
    row("equal is_nonzero"),
    row("_assert_async", group="elementwise", flop=0, why="a check", sync=""),
)

PYTHON = family(
    Operator("", kernel=False, launch="view"),
    row("python::replicate numpy::concatenate numpy::convert cuda::graph_launch deepspeed::aio"),
)
"""Python of PyTorch's, and work on arrays in host memory, between operations; ``timing.launch`` knows what it costs."""

HOST = (*PYTHON, *WITHOUT_KERNEL, *READ_BY_CPU)
