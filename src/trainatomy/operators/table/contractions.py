"""Contractions: matrix products and factorisations, convolutions, attention, recurrent layers."""

from __future__ import annotations

from trainatomy.operators.operator import CUDNN, Operator, family, row

_CUBLAS = ("cublas",)
_CUBLASLT = ("cublas", "cublaslt")
"""A bias goes through cuBLASLt's epilogue; ``mm`` and batched products do not use it."""

MATRIX_PRODUCTS = family(
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
    row("_grouped_mm", cost="matmul:grouped_matmul", allocates="matmul:grouped_product", workspaces=()),
    row("_scaled_mm _int_mm", cost="", workspaces=_CUBLASLT),
    row("_scaled_grouped_mm", cost="", loads=(), workspaces=()),
)

# Their kernels call sums, products and the like (aten/src/ATen/native/Distance.cpp, Linear.cpp).
IN_PARTS = family(
    Operator("", "contraction", composite=True, why="counted by its parts"),
    row("_euclidean_dist _trilinear linalg_pinv"),
)

FACTORISATIONS = family(
    Operator("", "contraction", 0, "the FLOP of factorisations are not counted", loads=("cusolver",)),
    row("geqrf", meta="meta:geqrf"),
    row("linalg_qr linalg_householder_product linalg_cholesky_ex"),
    row("_linalg_eigh _linalg_svd", uncounted="cuSOLVER's workspace"),
    row("linalg_matrix_exp", loads=(), uncounted="up to a dozen powers of the matrix, four times as large in backward"),
)

SOLUTIONS = family(
    Operator("", "contraction", why="depends on the algorithm", launch="library", loads=_CUBLAS, workspaces=_CUBLAS),
    row("linalg_lu_solve", allocates="matmul:lu_solve"),
)

CONVOLUTIONS = family(
    Operator("", "contraction", why="convolutions are products of unfolded images", launch="convolution"),
    row(
        "convolution",
        cost="convolution:convolution",
        allocates="convolution:convolution",
        meta="meta:convolution",
        loads=CUDNN,
    ),
    row(
        "convolution_backward",
        cost="convolution:convolution",
        allocates="convolution:convolution_backward",
        meta="meta:convolution_backward",
        loads=("cudnn_backward",),
    ),
    row("cudnn_convolution", cost="convolution:convolution", loads=CUDNN),
    row("convolution_overrideable cudnn_convolution_transpose", loads=CUDNN),
    row("cudnn_convolution_relu cudnn_convolution_add_relu", loads=CUDNN),
    row("_convolution"),
    row("_slow_conv2d_forward", launch="pointwise"),
)

ATTENTION = family(
    Operator(
        "",
        "contraction",
        why="two products with a softmax between them that never leaves the chip",
        launch="attention",
        cost="attention:attention",
    ),
    row("_scaled_dot_product_flash_attention", allocates="attention:flash_forward"),
    row("_scaled_dot_product_flash_attention_backward", allocates="attention:flash_backward"),
    row("_scaled_dot_product_efficient_attention", allocates="attention:efficient_forward"),
    row(
        "_scaled_dot_product_efficient_attention_backward",
        allocates="attention:efficient_backward",
        meta="meta:efficient_attention_backward",
    ),
    row("_scaled_dot_product_cudnn_attention", allocates="attention:cudnn_forward", loads=("cudnn",)),
    row(
        "_scaled_dot_product_cudnn_attention_backward",
        allocates="attention:cudnn_backward",
        loads=("cudnn_backward",),
    ),
    row("_flash_attention_forward _flash_attention_backward", cost=""),
    row("_efficient_attention_forward _efficient_attention_backward", cost=""),
    row("_cudnn_attention_forward _cudnn_attention_backward", cost=""),
    row("flex::attention flex::attention_backward", cost="attention:flex_attention"),
)

# What they allocate: ``allocation.recurrent``, which runs cuDNN's layers whole.
RECURRENT = family(
    Operator("", "contraction", why="products, time step by time step"),
    row("_cudnn_rnn", launch="recurrent", cost="recurrent:recurrent", loads=CUDNN),
    row("_cudnn_rnn_backward", launch="recurrent", cost="recurrent:recurrent", loads=("cudnn_backward",)),
    row("_thnn_fused_lstm_cell _thnn_fused_gru_cell"),
    row("_thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell_backward"),
)

CONTRACTIONS = (*MATRIX_PRODUCTS, *IN_PARTS, *FACTORISATIONS, *SOLUTIONS, *CONVOLUTIONS, *ATTENTION, *RECURRENT)
